"""Z in eight bits: the Triton functions against the twin in kernels/gemm/epilogue.py.

Steps are powers of two and a value's place in one is rounded to a 256th of it, so that kernel and twin
keep the same bytes of the same Z.
"""

import math

import pytest
import torch
from with_triton import tl, triton

from loka.kernels.gemm.epilogue import Activation, Epilogue, rounded
from loka.kernels.gemm.triton import rounded as kernels
from loka.kernels.triton import pack

pytestmark = pytest.mark.usefixtures("poisoned_memory")

inverse_of_power, magnitude_bits = pack.inverse_of_power, pack.magnitude_bits
step_of, to_byte = kernels.step_of, kernels.to_byte


@triton.jit
def _round(z_ptr, values_ptr, steps_ptr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    place = row * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(z_ptr + place)
    step = step_of(tl.max(magnitude_bits(z), axis=0).to(tl.float32, bitcast=True))
    tl.store(values_ptr + place, to_byte(z, inverse_of_power(step)))
    tl.store(steps_ptr + row, step)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, and what is tested
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_bytes_and_steps_are_those_of_the_twin(device):
    """A NaN and an infinity make their block NaN; zeros stay zeros."""
    z = torch.randn(13, 128, generator=torch.Generator().manual_seed(0)).to(device)
    z[3], z[5], z[7] = 0, z[5] * 1e17, z[7] * 1e-30
    z[9, 70], z[11, 5] = math.nan, math.inf
    z[2] = 0
    z[2, 17] = 1e4  # all of a block's energy in one value
    values = torch.empty(z.shape, dtype=torch.uint8, device=device)
    steps = torch.empty(13, 1, device=device)
    _round[(13,)](z, values, steps, BLOCK=128)
    expected = rounded(z, Epilogue(block=128, eps=1e-6, activation=Activation.NONE))
    torch.testing.assert_close(steps, expected.steps, rtol=0, atol=0, equal_nan=True)
    known = (~expected.steps.isnan() & (expected.steps > 0)).flatten()
    assert known.tolist() == [row not in (3, 9, 11) for row in range(13)]
    assert torch.equal(values[known], expected.values[known])
