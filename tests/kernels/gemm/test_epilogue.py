"""The twin of the epilogues against PyTorch's own modules, and Z in eight bits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from loka.core.recipe import Format
from loka.kernels.gemm.epilogue import (
    NO_PARAMETERS,
    Activation,
    Epilogue,
    Norm,
    Parameters,
    Rounded,
    apply_epilogue,
    cast_given,
    empty_rounded,
    keep_rounded,
    may_round,
    restored,
)
from loka.nn import BlockNorm

ACTIVATED = {
    Activation.NONE: torch.clone,
    Activation.HARD_SWISH: functional.hardswish,
    Activation.RELU: functional.relu,
    Activation.SWISH: functional.silu,
    Activation.GELU: functional.gelu,
}


@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize("norm", list(Norm), ids=str)
@pytest.mark.parametrize("activation", list(Activation), ids=str)
def test_it_computes_what_the_modules_do(norm: Norm, activation: Activation, parameters: bool) -> None:
    torch.manual_seed(0)
    features = 72  # three blocks of 24
    z = torch.randn(11, features)
    bias, gamma, beta = (torch.randn(features) if parameters else None for _ in range(3))
    epilogue = Epilogue(norm=norm, block=24 if norm is Norm.BLOCK else 0, eps=1e-6, activation=activation)
    y = z if bias is None else z + bias
    if norm is Norm.BLOCK:
        y = BlockNorm(features, 24, eps=1e-6)(y)
    elif norm is Norm.RMS:
        y = functional.rms_norm(y, [features], eps=1e-6)
    elif norm is Norm.LAYER:
        y = functional.layer_norm(y, [features], eps=1e-6)
    if gamma is not None and beta is not None:
        y = y * gamma + beta
    torch.testing.assert_close(
        apply_epilogue(z, epilogue, Parameters(bias, gamma, beta)), ACTIVATED[activation](y)
    )


@given(st.integers(0, 2**31), st.integers(1, 80), st.sampled_from(Activation))
@settings(max_examples=100)
def test_a_block_norm_bounds_what_follows(seed: int, block: int, activation: Activation) -> None:
    """|x| <= sqrt(b) up to float32's rounding of the norm, whatever the data."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(5, 70, generator=generator) * 10.0 ** (40 * torch.rand(5, 1, generator=generator) - 20)
    z[1], z[2] = 0, 0
    z[2, 7] = -1e15
    epilogue = Epilogue(norm=Norm.BLOCK, block=block, eps=1e-6, activation=activation)
    values = apply_epilogue(z, epilogue, NO_PARAMETERS)
    assert values.abs().max().item() <= math.sqrt(block) * (1 + 1e-6)


def test_what_is_cast_is_within_half_a_step_saturates_or_is_nan() -> None:
    torch.manual_seed(0)
    scale, values = torch.tensor([2.0**-4]), torch.randn(200, 50)
    floor = scale * Format.E4M3.smallest_subnormal / 2
    low = cast_given(values, scale).float() * scale
    assert bool(((low - values).abs() <= values.abs() * 2.0**-4 + floor).all())
    edges = cast_given(torch.tensor([29.0, -1e30, math.inf, -math.inf, math.nan]), scale).float() * scale
    assert edges[:2].tolist() == [28.0, -28.0]
    assert bool(edges[2:].isnan().all())


def of_block(block: int) -> Epilogue:
    return Epilogue(norm=Norm.BLOCK, block=block, eps=1e-6)


def kept(z: torch.Tensor, epilogue: Epilogue) -> Rounded:
    into = empty_rounded(*z.shape, epilogue, z.device)
    keep_rounded(z, epilogue, into)
    return into


@settings(max_examples=60)
@given(st.integers(-90, 100), st.integers(0, 2**32 - 1), st.sampled_from([1, 16, 100]))
def test_restored_within_half_a_step_and_with_its_sign(exponent: int, seed: int, features: int) -> None:
    """Half a step, and a 512th for the rounding to 256ths; the largest of a block has 63.5 to 127 steps, in
    the range of steps that are not the least."""
    z = torch.randn(3, features, generator=torch.Generator().manual_seed(seed)).double().mul(2.0**exponent)
    z = z.float()
    z[1] = 0
    found = kept(z, of_block(16))
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


def test_normal_values_lie_41_db_above_the_noise() -> None:
    """The largest of a block of 256 is between 2 and 4: steps of 2^-5, and s^2 / 12 of noise."""
    y = torch.randn(8000, 256, generator=torch.Generator().manual_seed(0)).clamp(-3.9, 3.9)
    y[:, 0] = 3
    close = restored(kept(y, of_block(256)), of_block(256))
    noise = (close - y)[:, 1:].square().mean().item()
    assert noise == pytest.approx(2.0**-10 / 12, rel=0.01)
    assert -10 * math.log10(noise) == pytest.approx(41, abs=0.2)


def test_what_is_not_finite_is_nan_in_its_block_alone() -> None:
    z = torch.randn(4, 128)
    z[1, 70], z[2, 5], z[3, 5] = math.nan, math.inf, 1e36
    bad = restored(kept(z, of_block(64)), of_block(64)).isnan()
    expected = torch.zeros(4, 128, dtype=torch.bool)
    expected[1, 64:], expected[2, :64], expected[3, :64] = True, True, True
    assert torch.equal(bad, expected)


def test_where_z_may_be_kept_in_eight_bits() -> None:
    assert may_round(of_block(64), 4096, bias=False)
    assert may_round(Epilogue(norm=Norm.RMS), 256, bias=False)
    assert not may_round(Epilogue(norm=Norm.RMS), 257, bias=False), "steps are too coarse for a wide norm"
    assert not may_round(of_block(64), 4096, bias=True), "a sign may change"
    assert not may_round(Epilogue(norm=Norm.RMS, beta=True), 256, bias=False)
    assert not may_round(Epilogue(norm=Norm.LAYER), 256, bias=False)
    assert not may_round(Epilogue(), 256, bias=False)
