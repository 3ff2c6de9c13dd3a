import math

import pytest
import torch

from loka.core.error import estimate_mean, mere, sqnr_db, student_t_95
from loka.core.timing import median_interval


def test_sqnr_of_known_noise():
    reference = torch.ones(1000)
    assert sqnr_db(reference * 1.1, reference) == pytest.approx(20.0, abs=1e-5)
    assert sqnr_db(reference, reference) == math.inf
    assert sqnr_db(reference, torch.zeros(1000)) == -math.inf
    assert math.isnan(sqnr_db(torch.tensor([1.0, math.nan]), torch.ones(2)))


def test_mere_leaves_out_zero_references():
    assert mere(torch.tensor([1.1, 5.0]), torch.tensor([1.0, 0.0])) == pytest.approx(0.1, rel=1e-5)
    assert math.isnan(mere(torch.ones(2), torch.zeros(2)))
    assert math.isnan(mere(torch.tensor([math.nan]), torch.ones(1)))


@pytest.mark.parametrize(("freedom", "expected"), [(1, 12.706), (30, 2.042), (31, 2.0395), (1000, 1.9623)])
def test_student_t_quantiles(freedom, expected):
    assert student_t_95(freedom) == pytest.approx(expected, abs=1e-3)


def test_mean_interval_covers_in_95_percent():
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(2000):
        estimate = estimate_mean(torch.randn(5, generator=generator).tolist())
        hits += estimate.low <= 0 <= estimate.high
    assert hits / 2000 == pytest.approx(0.95, abs=0.02)  # 4 standard errors of a proportion


def test_one_sample_has_an_unbounded_interval():
    estimate = estimate_mean([2.0])
    assert (estimate.value, estimate.low, estimate.high) == (2.0, -math.inf, math.inf)
    with pytest.raises(ValueError, match="at least one"):
        estimate_mean([])


def test_median_interval_covers_in_at_least_95_percent():
    generator = torch.Generator().manual_seed(1)
    hits = 0
    for _ in range(1000):
        estimate = median_interval(torch.randn(25, generator=generator).tolist())
        hits += estimate.low <= 0 <= estimate.high
    assert hits >= 935
