import math

import pytest
import torch

from loka.core.error import estimate_jackknife, estimate_mean, sqnr_db, student_t_95
from loka.core.timing import median_interval


def test_sqnr_of_known_noise():
    reference = torch.ones(1000)
    assert sqnr_db(reference * 1.1, reference) == pytest.approx(20.0, abs=1e-5)
    assert sqnr_db(reference, reference) == math.inf
    assert sqnr_db(reference, torch.zeros(1000)) == -math.inf
    assert math.isnan(sqnr_db(torch.tensor([1.0, math.nan]), torch.ones(2)))


@pytest.mark.parametrize("freedom", [*range(1, 41), 100, 1000])
def test_student_t_quantiles(freedom):
    """P(|T| < t) is 2 G((f + 1) / 2) / (sqrt(pi) G(f / 2)) by the integral of cos^(f - 1) from 0 to atan(t / sqrt(f)).
    Four digits of t are 2e-5 of it."""
    angles = torch.linspace(0, math.atan(student_t_95(freedom) / math.sqrt(freedom)), 20001, dtype=torch.float64)
    inside = torch.trapezoid(angles.cos() ** (freedom - 1), angles).item()
    inside *= 2 / math.sqrt(math.pi) * math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    assert inside == pytest.approx(0.95, abs=2e-5)


def test_the_jackknife_of_a_mean_is_its_standard_error():
    """Efron and Stein 1981: for a mean the two are one."""
    samples = [1.0, 2.0, 4.0, 8.0, -3.0]
    without = [(math.fsum(samples) - one) / 4 for one in samples]
    found, mean = estimate_jackknife(math.fsum(samples) / 5, without), estimate_mean(samples)
    assert (found.value, found.low, found.high) == pytest.approx((mean.value, mean.low, mean.high))
    assert estimate_jackknife(1.0, [1.0]).high == math.inf
    assert estimate_jackknife(1.0, [1.0, math.nan]).low == -math.inf


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
