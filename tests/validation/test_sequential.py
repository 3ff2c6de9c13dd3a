import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.validation.quantile import student_t
from loka.validation.sequential import look_tail, spending_bounds
from loka.validation.variance import MIN_PAIRS, PairVariance
from loka.validation.verdicts import ERROR, RowsVerdict

LIMIT = 0.02


def test_bounds_are_those_of_the_textbook():
    """Lan and DeMets' O'Brien-Fleming spending, two-sided 5 %, five looks (Jennison and Turnbull 2000,
    chapter 7; Reboussin et al., Controlled Clinical Trials 21, 2000)."""
    found = spending_bounds((0.2, 0.4, 0.6, 0.8, 1.0), 0.05)
    assert found == pytest.approx((4.877, 3.357, 2.680, 2.290, 2.031), abs=2e-3)
    assert spending_bounds((1.0,), 0.05) == pytest.approx((1.960,), abs=1e-3)


@pytest.mark.slow
@settings(deadline=None)  # the first of a kind integrates
@given(planned=st.integers(MIN_PAIRS, 24), segments=st.sampled_from([1, 8]))
def test_looks_grow_and_spend_less_than_there_is(planned, segments):
    tail = ERROR / segments
    tails = [look_tail(pairs, planned, tail) for pairs in range(MIN_PAIRS, planned + 1)]
    assert all(0 < a < b for a, b in itertools.pairwise(tails))
    assert tails[-1] <= tail
    assert tails[-1] > 0.5 * tail  # at the end nearly all of it is left
    assert look_tail(1, planned, tail) == tail


def looks(effect, planned, *, simulations, sequential):
    """How often a verdict of pass or fail comes at any look, and how early."""
    rng = np.random.default_rng(planned)
    values = effect + 0.02 * rng.normal(size=(simulations, planned))
    counts = np.arange(1, planned + 1)
    means = values.cumsum(1) / counts
    squares = (values**2).cumsum(1) - counts * means**2
    passed, failed = np.zeros(simulations, bool), np.zeros(simulations, bool)
    pairs = np.full(simulations, planned)
    for n in range(MIN_PAIRS, planned + 1):
        tail = look_tail(n, planned, ERROR) if sequential else ERROR
        half = student_t(n - 1, tail) * np.sqrt(squares[:, n - 1] / (n - 1) / n)
        mean, open_ = means[:, n - 1], ~(passed | failed)
        now_passed = open_ & (np.abs(mean) + half <= LIMIT)
        now_failed = open_ & (np.abs(mean) - half > LIMIT)
        pairs[now_passed | now_failed] = n
        passed, failed = passed | now_passed, failed | now_failed
    return {"pass": passed.mean(), "fail": failed.mean(), "pairs": pairs.mean()}


@pytest.mark.parametrize("planned", [4, 6, 8, 12, 16])
def test_an_effect_at_the_limit_passes_or_fails_as_seldom_as_with_one_look(planned):
    found = looks(LIMIT, planned, simulations=40_000, sequential=True)
    # 2.5 % over 40,000 simulations has a standard deviation of 0.08 %: three of them above.
    assert found["pass"] <= 0.025 + 0.0024
    assert found["fail"] <= 0.025 + 0.0024
    if planned >= 6:  # what a look after every pair makes of intervals that are made for one look
        naive = looks(LIMIT, planned, simulations=40_000, sequential=False)
        assert naive["pass"] > 0.04


def test_it_stops_early_where_much_is_clear():
    harm = looks(0.08, 12, simulations=4000, sequential=True)
    assert harm["fail"] > 0.99
    assert harm["pairs"] < 9
    none = looks(0.0, 12, simulations=4000, sequential=True)
    once = looks(0.0, 12, simulations=4000, sequential=False)
    assert none["pass"] > 0.6  # a single look after 12 pairs passes in 0.77: looking has a price
    assert once["pairs"] < none["pairs"] < 12


def test_a_judgement_goes_by_the_level_of_its_look():
    variance = PairVariance(mean=0.0, pairs=5, rows=10**6, between_pairs=0.014, rows_error=0.0)

    def judged(tail):
        return RowsVerdict(name="all rows", variance=variance, clicks=10**5, limit=LIMIT, tail=tail).verdict

    assert judged(ERROR) == "pass"
    assert judged(look_tail(5, 10, ERROR)) == "undecided"


def test_a_look_that_was_not_planned_is_refused():
    with pytest.raises(ValueError, match="where 8 are planned"):
        look_tail(9, 8, ERROR)
    with pytest.raises(ValueError, match="no verdict takes fewer"):
        look_tail(3, 3, ERROR)
    assert look_tail(4, 4, ERROR) == ERROR
    assert math.isfinite(student_t(3, look_tail(4, 24, ERROR / 8)))
