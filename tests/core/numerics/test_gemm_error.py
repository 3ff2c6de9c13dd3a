import math

import pytest
import torch

from loka.core.error import sqnr_db
from loka.core.numerics.direction import Fold
from loka.core.numerics.gemm_error import Truth, errors_of
from loka.core.numerics.reference import quantize, scaled_mm
from loka.core.recipe import Cast, Format, Granularity


def test_they_are_those_of_the_single_functions():
    torch.manual_seed(0)
    product = torch.randn(50, 30)
    product[3, 4] = 0.0
    out = (product + 0.01 * torch.randn(50, 30)).bfloat16()
    found, turn = errors_of(out, Truth(product, by_row=False))
    assert set(found) == {"sqnr_db", "mere"}
    assert turn is None
    assert found["sqnr_db"] == pytest.approx(sqnr_db(out, product), abs=1e-5)
    counted = product != 0
    relative = ((out.float() - product) / product)[counted].abs()
    assert found["mere"] == pytest.approx(relative.mean().item(), rel=1e-5)
    nothing, _ = errors_of(torch.ones(2, 2), Truth(torch.zeros(2, 2), by_row=False))
    assert math.isnan(nothing["mere"])


def test_rows_by_hand():
    """100 rows (4, 0): 98 with an error of 0.4 across, r = 0.01; one of 4 across, r = 1; one that is lost."""
    product = torch.tensor([[4.0, 0.0]]).repeat(100, 1)
    out = product.clone()
    out[:98, 1] = 0.4
    out[98, 1] = 4.0
    out[99] = 1e9
    found, _ = errors_of(out, Truth(product, by_row=True))
    moved = 98 * 2 * (1 - 1 / math.sqrt(1.01)) + 2 * (1 - 1 / math.sqrt(2)) + 2
    assert found["row_db"] == pytest.approx(-10 * math.log10(moved / 100), abs=1e-4)
    assert found["row_p99_db"] == pytest.approx(0.0, abs=1e-6)


def test_rows_of_zeros_have_no_error():
    product = torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
    found, _ = errors_of(product * torch.tensor([[2.0], [1.1], [1.01]]), Truth(product, by_row=True))
    assert found["row_p99_db"] == pytest.approx(20.0, abs=1e-4)
    nothing, _ = errors_of(torch.zeros(2, 2), Truth(torch.zeros(2, 2), by_row=True))
    assert math.isnan(nothing["row_p99_db"])


def test_small_rows_that_a_shared_scale_loses_are_seen():
    """Gradient-like rows, log-normal with sd 3, or 4.3 octaves: the largest of 1024 is 14 above the median,
    and e4m3 ends 18 below its maximum, so about a sixth of the rows are zeros. The sum of squares knows
    nothing of them."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(1024, 64, generator=generator) * (3 * torch.randn(1024, 1, generator=generator)).exp()
    b = torch.randn(48, 64, generator=generator)
    truth = Truth(a @ b.t(), by_row=True)
    found = {}
    for granularity in (Granularity.TENSOR, Granularity.ROW):
        cast = Cast(Format.E4M3, granularity)
        out = scaled_mm(quantize(a, cast), quantize(b, cast), dtype=torch.float32)
        found[granularity], _ = errors_of(out, truth)
    shared, own = found[Granularity.TENSOR], found[Granularity.ROW]
    assert shared["sqnr_db"] > 27  # no less than the format's 28.5 dB, but for the noise of one draw
    assert shared["row_db"] < 12  # a row that is lost has r = 1 and counts 0.59: a tenth of them are 12 dB
    assert shared["row_p99_db"] < 1
    assert own["row_db"] > 27
    assert own["row_p99_db"] > 24


def test_the_direction_of_a_gradient():
    """Half as long, and turned by a tenth: the error is what that says."""
    product = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    across = torch.tensor([[0.0, 4.0], [-3.0, 0.0]])  # as long as the product, and orthogonal to it
    out = 0.5 * (math.cos(0.1) * product + math.sin(0.1) * across)
    fold = Fold(2, 2, mean_row=False, device=product.device)
    found, turn = errors_of(out, Truth(product, by_row=False, fold=fold))
    assert found["angle"] == pytest.approx(0.1, rel=1e-5)
    assert turn.cross / turn.signal == pytest.approx(0.5 * math.cos(0.1) - 1, rel=1e-5)
    assert turn.signal == 25
    assert torch.allclose(turn.error, fold(out - product))


def test_exact_and_broken_results():
    product = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    fold = Fold(8, 8, mean_row=True, device=product.device)
    exact, _ = errors_of(product, Truth(product, by_row=True, fold=fold))
    assert exact == {"sqnr_db": math.inf, "mere": 0, "row_db": math.inf, "row_p99_db": math.inf, "angle": 0}
    broken = product.clone()
    broken[0, 0] = math.nan
    found, _ = errors_of(broken, Truth(product, by_row=True, fold=fold))
    assert all(math.isnan(found[name]) for name in ("sqnr_db", "mere", "row_db", "angle"))
    broken[0, 0] = math.inf
    assert errors_of(broken, Truth(product, by_row=True, fold=fold))[0]["sqnr_db"] == -math.inf
