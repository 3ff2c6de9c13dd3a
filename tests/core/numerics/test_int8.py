import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loka.core.error import sqnr_db
from loka.core.numerics.depth import depth_error, error_sum
from loka.core.numerics.reference import Quantized, dequantize, quantize, scaled_mm
from loka.core.problem import Problem
from loka.core.recipe import Cast, Format, Gemm, Granularity
from loka.kernels.gemm.registry import candidate_named
from loka.kernels.gemm.run import run_gemm
from loka.kernels.quantize.quantizer import quantize_pair
from loka.kernels.quantize.side import Side
from loka.statistics.depths import depth_histogram

INT8 = Cast(Format.INT8, Granularity.ROW)
E4M3 = Cast(Format.E4M3, Granularity.ROW)
MOST = 131_072


def generator(seed):
    return torch.Generator().manual_seed(seed)


def hard(kind, seed, rows=64, columns=96):
    x = torch.randn(rows, columns, generator=generator(seed))
    if kind == "heavy":
        return x.mul(3).exp()
    if kind == "zero-inflated":
        return x.exp() * (torch.rand(rows, columns, generator=generator(seed + 1)) < 0.05)
    if kind == "giant column":
        x[:, 7] *= 1e6
    if kind == "constant columns":
        x[:, ::2] = torch.linspace(-3, 3, columns)[::2]
    if kind == "counts":
        return x.abs().mul(20).floor()
    return x


KINDS = ("normal", "heavy", "zero-inflated", "giant column", "constant columns", "counts")


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 10**6), exponent=st.integers(-25, 25))
@example(kind="normal", seed=574, exponent=0)
def test_every_error_is_at_most_half_a_step_of_its_row(kind, seed, exponent):
    hp = hard(kind, seed) * 10.0**exponent
    low = quantize(hp, INT8)
    step = hp.abs().amax(dim=1, keepdim=True) / 127
    assert low.data.dtype is torch.int8
    assert int(low.data.min()) >= -127  # symmetric: -128 would overflow what the bound on K counts with
    # Up to 127 steps, of which the step here, the scale, the quotient and the product each round by 2^-24.
    assert bool(((dequantize(low) - hp).abs() <= step * (0.5 + 4 * 127 * 2.0**-24)).all())
    assert bool((dequantize(low)[hp == 0] == 0).all())


@settings(max_examples=25, deadline=None)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 10**6), k=st.integers(8, 300), n=st.integers(1, 40))
def test_a_product_is_exact_but_for_its_roundings(kind, seed, k, n):
    """By int64: two scales and one conversion round, 3 * 2^-24 in all."""
    a, b = quantize(hard(kind, seed, 20, k), INT8), quantize(hard("normal", seed + 1, n, k), INT8)
    sums = a.data.long() @ b.data.long().t()
    exact = sums.double() * a.scale.double() * b.scale.double().t()
    found = scaled_mm(a, b, dtype=torch.float32)
    assert bool(((found - exact).abs() <= 3.01 * 2.0**-24 * exact.abs()).all())
    for name in ("emulated:int8_row", "torch_int8:int8_row"):
        kernel = candidate_named(name).run(a, b, torch.float32)
        assert torch.equal(kernel, found)


def test_one_product_is_padded_on_a_cpu():
    """torch 2.13 on a CPU: `torch._int_mm` of K = 1 and N > 1 is not A @ B^T."""
    a, b = hard("normal", 0, 5, 1), hard("normal", 1, 3, 1)
    found = [
        run_gemm(f"{kernel}:int8_row", a, b, gemm=Gemm.OUTPUT, dtype=torch.float32)
        for kernel in ("emulated", "torch_int8")
    ]
    assert torch.equal(*found)
    assert torch.allclose(found[0], a @ b.t(), rtol=1e-5)


@pytest.mark.parametrize("name", ["emulated:int8_row", "torch_int8:int8_row"])
def test_the_longest_sum_fits_into_int32(name):
    for sign in (1, -1):
        a = torch.full((2, MOST), 3.0)
        b = torch.full((3, MOST), 0.5 * sign)
        found = run_gemm(name, a, b, gemm=Gemm.OUTPUT, dtype=torch.float32)
        assert found.tolist() == [[1.5 * sign * MOST] * 3] * 2
    assert 127 * 127 * MOST < 2**31 - 1


