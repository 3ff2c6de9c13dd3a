import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.core.numerics.hot_columns import LEFT, append, hottest
from loka.core.numerics.reference import dequantize, quantize
from loka.core.problem import Problem
from loka.core.recipe import Gemm, recipe_named
from loka.kernels.gemm.registry import candidate_named
from loka.kernels.gemm.run import run_gemm

HOT = "rowwise_e4m3_hot32"
CAST = recipe_named(HOT).output[0]


def multiplied(x, weight, hot):
    return run_gemm(f"emulated:{HOT}", x, weight, gemm=Gemm.OUTPUT, dtype=torch.float32, hot=hot)


def both(hp):
    low = quantize(hp, CAST)
    rest = (hp.float() / low.scale).clamp(-448, 448) - low.data.float()
    return dequantize(low), rest.to(low.data.dtype).float() * low.scale


@settings(max_examples=40)
@given(
    rows=st.integers(1, 9),
    width=st.integers(64, 90),
    giant=st.booleans(),
    constant=st.booleans(),
    zeros=st.floats(0, 1),
    bad=st.sampled_from([0.0, math.nan, math.inf, -math.inf]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 10**6),
)
def test_one_gemm_is_the_three_products(rows, width, giant, constant, zeros, bad, dtype, seed):
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=drawn) * torch.rand(width, generator=drawn).mul(8).exp2()
    x *= torch.rand(width, generator=drawn) >= zeros  # columns of zeros
    x[:, 5] = -7.0 if constant else x[:, 5]
    x[:, 3] *= 1e6 if giant else 1
    x[rows // 2, 1] = bad or 0.0
    x, weight = x.to(dtype), torch.randn(11, width, generator=drawn).to(dtype)
    at = hottest(x.float().nan_to_num(0, 0, 0).square().sum(dim=0), 32)
    out = multiplied(x, weight, at)
    (low_x, left_x), (low_weight, left_weight) = both(x), both(weight)
    expected = low_x @ low_weight.t() + left_x[:, at] @ low_weight[:, at].t()
    expected += low_x[:, at] @ left_weight[:, at].t()
    good = torch.tensor([not bad or row != rows // 2 for row in range(rows)])
    size = x.float().abs() @ weight.float().abs().t()
    assert bool(((out - expected).abs() <= 1e-5 * size)[good].all())  # float32 sums of some hundred
    assert bool(out[~good].isnan().all())
    # 2^-4 of a value is left at most, of that again 2^-4, but for what lies below e4m3's range.
    low = quantize(x, CAST, padded=(rows + 1, width + 66))
    append(low, x, at)
    left, values, _ = dequantize(low)[:rows, width:].split([32, 32, 2], dim=1)
    gap = (x.float()[:, at] - values - left)[good].abs()
    assert bool((gap <= 2.0**-7.9 * x.float()[:, at][good].abs() + 2.0**-10 * low.scale[:rows][good]).all())
    assert not low.data[rows].float().any()


@given(
    heat=st.lists(st.sampled_from([0.0, 1.0, 2.0, math.nan, math.inf]), min_size=1, max_size=50),
    count=st.integers(1, 40),
)
def test_the_hottest_come_first_and_ties_by_place(heat, count):
    known = [0.0 if math.isnan(value) else value for value in heat]
    expected = sorted(sorted(range(len(heat)), key=lambda at: (-known[at], at))[:count])
    assert hottest(torch.tensor(heat), count).tolist() == expected


def test_what_is_left_of_a_column_is_the_error_of_e4m3_once_more():
    """Columns 10^6 times the others: all of the error is theirs; one alone would be exact, 448 in its row."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2000, 80, generator=generator), torch.randn(48, 80, generator=generator)
    x[:, 7:11] *= 1e6
    exact = x.double() @ weight.double().t()
    columns = None, torch.arange(32)
    errors = [(multiplied(x, weight, hot) - exact).square().sum() / exact.square().sum() for hot in columns]
    assert LEFT < errors[0] < 2 * LEFT  # of both operands
    assert LEFT / 4 < errors[1] / errors[0] < 4 * LEFT


@pytest.mark.parametrize("name", [f"emulated:{HOT}", f"torch_fast:{HOT}"])
def test_narrow_layers_are_refused_and_others_get_64_columns(name):
    candidate = candidate_named(name)
    problem = Problem(gemm=Gemm.OUTPUT, m=32, n=32, k=63, dtype="bfloat16", target="sm_90")
    assert "K=63 is less than the 64" in candidate.illegal(problem)
    assert candidate.illegal(replace(problem, k=64)) is None
    assert candidate.padded(replace(problem, k=367)).k == (432 if "torch" in name else 431)
