"""Z in eight bits: the Triton functions and the GEMM that keeps it, against the twins in
kernels/gemm/epilogue.py.

Steps are powers of two and a value's place in one is rounded to a 256th of it, so that kernel and twin
keep the same bytes of the same Z, and backward starts from the same values.
"""

from __future__ import annotations

import math

import pytest
import torch
from cases import on_gpu_or_cpu
from test_triton_gemm import CONFIGS, EXACT, SCALE_OUT, operands
from test_triton_gemm import epilogue as block_norm

from loka.kernels.gemm.epilogue import empty_rounded, keep_rounded, restored

triton = pytest.importorskip("triton", reason="needs triton (its interpreter on a CPU)")
tl = pytest.importorskip("triton.language")
gemm = pytest.importorskip("loka.kernels.gemm.triton.gemm")
pack = pytest.importorskip("loka.kernels.triton.pack")
rounded = pytest.importorskip("loka.kernels.gemm.triton.rounded")
pytestmark = pytest.mark.usefixtures("poisoned_memory")

inverse_of_power, magnitude_bits = pack.inverse_of_power, pack.magnitude_bits
from_byte, step_of, to_byte = rounded.from_byte, rounded.step_of, rounded.to_byte


@triton.jit
def _there_and_back(z_ptr, values_ptr, steps_ptr, back_ptr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    place = row * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(z_ptr + place)
    step = step_of(tl.max(magnitude_bits(z), axis=0).to(tl.float32, bitcast=True))
    byte = to_byte(z, inverse_of_power(step))
    tl.store(values_ptr + place, byte)
    tl.store(steps_ptr + row, step)
    tl.store(back_ptr + place, from_byte(byte, step))


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, and what is tested
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_bytes_and_steps_are_those_of_the_twin(device: torch.device) -> None:
    """A NaN and an infinity make their block NaN; zeros stay zeros."""
    z = torch.randn(13, 128, generator=torch.Generator().manual_seed(0)).to(device)
    z[3], z[5], z[7] = 0, z[5] * 1e30, z[7] * 1e-30
    z[9, 70], z[11, 5] = math.nan, math.inf
    z[2] = 0
    z[2, 17] = 1e4  # all of a block's energy in one value
    of = block_norm(128)
    found, expected = (empty_rounded(13, 128, of, device) for _ in range(2))
    back = torch.empty_like(z)
    _there_and_back[(13,)](z, found.values, found.steps, back, BLOCK=128)
    keep_rounded(z, of, expected)
    torch.testing.assert_close(found.steps, expected.steps, rtol=0, atol=0, equal_nan=True)
    known = (~expected.steps.isnan() & (expected.steps > 0)).flatten()
    assert known.tolist() == [row not in (3, 9, 11) for row in range(13)]
    assert torch.equal(found.values[known], expected.values[known])
    torch.testing.assert_close(back, restored(expected, of), rtol=0, atol=0, equal_nan=True)


GEMM_SHAPES = on_gpu_or_cpu(
    [(1, 16, 64, 64), (70, 208, 192, 64), (150, 144, 384, 128), (517, 208, 512, 256)],
    [(70, 80, 192, 64), (3, 48, 384, 128), (70, 48, 256, 256)],
)


@pytest.mark.parametrize("name", [*CONFIGS, *EXACT])
@pytest.mark.parametrize("shape", GEMM_SHAPES, ids=str)
def test_the_gemm_keeps_what_its_z_implies(
    name: str, shape: tuple[int, int, int, int], device: torch.device
) -> None:
    """Its bytes are of float32, Z is rounded to bfloat16: a half-step of both apart, and a step where the
    largest of a block lies at a power of two. Out of the same launch come the same results."""
    rows, inner, columns, block = shape
    if name in ("whole", "loading warps") and device.type == "cuda":
        pytest.skip("no configuration that keeps anything is chosen there")
    a, w = (t for t in operands(rows, inner, columns))
    of = block_norm(block)
    options = {"config": {**CONFIGS, **EXACT}[name], "fast": name not in EXACT}
    data = [t.to(device) for t in (a.data, w.data, a.scale.view(1), w.scale.view(1))]
    scale_out = torch.tensor([SCALE_OUT], device=device)
    into = empty_rounded(rows, columns, of, device)
    out, z = gemm.gemm_produce_fused(*data, of, scale_out=scale_out, keep=True, **options)
    again, nothing = gemm.gemm_produce_fused(*data, of, scale_out=scale_out, keep=False, into=into, **options)
    assert nothing is None
    assert torch.equal(out.view(torch.uint8), again.view(torch.uint8))
    steps = into.steps.repeat_interleave(block, dim=1)
    close = restored(into, of)
    apart = (close - z.float()).abs()
    assert (apart <= steps * (0.5 + 2**-8) + z.float().abs() * 2.0**-8).all()
    largest = z.float().abs().view(rows, -1, block).amax(dim=2)
    some = largest > 0
    assert (into.steps[some] * 127 >= largest[some] * (1 - 2**-8)).all()
    assert (into.steps[some] * 63.5 <= largest[some] * (1 + 2**-8)).all()
    assert (close[3 % rows] == 0).all()


def test_a_nan_in_the_gemm_is_kept(device: torch.device) -> None:
    a, w = operands(70, 144, 256)
    a.data[7, 100] = torch.nan
    into = empty_rounded(70, 256, block_norm(64), device)
    data = [t.to(device) for t in (a.data, w.data, a.scale.view(1), w.scale.view(1))]
    gemm.gemm_produce_fused(*data, block_norm(64), scale_out=None, keep=False, into=into)
    assert into.steps.isnan().any(1).nonzero().tolist() == [[7]]
    assert into.steps[7].isnan().all()
