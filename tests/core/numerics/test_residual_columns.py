"""The residuals of hot columns: what they give back, which columns are hot, hostile operands."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.core.numerics.hot_columns import LEFT, append, hottest
from loka.core.numerics.reference import Quantized, dequantize, quantize, scaled_mm
from loka.core.recipe import Gemm, recipe_named
from loka.kernels.gemm.registry import candidate_named
from loka.kernels.gemm.run import run_gemm

HOT = "rowwise_e4m3_hot32"
LEFT_CAST, RIGHT_CAST = recipe_named(HOT).output


def twin(x: torch.Tensor, weight: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """y as the module's first equation has it: three products, residuals by the scales of their rows."""

    def both(hp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        low = quantize(hp.float(), LEFT_CAST)
        rest = (hp.float() / low.scale).clamp(-448, 448) - low.data.float()
        return dequantize(low), rest.to(low.data.dtype).float() * low.scale

    (low_x, left_x), (low_weight, left_weight) = both(x), both(weight)
    y = low_x @ low_weight.t() + left_x[:, columns] @ low_weight[:, columns].t()
    return y + low_x[:, columns] @ left_weight[:, columns].t()


@settings(max_examples=40)
@given(
    rows=st.integers(1, 9),
    width=st.integers(64, 90),
    outputs=st.integers(1, 20),
    giant=st.booleans(),
    constant=st.booleans(),
    zeros=st.floats(0, 1),
    bad=st.sampled_from([0.0, math.nan, math.inf, -math.inf]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 10**6),
)
def test_one_gemm_is_the_three_products(
    rows: int,
    width: int,
    outputs: int,
    giant: bool,
    constant: bool,
    zeros: float,
    bad: float,
    dtype,
    seed: int,
) -> None:
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=drawn) * torch.rand(width, generator=drawn).mul(8).exp2()
    x *= torch.rand(width, generator=drawn) >= zeros  # columns of zeros
    weight = torch.randn(outputs, width, generator=drawn).to(dtype)
    if constant:
        x[:, 5] = -7.0
    if giant:
        x[:, 3] *= 1e6
    if bad:
        x[rows // 2, 1] = bad
    x = x.to(dtype)
    columns = hottest(x.float().nan_to_num(0, 0, 0).square().sum(dim=0), 32)
    out = run_gemm(f"emulated:{HOT}", x, weight, gemm=Gemm.OUTPUT, dtype=torch.float32, hot=columns)
    good = torch.tensor([not bad or row != rows // 2 for row in range(rows)])
    expected = twin(x, weight, columns)
    size = x.float().abs() @ weight.float().abs().t()
    assert bool(((out - expected).abs() <= 1e-5 * size)[good].all())  # float32 sums of some hundred
    assert bool(out[good].isfinite().all())
    assert bool(out[~good].isnan().all())
    # At most 2^-4 of a value is left of it, and 2^-8 where it is hot, but for what lies below e4m3's range.
    low = quantize(x, LEFT_CAST, padded=(rows, width + 64))
    append(low, x, columns)
    left, values = dequantize(low)[:, width:].chunk(2, dim=1)
    gap = (x.float()[:, columns] - values - left)[good].abs()
    assert bool((gap <= 2.0**-7.9 * x.float()[:, columns][good].abs() + 2.0**-10 * low.scale[good]).all())


@given(
    heat=st.lists(st.sampled_from([0.0, 1.0, 2.0, math.nan, math.inf]), min_size=1, max_size=50),
    count=st.integers(1, 40),
)
def test_the_hottest_come_first_and_ties_by_place(heat: list[float], count: int) -> None:
    known = [0.0 if math.isnan(value) else value for value in heat]
    expected = sorted(sorted(range(len(heat)), key=lambda at: (-known[at], at))[:count])
    assert hottest(torch.tensor(heat), count).tolist() == expected


def test_what_is_left_of_a_column_is_the_error_of_e4m3_once_more() -> None:
    """Columns 10^6 times the others: all of the error is theirs; one alone would be exact, 448 in its row."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2000, 80, generator=generator), torch.randn(48, 80, generator=generator)
    x[:, 7:11] *= 1e6
    exact = x.double() @ weight.double().t()
    errors = []
    for columns in (None, torch.arange(32), torch.arange(40, 72)):
        out = run_gemm(f"emulated:{HOT}", x, weight, gemm=Gemm.OUTPUT, dtype=torch.float32, hot=columns)
        errors.append(((out - exact).square().sum() / exact.square().sum()).item())
    # Both operands' errors make one; their residuals' and the product of both what is left.
    plain, hot, cold = errors
    assert LEFT < plain < 2 * LEFT
    assert LEFT / 4 < hot / plain < 4 * LEFT
    assert cold > 0.99 * plain


def test_without_columns_it_is_the_recipe_without_them() -> None:
    x, weight = torch.randn(6, 70), torch.randn(5, 70)
    bare = quantize(x, LEFT_CAST), quantize(weight, RIGHT_CAST)
    out = run_gemm(f"emulated:{HOT}", x, weight, gemm=Gemm.OUTPUT, dtype=torch.float32)
    torch.testing.assert_close(out, scaled_mm(*bare, dtype=torch.float32))


def test_the_second_operand_has_them_the_other_way_round() -> None:
    x, columns = torch.randn(3, 64), torch.arange(32, 64)
    found: list[Quantized] = []
    for second in (False, True):
        found.append(quantize(x, LEFT_CAST, padded=(4, 144)))
        append(found[-1], x, columns, second=second)
    first, second = (dequantize(low)[:3, 64:128] for low in found)
    assert torch.equal(first.roll(32, dims=1), second)
    assert torch.equal(second[:, :32], dequantize(found[0])[:3, 32:64])
    assert not any(dequantize(low)[:, 128:].any() or dequantize(low)[3].any() for low in found)


@pytest.mark.parametrize("name", [f"emulated:{HOT}", f"torch:{HOT}", "torch:rowwise_e4m3_centred_hot32"])
def test_narrow_layers_are_refused_and_wide_ones_have_64_columns_more(name: str) -> None:
    from loka.core.problem import Problem

    sides = {"m": 32, "n": 32, "dtype": "bfloat16", "target": "sm_90"}
    candidate = candidate_named(name)
    for k, reason in ((63, "64 more than it has"), (64, None), (367, None)):
        found = candidate.illegal(Problem(gemm=Gemm.OUTPUT, k=k, **sides))
        assert found is None if reason is None else reason in found
    padded = candidate.padded(Problem(gemm=Gemm.OUTPUT, k=367, **sides)).k
    assert padded == (432 if "torch" in name else 431)
    assert "hot32 does not define" in candidate.illegal(Problem(gemm=Gemm.GRAD_INPUT, k=367, **sides))
