"""Layers planned by where they stand in a region; every expected time is worked out by hand.

hp takes 100 us at each GEMM. In a cell a layer and the code around it take 330 us by either arm; of a chain's four
layers each takes 300 us in hp and 240 in FP8. So between others it takes 290 and 210, at one end 310 and 270.
"""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ne_reports import costing, effect, in_regions, model_report
from reports import around, measured

import loka
from loka.compiler.joint_sites import IN_REGIONS
from loka.core.error import Estimate
from loka.core.recipe import Gemm
from loka.core.records.report import HP, REGION, REGION_INT8, Measurement, Report
from loka.planner.frontier import saved_time
from loka.planner.placing import times_at

FAST, SLOW = "torch_fast:rowwise_e4m3", "torch:rowwise_e4m3"
SITES = {gemm: {FAST: measured(28.5, 120.0), SLOW: measured(28.5, 125.0)} for gemm in Gemm}


def times(region_us, hp_us, *, noise=0.001):
    """The microseconds of FP8 are of a slower clock."""
    ratio = hp_us / region_us
    return {
        HP: Measurement(microseconds=around(hp_us, noise), speedup=Estimate(1.0, 1.0, 1.0)),
        REGION: Measurement(microseconds=around(region_us * 1.5, noise), speedup=around(ratio, noise)),
    }


CELL, CHAIN = times(330.0, 330.0), times(240.0, 300.0)


def report_of(*paths, reads, sites=SITES, cell=CELL, chain=CHAIN):
    made = model_report(dict.fromkeys(paths, sites), region_times=dict.fromkeys(paths, cell))
    return dataclasses.replace(made, times_in_chains=dict.fromkeys(paths, chain), reads=reads)


TOWER = {"b": ("a",), "c": ("b",)}


def inside(plan):
    return {d.path for d in plan.decisions.values() if d.candidate in IN_REGIONS}


@pytest.mark.parametrize(
    ("joined", "hp", "region"),
    [("", 330, 330), ("b", 330, 330), ("a", 310, 270), ("c", 310, 270), ("ac", 290, 210), ("abc", 290, 210)],
)
def test_time_by_ends(joined, hp, region):
    found = times_at(report_of("a", "b", "c", reads=TOWER), "b", set(joined))
    assert found[HP].microseconds.value == pytest.approx(hp)
    assert found[REGION].speedup.value == pytest.approx(hp / region)
    assert found[REGION].speedup.low < hp / region < found[REGION].speedup.high
    if joined not in ("", "b"):
        assert found[REGION].microseconds.value == pytest.approx(region)


def test_uncertain_times_of_both_add_up():
    """Between others: (4 * 240 * (1 +- .01) - 330 * (1 -+ .02)) / 3, of ratios that are off by so much."""
    made = report_of("a", "b", "c", reads=TOWER, cell=times(330, 330, noise=0.02), chain=times(240, 300, noise=0.01))
    slow = (4 * 240 / 0.99 - 330 / 1.02) / 3
    fast = (4 * 240 / 1.01 - 330 / 0.98) / 3
    found = times_at(made, "b", {"a", "c"})[REGION]
    assert (found.speedup.low, found.speedup.high) == pytest.approx((290 / slow, 290 / fast))


@pytest.mark.parametrize("lost", [HP, REGION])
def test_without_the_time_of_a_chain_it_is_the_cells(lost):
    unknown = {**CHAIN, lost: Measurement(unsupported="it was not joined: its side is odd")}
    made = report_of("a", "b", "c", reads=TOWER, chain=unknown)
    assert times_at(made, "b", {"a", "c"})[REGION] == CELL[REGION]
    assert times_at(dataclasses.replace(made, times_in_chains={}), "b", {"a", "c"}) == CELL


def test_times_that_contradict_each_other_are_the_cells():
    """A chain's layer in an eighth of a cell's time: between others it would take less than none."""
    for chain in (times(40.0, 300.0), times(85.0, 300.0, noise=0.05)):  # of the second the fast end alone is so
        made = report_of("a", "b", "c", reads=TOWER, chain=chain)
        assert times_at(made, "b", {"a", "c"}) == CELL


def test_an_arm_that_cannot_run_keeps_its_reason():
    why = Measurement(unsupported="no kernel")
    made = report_of("a", "b", reads=TOWER, cell={**CELL, REGION_INT8: why}, chain={**CHAIN, REGION_INT8: why})
    assert times_at(made, "b", {"a"})[REGION_INT8] == why