def test_longer_sums_are_refused_with_the_reason():
    long = Problem(gemm=Gemm.OUTPUT, m=64, n=64, k=MOST + 1, dtype="bfloat16", target="sm_90")
    for name in ("emulated:int8_row", "torch_int8:int8_row"):
        for target in ("cpu", "sm_90"):
            problem = Problem(**{**vars(long), "target": target})
            reason = candidate_named(name).illegal(problem)
            assert "int32 is sure to hold a sum of 131072 products" in reason
    assert candidate_named("emulated:rowwise_e4m3").illegal(Problem(**{**vars(long), "target": "cpu"})) is None
    ones = Quantized(torch.ones(1, MOST + 1, dtype=torch.int8), torch.ones(1, 1), INT8)
    with pytest.raises(ValueError, match="131072"):
        scaled_mm(ones, ones, dtype=torch.float32)
    with pytest.raises(ValueError, match="two INT8 operands"):
        scaled_mm(quantize(torch.ones(2, 4), INT8), quantize(torch.ones(2, 4), E4M3), dtype=torch.float32)


def test_gradients_have_no_int8():
    problem = Problem(gemm=Gemm.GRAD_INPUT, m=64, n=64, k=64, dtype="bfloat16", target="cpu")
    assert candidate_named("emulated:int8_row").illegal(problem) == "int8_row does not define grad_input"


def test_rules_of_cuda():
    candidate = candidate_named("torch_int8:int8_row")
    small = Problem(gemm=Gemm.OUTPUT, m=3, n=13, k=21, dtype="bfloat16", target="sm_90")
    padded = candidate.padded(small)
    assert (padded.m, padded.n, padded.k) == (32, 16, 24)
    assert candidate.illegal(small) is None
    rules = candidate.kernel.unsupported
    assert rules(small, candidate.recipe) == "M=3 is not above 16"
    assert rules(Problem(**{**vars(small), "m": 17}), candidate.recipe) == "K=21 is not a multiple of 8"
    assert "sm_70" in str(candidate.illegal(Problem(**{**vars(small), "target": "sm_70"})))
    wide = Problem(**{**vars(small), "dtype": "float64"})
    told = [str(candidate_named(f"{kernel}:int8_row").illegal(wide)) for kernel in ("torch_int8", "emulated")]
    assert all("float64" in reason and "FP8" not in reason for reason in told)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_surfaces_in_its_row_and_no_other(bad):
    a, b = hard("normal", 0, 8, 32), hard("normal", 1, 4, 32)
    a[3, 5] = bad
    health = torch.zeros(3, dtype=torch.int64)
    for name in ("emulated:int8_row", "torch_int8:int8_row"):
        found = run_gemm(name, a, b, gemm=Gemm.OUTPUT, dtype=torch.bfloat16, health=health)
        assert bool(found[3].isnan().all())
        assert bool(found[[0, 1, 2, 4, 5, 6, 7]].isfinite().all())
    assert health.tolist() == [2, 1, 0]
    given_scale = quantize(a, Cast(Format.INT8, Granularity.TENSOR), scale=torch.ones(1))
    assert bool(dequantize(given_scale).isnan().all())  # integers have no NaN of their own


def test_both_copies_of_a_tensor_in_two_types():
    """The input for `output` in INT8, transposed for `grad_weight` in e4m3: each as it would be alone."""
    hp = hard("heavy", 3)
    row, column = quantize_pair(hp, row=Side(cast=INT8, padded=(64, 96)), column=Side(cast=E4M3, padded=(96, 64)))
    assert torch.equal(row.data, quantize(hp, INT8).data)
    assert torch.equal(column.data.float(), quantize(hp.t(), E4M3).data.float())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("granularity", [Granularity.ROW, Granularity.TENSOR], ids=str)
def test_depth_histograms_tell_the_error_of_int8(kind, granularity):
    """Within 0.1 dB, of some 10^5 elements: thresholds lie inside of bins, whose elements count as spread
    evenly. Under one scale for all, small counts are points instead, and it is off by 0.14 dB: 0.25 there."""
    hp = hard(kind, 5, 1024, 96)
    histogram = depth_histogram(hp, granularity)
    low = dequantize(quantize(hp, Cast(Format.INT8, granularity)))
    predicted = depth_error(histogram, Format.INT8)
    points = kind == "counts" and granularity is Granularity.TENSOR
    assert predicted.sqnr_db == pytest.approx(sqnr_db(low, hp), abs=0.25 if points else 0.1)
    nonzero = hp != 0
    element = ((low - hp) / hp)[nonzero].double().square().mean().item()
    assert predicted.element == pytest.approx(element, rel=0.01)
    assert predicted.underflow == pytest.approx(((low == 0) & nonzero).double().mean().item(), abs=0.01)


def test_depths_by_hand():
    """amax 127: a step is 1. 3.25 is a quarter off; 0.25 is lost; 127 and 100 are exact."""
    histogram = depth_histogram(torch.tensor([[127.0, 100.0, 3.25, 0.25]]), Granularity.ROW)
    assert error_sum(histogram, Format.INT8).item() == pytest.approx(2 * 0.25**2, rel=1e-6)
