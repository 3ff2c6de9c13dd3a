"""Plans keep a limit by what their layers lose together, not by the sum alone."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ne_reports import ROW, THREE, chosen, costing, effect, outputs

import loka
from loka.core.records.parts import joined_alike
from loka.planner.choice.limits import lost_alike
from loka.planner.frontier import frontier
from loka.planner.replan import replan

EACH = 1e-5
PATHS = tuple("abcdefgh")
ALIKE = (EACH,) * len(PATHS)


def report_of(correlation, costs=ALIKE):
    layers = {path: {ROW: costing(50, effect(cost))} for path, cost in zip(PATHS, costs, strict=True)}
    alike = {path: dict.fromkeys(PATHS[place + 1 :], correlation) for place, path in enumerate(PATHS[:-1])}
    return dataclasses.replace(outputs(**layers), alike=alike)


def together(count, correlation):
    return EACH * (count + correlation * count * (count - 1))


@given(st.floats(0.05, 1.0), st.floats(1e-6, 1e-3))
def test_as_many_of_equal_layers_as_the_limit_holds(correlation, limit):
    report = report_of(correlation)
    plan = loka.plan(report, loka.Budget(ne=limit))
    assert lost_alike(plan, report, "") <= limit * (1 + 1e-9)
    most = max(count for count in range(len(PATHS) + 1) if together(count, correlation) <= limit * (1 + 1e-9))
    found = sum(name == ROW for name in chosen(plan).values())
    assert found in (most, most - (math.isclose(together(most, correlation), limit, rel_tol=1e-6)))
    assert not any("ABOVE" in note for note in plan.notes)


@given(st.lists(st.floats(1e-7, 1e-4), min_size=len(PATHS), max_size=len(PATHS)), st.floats(0.1, 1.0), st.floats(0, 1))
def test_no_limit_is_broken_but_by_what_is_forced(costs, correlation, share):
    report = report_of(correlation, costs)
    everything = lost_alike(loka.plan(report, loka.Budget(ne=1.0)), report, "")
    limit = max(share * everything, 1e-9)
    assert lost_alike(loka.plan(report, loka.Budget(ne=limit)), report, "") <= limit * (1 + 1e-9)


@given(st.floats(0.1, 1.0), st.lists(st.floats(1e-7, 1e-4), min_size=len(PATHS), max_size=len(PATHS)))
@settings(max_examples=10)
def test_a_frontier_counts_what_layers_lose_together(correlation, costs):
    report = report_of(correlation, costs)
    points = frontier(report, count=6).points
    assert all(point.spent <= point.budget * (1 + 1e-9) for point in points)
    assert all(after.time < before.time for before, after in itertools.pairwise(points))
    last = loka.plan(report, loka.Budget(ne=points[-1].budget))
    assert points[-1].spent == lost_alike(last, report, "") > points[-1].kl.high


def test_what_is_forced_is_said():
    report = report_of(1.0)
    plan = loka.plan(report, loka.Budget(ne=2e-5), force={"*/output": ROW})
    assert lost_alike(plan, report, "") == pytest.approx(together(8, 1.0))
    assert any("ABOVE its limit of 2e-05" in note for note in plan.notes)


def test_a_later_window_brings_its_correlations():
    report = outputs(**THREE)
    made = loka.plan(report, loka.Budget(ne=2.5e-5))
    low = [path for path, name in chosen(made).items() if name == ROW]
    assert len(low) > 1
    known = {path: {"rowwise_e4m3": effect(1e-5)} for path in low}
    assert not replan(made, report, known)
    assert replan(made, report, known, {low[0]: {low[1]: 1.0}})


def test_correlations_of_both_by_their_rows():
    few, many = {"a": {"b": 0.9, "c": 0.3}}, {"b": {"a": 0.4}}
    expected = {"a": {"b": pytest.approx(0.525), "c": 0.3}}  # what a record does not name, chance could have made there
    assert joined_alike(few, many, (100, 300)) == joined_alike(many, few, (300, 100)) == expected
    assert joined_alike(few, many, (1, 0)) == {"a": {"b": pytest.approx(0.9), "c": 0.3}}
    assert joined_alike({}, few, (1000, 1)) == few
