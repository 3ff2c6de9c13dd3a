import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from loka.core.recipe import Format
from loka.kernels.gemm.epilogue import Activation, Epilogue, apply_epilogue, inverse_rms, restored, rounded
from loka.kernels.gemm.normed_gemm import BLOCKS, normed_data
from loka.nn import BlockNorm

ACTIVATED = {
    Activation.NONE: torch.clone,
    Activation.HARD_SWISH: functional.hardswish,
    Activation.RELU: functional.relu,
    Activation.SWISH: functional.silu,
    Activation.GELU: functional.gelu,
}


def of_block(block, activation=Activation.NONE):
    return Epilogue(block=block, eps=1e-6, activation=activation)


@pytest.mark.parametrize("activation", list(Activation), ids=str)
def test_it_computes_what_the_modules_do(activation):
    torch.manual_seed(0)
    z = torch.randn(11, 72)  # three blocks of 24
    expected = ACTIVATED[activation](BlockNorm(72, 24, eps=1e-6)(z))
    torch.testing.assert_close(apply_epilogue(z, of_block(24, activation)), expected)


@given(st.integers(0, 2**31), st.sampled_from(BLOCKS), st.sampled_from(Activation))
@settings(max_examples=60)
def test_the_scale_is_of_a_bound_that_holds_whatever_the_data(seed, block, activation):
    """|x| <= sqrt(b) up to float32's rounding of the norm, and so nothing saturates."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(5, 2 * block, generator=generator)
    z *= 10.0 ** (36 * torch.rand(5, 1, generator=generator) - 18)
    z[1], z[2] = 0, 0
    z[2, 7] = -1e15
    epilogue = of_block(block, activation)
    values = apply_epilogue(z, epilogue)
    assert values.abs().max().item() <= math.sqrt(block) * (1 + 1e-6)
    assert epilogue.scale * Format.E4M3.max >= math.sqrt(block) * (1 + 1e-6) > epilogue.scale / 2 * 224
    close = normed_data(z, epilogue).float() * epilogue.scale
    # Half a step of three bits of mantissa, or of the smallest number.
    assert ((close - values).abs() <= (values.abs() / 16).clamp_min(epilogue.scale * 2.0**-10)).all()


@settings(max_examples=60)
@given(st.integers(-60, 60), st.integers(0, 2**32 - 1), st.sampled_from([16, 64, 112]))
def test_restored_within_half_a_step_and_with_its_sign(exponent, seed, features):
    """Half a step, and a 512th for the rounding to 256ths; the largest of a block has 63.5 to 127 steps."""
    z = torch.randn(3, features, generator=torch.Generator().manual_seed(seed)).double().mul(2.0**exponent)
    z = z.float()
    z[1] = 0
    found = rounded(z, of_block(16))
    close = restored(found, of_block(16))
    steps = found.steps.repeat_interleave(16, dim=1)[:, :features]
    assert ((close - z).abs() <= steps * (0.5 + 2**-9)).all()
    clear = z.abs() > steps / 512  # a 512th above zero is rounded to it
    assert torch.equal(close.sign()[clear], z.sign()[clear])
    assert (close[1] == 0).all(), "a block of zeros"
    for place, block in enumerate(z.split(16, dim=1)):
        largest, step = block.abs().amax(dim=1), found.steps[:, place]
        some = largest > 0
        assert (step[some] * 127 >= largest[some]).all()
        assert (step[some] * 63.5 < largest[some]).all()
        assert (torch.frexp(step[some])[0] == 0.5).all()


def test_normal_values_lie_41_db_above_the_noise():
    """The largest of a block of 256 is between 2 and 4: steps of 2^-5, and s^2 / 12 of noise."""
    y = torch.randn(8000, 256, generator=torch.Generator().manual_seed(0)).clamp(-3.9, 3.9)
    y[:, 0] = 3
    close = restored(rounded(y, of_block(256)), of_block(256))
    noise = (close - y)[:, 1:].square().mean().item()
    assert noise == pytest.approx(2.0**-10 / 12, rel=0.01)
    assert -10 * math.log10(noise) == pytest.approx(41, abs=0.2)


def test_what_is_not_finite_is_nan_in_its_block_alone():
    """1e30 is finite, and its square is not; 1e36 has no step either."""
    z = torch.randn(5, 128)
    z[1, 70], z[2, 5], z[3, 5], z[4, 5] = math.nan, math.inf, 1e36, 1e30
    expected = torch.zeros(5, 128, dtype=torch.bool)
    expected[1, 64:], expected[2:, :64] = True, True
    for activation in Activation:
        of = of_block(64, activation)
        assert torch.equal(restored(rounded(z, of), of).isnan(), expected)
        assert torch.equal(normed_data(z, of).float().isnan(), expected)
        assert torch.equal(inverse_rms(z, of).isnan(), expected[:, ::64])
