import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.core.numerics.reference import dequantize, quantize, scaled_mm
from loka.core.recipe import Cast, Format, Granularity

CASTS = [Cast(f, g, p) for f in Format for g in Granularity for p in (False, True)]


def values(rows, columns, seed, spread):
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, columns, generator=generator)
    return normal * torch.exp(spread * torch.randn(rows, columns, generator=generator))


@settings(max_examples=60)
@given(
    rows=st.integers(1, 200),
    columns=st.integers(1, 300),
    seed=st.integers(0, 10**6),
    spread=st.floats(0, 4),
    exponent=st.integers(-30, 30),
    cast=st.sampled_from(CASTS),
)
def test_error_is_at_most_half_a_step(rows, columns, seed, spread, exponent, cast):
    hp = values(rows, columns, seed, spread) * 10.0**exponent
    quantized = quantize(hp, cast)
    restored = dequantize(quantized)
    scale = restored.new_ones(rows, columns) * _expanded(quantized, rows, columns)
    # Round to nearest: half a step, 2^-(mantissa+1) relative, or half the smallest subnormal;
    # 4 float32 roundings (divide, scale, multiply, amax/FMAX) are far below the slack.
    step = hp.abs() * 2.0 ** -(cast.format.mantissa + 1)
    floor = scale * cast.format.smallest_subnormal / 2
    assert bool(((restored - hp).abs() <= torch.maximum(step, floor) * (1 + 1e-5)).all())


def _expanded(quantized, rows, columns):
    from loka.core.numerics.reference import expand_scale

    return expand_scale(quantized.scale, quantized.cast, rows, columns)


@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_zeros_stay_zero_and_finite(cast):
    hp = torch.randn(130, 260)
    hp[:128] = 0
    quantized = quantize(hp, cast)
    assert torch.isfinite(quantized.scale).all()
    assert (quantized.scale > 0).all()
    assert (dequantize(quantized)[:128] == 0).all()
    assert (dequantize(quantize(torch.zeros(3, 5), cast)) == 0).all()


@pytest.mark.parametrize("cast", CASTS, ids=str)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-9, 1.0, 1e30])
def test_largest_element_is_exact_and_never_overflows(cast, magnitude):
    hp = torch.tensor([[magnitude, -magnitude / 3, 0.0]])
    restored = dequantize(quantize(hp, cast))
    tolerance = 0.07 if cast.power_of_two else 1e-6
    assert restored[0, 0].item() == pytest.approx(magnitude, rel=tolerance)
    assert torch.isfinite(restored).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_non_finite_surfaces_in_its_own_group_only(cast, bad):
    hp = torch.randn(256, 256)
    hp[3, 5] = bad
    restored = dequantize(quantize(hp, cast))
    assert not torch.isfinite(restored[3, 5])
    if cast.granularity is Granularity.ROW:
        assert torch.isfinite(restored[:3]).all()
        assert torch.isfinite(restored[4:]).all()
    if cast.granularity is Granularity.BLOCK_128X128:
        assert torch.isfinite(restored[128:]).all()
        assert torch.isfinite(restored[:, 128:]).all()


def test_power_of_two_scales_are_powers_of_two_and_never_saturate():
    hp = values(300, 200, 0, 2.0)
    cast = Cast(Format.E4M3, Granularity.ROW, power_of_two=True)
    quantized = quantize(hp, cast)
    mantissa, _ = torch.frexp(quantized.scale)
    assert (mantissa == 0.5).all()
    assert (hp.abs().amax(dim=1, keepdim=True) <= quantized.scale * Format.E4M3.max).all()


@pytest.mark.parametrize("cast", CASTS, ids=str)
@pytest.mark.parametrize("magnitude", [2.9e38, 2.98e38, 3.3e38, 3.39e38, torch.finfo(torch.float32).max])
def test_the_largest_numbers_stay_finite(cast, magnitude):
    """2^128 is not a float32, and 3.3e38 rounded to three bits of mantissa is 2^128."""
    hp = torch.tensor([[magnitude, -magnitude, 1e37]])
    restored = dequantize(quantize(hp, cast))
    assert torch.isfinite(restored).all()
    assert ((restored - hp).abs() <= hp.abs() * 0.1251).all()


def test_the_largest_power_is_the_last_that_fits():
    for format in Format:
        most = torch.tensor(format.largest_power)
        assert torch.isfinite(most * format.max)
        assert torch.isinf(2 * most * format.max)


def test_requantizing_with_power_of_two_scales_is_exact():
    hp = values(64, 64, 1, 0.5)
    cast = Cast(Format.E4M3, Granularity.TENSOR, power_of_two=True)
    once = dequantize(quantize(hp, cast))
    assert torch.equal(dequantize(quantize(once, cast)), once)


@pytest.mark.parametrize("granularity", list(Granularity), ids=str)
def test_padding_adds_exact_zeros_and_changes_nothing_else(granularity):
    hp = values(37, 150, 2, 1.0)
    cast = Cast(Format.E4M3, granularity)
    padded = quantize(hp, cast, padded=(48, 256))
    assert padded.shape == (48, 256)
    restored = dequantize(padded)
    assert torch.equal(restored[:37, :150], dequantize(quantize(hp, cast)))
    assert (restored[37:] == 0).all()
    assert (restored[:, 150:] == 0).all()


def test_transposed_views_and_low_precision_inputs():
    hp = torch.randn(40, 70).bfloat16()
    cast = Cast(Format.E4M3, Granularity.ROW)
    quantized = quantize(hp.t(), cast)
    assert quantized.data.is_contiguous()
    assert torch.equal(dequantize(quantized), dequantize(quantize(hp.t().contiguous().float(), cast)))


def test_scaled_mm_is_the_float32_product_of_the_dequantized():
    torch.manual_seed(0)
    a, b = torch.randn(33, 65), torch.randn(17, 65)
    cast = Cast(Format.E4M3, Granularity.ROW)
    qa, qb = quantize(a, cast), quantize(b, cast)
    exact = dequantize(qa).double() @ dequantize(qb).double().t()
    out = scaled_mm(qa, qb, dtype=torch.float32)
    # Any summation order of 65 products: 65 * 2^-24 of sum |a||b|.
    bound = 65 * 2.0**-24 * (dequantize(qa).abs().double() @ dequantize(qb).abs().double().t())
    assert ((out - exact).abs() <= bound).all()
    # Two e4m3 operands of some 32 dB each: 29.0 together over 300 draws, with a deviation of 0.4.
    noise = (out - a @ b.t()).square().sum() / (a @ b.t()).square().sum()
    assert -10 * math.log10(noise) == pytest.approx(29.0, abs=1.2)


@pytest.mark.slow
def test_a_last_group_that_is_not_whole_is_right_compiled():
    """By Inductor's C++, as in a package for a CPU: columns of the last group were left as memory had them."""
    cast, x = Cast(Format.E4M3, Granularity.GROUP_1X128, False), torch.randn(5, 192)

    def rounded(x):
        return dequantize(quantize(x, cast))

    assert torch.equal(torch.compile(rounded, dynamic=False)(x), rounded(x))