def test_a_tower_is_planned_though_none_of_its_layers_gains_alone():
    made = report_of("a", "b", "c", reads=TOWER)
    plan = loka.plan(made)
    assert inside(plan) == {"a", "b", "c"}
    middle, end = plan.decisions["b/output"], plan.decisions["a/output"]
    assert middle.speedup.value == pytest.approx(290 / 210)
    assert end.speedup.value == pytest.approx(310 / 270)
    assert "take 210" in middle.reason
    assert "290" in middle.reason
    # What it saves is taken off the GEMMs, a third each.
    assert middle.microseconds.value == pytest.approx((300 - 80) / 3)
    assert inside(loka.plan(dataclasses.replace(made, reads={}))) == set()


@pytest.mark.parametrize("keep", ["a", "b", "c"])
def test_a_neighbour_in_high_precision_makes_an_end(keep):
    plan = loka.plan(report_of("a", "b", "c", reads=TOWER), loka.Budget(keep=(keep,)))
    assert inside(plan) == (set() if keep == "b" else {"a", "b", "c"} - {keep})
    for d in plan.decisions.values():
        if d.candidate in IN_REGIONS:
            assert d.speedup.value == pytest.approx(310 / 270)
    if keep == "b":
        assert plan.decisions["a/output"].rejected["region"].startswith("speed-up in a region 1 ")


def test_layers_that_lose_their_neighbours_leave_one_after_the_other():
    """At one end a layer of this chain loses, so a tower of four that lacks one falls apart."""
    chain = times(262.5, 270.0)
    reads = {**TOWER, "d": ("c",)}
    cell = times(340.0, 300.0)
    ring = report_of(*"abcd", reads={**reads, "a": ("d",)}, cell=cell, chain=chain)
    assert inside(loka.plan(ring)) == set("abcd")
    assert inside(loka.plan(ring, loka.Budget(keep=("a",)))) == set()


def test_a_budget_that_takes_one_out_makes_ends_of_its_neighbours():
    sites = {Gemm.OUTPUT: {FAST: costing(120, effect(1e-4))}, Gemm.GRAD_INPUT: {FAST: costing(120, None)}}
    sites[Gemm.GRAD_WEIGHT] = {SLOW: costing(125, None)}
    made = in_regions(report_of("a", "b", "c", reads=TOWER, sites=sites), effect(1e-4))
    assert inside(loka.plan(made, loka.Budget(ne=1.0))) == {"a", "b", "c"}
    two = loka.plan(made, loka.Budget(ne=2.5e-4))
    assert len(inside(two)) in (0, 2)
    assert two.kl is None or two.kl.value <= 2.5e-4
    ends = {d.path: d.speedup.value for d in two.decisions.values() if d.candidate in IN_REGIONS}
    assert all(value == pytest.approx(310 / 270) for value in ends.values())


@pytest.mark.parametrize("chain_us", [310.0, 350.0])
def test_neighbours_that_slow_each_other_down_are_not_both_planned(chain_us):
    """Alone in a region a layer takes 290 us for 330 in hp; two that are joined take what is no gain."""
    made = report_of("a", "b", reads={"b": ("a",)}, cell=times(290.0, 330.0), chain=times(chain_us, 310.0))
    plan = loka.plan(made)
    assert inside(plan) == {"a"}
    assert plan.decisions["a/output"].speedup.value == pytest.approx(330 / 290)
    assert inside(loka.plan(made, loka.Budget(keep=("a",)))) == {"b"}


def test_one_of_two_that_slow_each_other_down_is_planned_where_the_other_gains_by_it_alone():
    """Alone in a region a gains 50 us and b none; side by side b gains 30 and a loses 20."""
    made = report_of("a", "b", reads={"b": ("a",)})
    cells = {"a": times(280.0, 330.0), "b": times(330.0, 330.0)}
    chains = {"a": times(330.0, 310.0), "b": times(280.0, 310.0)}
    made = dataclasses.replace(made, region_times=cells, times_in_chains=chains)
    plan = loka.plan(made)
    assert inside(plan) == {"a"}
    assert plan.decisions["a/output"].speedup.value == pytest.approx(330 / 280)
    assert plan.decisions["b/output"].rejected["region"] == "its neighbours in a region and it slow each other down"


