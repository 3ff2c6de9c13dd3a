import math
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka.core.budget import Budget, total_effect, upper_bound
from loka.core.error import Estimate

VALUES, HALVES = st.floats(-1, 1), st.floats(0, 1)


@given(VALUES, st.floats(1e-6, 1))
def test_the_truth_lies_above_once_in_twenty(value, error):
    half = NormalDist().inv_cdf(0.975) * error
    cost = upper_bound(Estimate(value, value - half, value + half))
    assert cost == pytest.approx(max(NormalDist(value, error).inv_cdf(0.95), 0), abs=1e-6)


@given(VALUES, HALVES)
def test_an_effect_costs_no_less_than_it_is_and_no_less_than_nothing(value, half):
    cost = upper_bound(Estimate(value, value - half, value + half))
    assert max(value, 0) <= cost <= max(value + half, 0)


@pytest.mark.parametrize(("value", "high"), [(1.0, math.inf), (math.nan, 1.0), (1.0, math.nan)])
def test_what_is_not_known_costs_everything(value, high):
    assert upper_bound(Estimate(value, 0.0, high)) == math.inf


@given(st.lists(st.tuples(VALUES, HALVES), max_size=8))
def test_effects_of_all_sites_add_up(several):
    total = total_effect(Estimate(v, v - h, v + h) for v, h in several)
    assert total.value == pytest.approx(sum(v for v, _ in several), abs=1e-12)
    assert total.high - total.low == pytest.approx(2 * sum(h for _, h in several), abs=1e-12)


@pytest.mark.parametrize(
    ("told", "wrong"),
    [("on_miss is", {"on_miss": "drop"}), ("ne is", {"ne": -1e-9}), ("ne is", {"ne": math.inf}),
     ("ne is", {"ne": math.nan}), ("ne is", {"ne": "1"}), ("finite number, 0 or more", {"min_speedup": -0.1}),
     ("max_mere .* 0 or more", {"max_mere": -1.0}),
     ("min_speedup is", {"min_speedup": math.inf}), ("min_speedup is", {"min_speedup": math.nan}),
     ("keep is .* a tuple", {"keep": "fc"}),
     ("keep is .* a tuple", {"keep": {"fc"}}), ("keep is .* a tuple", {"keep": [0]}),
     ("segments is", {"segments": [("a", 1)]}),
     ("segments.* is None", {"segments": {"a": None}}), ("max_mere is", {"max_mere": math.inf}),
     ("min_sqnr_db is", {"min_sqnr_db": -math.inf})],
)  # fmt: skip
def test_budgets_that_cannot_be_kept_are_refused(told, wrong):
    with pytest.raises(ValueError, match=told):
        Budget(**wrong)


def test_patterns_in_a_list_are_kept_as_a_tuple():
    assert Budget(keep=["0", "mlp.*"]) == Budget(keep=("0", "mlp.*"))


def test_limits_may_be_nothing_at_all():
    assert Budget(ne=0.0, min_speedup=0.0, min_sqnr_db=None).ne == 0


def test_the_rule_of_the_paper():
    assert Budget.paper() == Budget(min_sqnr_db=None, max_mere=0.2, min_speedup=1.05, regions=False)
    assert Budget.paper(max_mere=0.1).max_mere == 0.1
