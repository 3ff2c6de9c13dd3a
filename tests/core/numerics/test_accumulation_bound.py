import math

import pytest
import torch

from loka.core.numerics.reference import accumulation_bound, dequantize, quantize, scale_of, scaled_mm
from loka.core.recipe import Cast, Format, Granularity

INT8, E4M3 = (Cast(format, Granularity.ROW) for format in (Format.INT8, Format.E4M3))
# Half a step between neighbours of 1, and twice that where ties may lie far from even.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2 * 2.0**-9, torch.float16: 2 * 2.0**-12}


def operands(cast, k, *, sign=True):
    made = torch.randn(2, 24, k, generator=torch.Generator().manual_seed(0))
    return [quantize(one if sign else one.abs(), cast) for one in made]


@pytest.mark.parametrize("dtype", ROUNDING)
def test_in_int8_four_roundings_to_float32_and_one_to_the_result_add_up(dtype):
    a, b = operands(INT8, 64, sign=False)
    exact = (a.data.long() @ b.data.long().t()).double() * a.scale.double() * b.scale.double().t()
    bound = accumulation_bound(a, b, fast=False, dtype=dtype).double()
    grown = (1 + 2.0**-24) ** 4 * (1 + ROUNDING[dtype]) - 1
    torch.testing.assert_close(bound, grown * exact, rtol=1e-5, atol=0)
    assert bool(((scaled_mm(a, b, dtype=dtype).double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("fast", [False, True])
def test_one_instruction_loses_a_step_of_its_register_for_each_term(fast, dtype):
    """K = 32: 33 terms cut off at 2^-13 of the largest, at most sum |a||b|; then float32 and one rounding."""
    a, b = operands(E4M3, 32)
    full_a, full_b = dequantize(a).double(), dequantize(b).double()
    exact, absolute = full_a @ full_b.t(), full_a.abs() @ full_b.abs().t()
    lost = 33 * 2.0**-13 * absolute
    expected = lost + 32 * 2.0**-24 * absolute + ROUNDING[dtype] * (exact.abs() + lost)
    bound = accumulation_bound(a, b, fast=fast, dtype=dtype).double()
    torch.testing.assert_close(bound, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("k", [32, 128, 160, 256, 1024])
def test_fast_accumulation_loses_more_once_there_is_a_second_register(k):
    """Of products of one sign, where the sum that stays in the register is the largest term."""
    a, b = operands(E4M3, k, sign=False)
    slow, fast = (accumulation_bound(a, b, fast=fast, dtype=torch.float32) for fast in (False, True))
    assert bool((fast > slow).all() if k > 128 else torch.equal(fast, slow))


@pytest.mark.parametrize(("rows", "columns"), [(0, 8), (3, 0), (0, 0), (0, 300), (300, 0)])
@pytest.mark.parametrize("granularity", list(Granularity), ids=str)
def test_a_tensor_without_elements_has_the_scales_of_its_groups(rows, columns, granularity):
    """As many as there would be, at least one a side, each that of zeros."""
    cast = Cast(Format.E4M3, granularity)
    low = quantize(torch.zeros(rows, columns), cast)
    group_rows, group_columns = granularity.group(rows, columns)
    wanted = [max(math.ceil(side / group), 1) for side, group in ((rows, group_rows), (columns, group_columns))]
    assert list(low.scale.shape) == wanted
    assert bool((low.scale == scale_of(torch.zeros(1), cast)).all())
    assert dequantize(low).shape == (rows, columns)