def test_of_what_both_starts_of_the_search_come_to_the_faster_is_planned():
    """From none joined c comes in, and saves 100 us for 60 of its GEMMs alone; from all c leaves, and a and b save 123
    for 120."""
    sites = {gemm: {FAST: measured(28.5, 80.0), SLOW: measured(28.5, 85.0)} for gemm in Gemm}
    made = report_of("a", "b", "c", reads={"b": ("a",), "c": ("a", "b")}, sites=sites)
    cells = {"a": times(260.0, 270.0), "b": times(260.0, 280.0), "c": times(270.0, 370.0)}
    chains = {"a": times(210.0, 300.0), "b": times(250.0, 330.0), "c": times(340.0, 270.0)}
    plan = loka.plan(dataclasses.replace(made, region_times=cells, times_in_chains=chains))
    assert inside(plan) == {"c"}
    assert saved_time(plan) == pytest.approx(60 + 60 + 100)


def test_layers_that_gain_together_alone_are_joined_within_a_limit_too():
    """By itself a GEMM saves 20 us. In a region each layer alone is slower than in hp, and both save 123 us."""
    sites = {gemm: {FAST: costing(80, effect(1e-4)), SLOW: costing(85, effect(1e-4))} for gemm in Gemm}
    made = in_regions(report_of("a", "b", reads={"b": ("a",)}, sites=sites), effect(1e-4))
    cells, chains = ((370.0, 290.0), (300.0, 250.0)), ((300.0, 400.0), (240.0, 390.0))
    cells, chains = ({p: times(*us) for p, us in zip("ab", each, strict=True)} for each in (cells, chains))
    plan = loka.plan(dataclasses.replace(made, region_times=cells, times_in_chains=chains), loka.Budget(ne=2.5e-4))
    assert inside(plan) == {"a", "b"}
    assert saved_time(plan) == pytest.approx(370 / 3)


def test_a_search_ends_where_more_is_said_to_be_saved_than_all_takes():
    much = {"grad_output": {"e4m3_row+e4m3_row": Estimate(1e6, 1e6, 1e6)}}
    made = report_of("a", "b", reads={"b": ("a",)})
    made = dataclasses.replace(made, quantize_once_savings={"a": much, "b": much})
    assert inside(loka.plan(made)) == set()


US = st.integers(200, 400).map(float)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 6))
def test_what_a_plan_says_of_a_region_is_what_layers_take_at_their_places(data, layers):
    paths = "abcdef"[:layers]
    reads = {p: tuple(q for q in paths[:i] if data.draw(st.booleans())) for i, p in enumerate(paths)}
    made = report_of(*paths, reads=reads)
    cells = {p: times(data.draw(US), data.draw(US)) for p in paths}
    chains = {p: times(data.draw(US), data.draw(US)) for p in paths}
    made = dataclasses.replace(made, region_times=cells, times_in_chains=chains)
    plan = loka.plan(made)
    for path in inside(plan):
        found = times_at(made, path, inside(plan))[REGION].speedup
        assert plan.decisions[f"{path}/output"].speedup == found
        assert found.low >= plan.budget.min_speedup


def test_a_report_keeps_them(tmp_path):
    made = report_of("a", "b", reads={"b": ("a",)})
    made.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == made
    assert "in a compiled region among others a takes" in str(made)


def regions_alone(made, budget, joined):
    """Microseconds by plan, the layers in regions being those; infinite where a layer would be in none beside them."""
    total = 0.0
    for path in made.region_times:
        found = times_at(made, path, joined)
        saved = found[HP].microseconds.value * (1 - 1 / found[REGION].speedup.value)
        if path in joined and (saved <= 0 or found[REGION].speedup.low < budget.min_speedup):
            return math.inf
        total += 300 - saved * (path in joined)
    return total


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_of_two_neighbours_those_are_in_regions_that_save_most(data):
    made = report_of("a", "b", reads={"b": ("a",)})
    cells, chains = ({p: times(data.draw(US), data.draw(US)) for p in "ab"} for _ in range(2))
    made = dataclasses.replace(made, region_times=cells, times_in_chains=chains)
    budget = loka.Budget()
    best = min(regions_alone(made, budget, set(joined)) for joined in ("", "a", "b", "ab"))
    by_plan = 600 - saved_time(loka.plan(made, budget))
    assert by_plan == pytest.approx(best)
