"""Reasons of a plan are true: what a candidate lost by is what a reader of the numbers finds."""

import dataclasses

import pytest
from ne_reports import ROW, TENSOR, costing, effect, model_report, outputs
from reports import layer_report, measured
from test_regions import cell

import loka
from loka.core.error import Estimate
from loka.core.recipe import Gemm
from loka.core.records.report import REGION

OTHER = "fbgemm:rowwise_e4m3"


def rejected(report, budget=None, site="fc/output"):
    return loka.plan(report, budget).decisions[site].rejected


def test_a_slower_candidate_reads_slower_whatever_clock_it_was_timed_at():
    """It left the race early, at a clock at which 70 us of hp's read 55."""
    early = dataclasses.replace(measured(28, 70), microseconds=Estimate(55.0, 54.0, 56.0))
    assert rejected(layer_report({Gemm.OUTPUT: {ROW: measured(28, 60), OTHER: early}}))[OTHER].startswith("slower: 70 ")


def test_a_gemm_that_is_faster_alone_and_shares_less_says_so():
    """Rows take 68 us for 70, and save 1 us of a pass where tensor scales save 10: 7 us more of the layer."""
    site = {ROW: measured(28, 68, noise=0.001), TENSOR: measured(28, 70, noise=0.001)}
    shared = {"e4m3_row+e4m3_row": Estimate(1, 1, 1), "e4m3_tensor+e4m3_tensor": Estimate(10, 10, 10)}
    report = layer_report({Gemm.GRAD_INPUT: site, Gemm.GRAD_WEIGHT: site}, savings={"grad_output": shared})
    assert rejected(report, site="fc/grad_input")[ROW].startswith("slower: 68 ")
    assert rejected(report, site="fc/grad_input")[ROW].endswith("but 8.0 us more of the layer, where less is shared")


@pytest.mark.parametrize(
    ("us", "why"),
    [
        (120, "speed-up 0.8333"),
        (80, "KL/H 3e-05 [3e-05, 3e-05] for no less time"),
        (59.5, "KL/H 3e-05 [3e-05, 3e-05] for no less time"),
        (50, "KL/H 3e-05 [3e-05, 3e-05] is better spent elsewhere"),
    ],
)
def test_what_saves_no_time_is_not_said_to_lack_a_budget(us, why):
    """A limit of 3.5e-5 for two layers: what one more could buy is told of the candidate that would buy it alone."""
    both = {ROW: costing(60, effect(1e-5)), TENSOR: costing(us, effect(3e-5))}
    report = outputs(a=both, b={ROW: costing(60, effect(1e-5))})
    plan = loka.plan(report, loka.Budget(ne=3.5e-5))
    assert plan.decisions["a/output"].candidate == ROW
    assert plan.decisions["a/output"].rejected[TENSOR].startswith(why)


def test_a_slow_candidate_is_slow_however_much_may_be_spent():
    plan = loka.plan(outputs(a={ROW: costing(120, effect(1e-5))}), loka.Budget(ne=1.0))
    assert plan.decisions["a/output"].reason.startswith(f"no candidate is within the budget; {ROW}: speed-up 0.8333")


def test_what_is_tied_with_hp_is_within_the_budget():
    decision = loka.plan(outputs(a={ROW: measured(28, 99.5, noise=0.001)}), loka.Budget(min_speedup=1.0))
    assert decision.decisions["a/output"].reason == f"no candidate saves time; {ROW}: tied with hp, which comes first"


def test_a_tie_that_comes_first_by_name_and_is_slower_than_the_fastest_reads_slower():
    """100.0, 100.9 and 101.8: the second is tied with the fastest and precedes it; the third only with the second."""
    names = ("torch:rowwise_e4m3", "fbgemm:rowwise_e4m3", "deep_gemm:blockwise_e4m3")
    us = {name: measured(28, at, noise=0.001) for name, at in zip(names, (60.0, 60.5, 61.0), strict=True)}
    plan = loka.plan(layer_report({Gemm.OUTPUT: us}))
    assert plan.decisions["fc/output"].candidate == "fbgemm:rowwise_e4m3"
    assert plan.decisions["fc/output"].rejected["deep_gemm:blockwise_e4m3"].startswith("slower: 61 ")


def in_region(us=100.0):
    fast = {"torch_fast:rowwise_e4m3": measured(28.5, us), ROW: measured(28.5, us)}
    made = model_report({"a": dict.fromkeys(Gemm, fast)}, region_times={"a": cell(165.0)})
    return made, fast


def test_a_layer_is_in_a_region_though_none_of_its_gemms_was_timed_alone():
    """No rule decides such a GEMM: its errors are known, and its layer was timed in a region."""
    made, fast = in_region()
    untimed = {name: dataclasses.replace(m, microseconds=None, speedup=None) for name, m in fast.items()}
    site = made.sites["a/grad_weight"]
    lost = dataclasses.replace(site, measurements={**site.measurements, **untimed})
    plan = loka.plan(dataclasses.replace(made, sites={**made.sites, site.name: lost}))
    assert all(d.reason.startswith("in a compiled region") for d in plan.decisions.values())


def test_every_gemm_of_a_layer_says_why_it_is_in_no_region():
    made, fast = in_region()
    site = made.sites["a/output"]
    rough = {name: dataclasses.replace(m, errors=measured(20.0).errors) for name, m in fast.items()}
    made = dataclasses.replace(
        made, sites={**made.sites, site.name: dataclasses.replace(site, measurements={**site.measurements, **rough})}
    )
    for decision in loka.plan(made).decisions.values():
        assert decision.rejected[REGION].startswith("a/output: sqnr_db 20 ")
    kept = loka.plan(made, loka.Budget(keep=("a/output",))).decisions["a/grad_input"]
    assert kept.rejected[REGION] == "a GEMM of it is decided by rule"


def test_a_package_is_not_planned_by_times_of_regions_with_gradients():
    decision = loka.plan(in_region()[0], target="package").decisions["a/output"]
    assert decision.rejected[REGION].startswith("timed with its gradients")
