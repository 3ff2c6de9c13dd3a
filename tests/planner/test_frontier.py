import importlib
import itertools
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ne_reports import ROW, THREE, costing, effect, model_report, outputs
from reports import measured

import loka
from loka.core.budget import upper_bound
from loka.core.error import Estimate
from loka.core.exceptions import LokaError
from loka.core.recipe import Gemm
from loka.core.records.parts import Part
from loka.core.storage.codec import decode
from loka.planner.frontier import Frontier, Point, base_time, frontier, saved_time

module = importlib.import_module("loka.planner.frontier")


def test_every_step_of_the_frontier_is_there():
    """cheap saves 40 of 300 us for 1e-5, slow 10 for 1e-5, dear 50 for 1.5e-4."""
    found = frontier(outputs(**THREE))
    assert [(round(p.spent, 9), pytest.approx(p.time)) for p in found.points] == [
        (0.0, 300),
        (1e-5, 260),
        (2e-5, 250),
        (1.7e-4, 200),
    ]
    assert [len(p.fp8) for p in found.points] == [0, 1, 2, 3]
    assert found.base == 300
    assert all(p.spent <= p.budget * (1 + 1e-9) for p in found.points)


def test_the_knee_is_where_ne_stops_buying_more_than_its_share():
    """On average 100 us for 1.7e-4, 5.9 us per 1e-5: slow's 10 us are above that, dear's 3.3 are not."""
    found = frontier(outputs(**THREE))
    assert found.knee.spent == pytest.approx(2e-5)
    lines = str(found).splitlines()
    assert "in eight bits" in lines[1]
    assert [line.split()[0] for line in lines if line.endswith("knee")] == [f"{found.knee.budget:.2e}"]
    assert "hp takes 300 us" in lines[-1]


def test_what_is_spent_is_the_upper_end():
    found = frontier(outputs(a={ROW: costing(60, effect(1e-5, 1e-5))}))
    assert found.points[-1].spent == pytest.approx(upper_bound(effect(1e-5, 1e-5))) != found.points[-1].kl.value


SHARED = {  # grad_weight takes 104 us, of which 30 are the quantization of `input` that `output` has done
    "a": {Gemm.OUTPUT: {ROW: costing(80, effect(1e-5))}, Gemm.GRAD_WEIGHT: {ROW: costing(104, None)}}
}


@pytest.mark.parametrize(
    "report",
    [
        outputs(**THREE),
        model_report(SHARED, quantize_once_savings={"a": {"input": {"e4m3_row+e4m3_row": Estimate(30, 30, 30)}}}),
    ],
)
def test_times_agree_with_the_summary(report):
    made = loka.plan(report, loka.Budget(ne=1.0))
    assert f"{base_time(report):.0f} us in hp, {base_time(report) - saved_time(made):.0f} us" in made.summary()


def test_of_several_tasks_budgets_reach_what_the_dearest_spends():
    """Together a and b spend 3e-5, but cvr 4e-4: budgets ended where nothing was bought."""
    made = replace(costing(60, effect(1.5e-5)), kl_by_part={"ctr": effect(1e-5), "cvr": effect(2e-4)})
    tasks = {name: Part(task=name, rows=1000, read=1000, width=1.2) for name in ("ctr", "cvr")}
    found = frontier(replace(outputs(a={ROW: made}, b={ROW: made}), parts=tasks))
    assert (len(found.points[-1].fp8), found.points[-1].spent) == (2, 4e-4)
    assert "Each of ctr, cvr has the budget" in str(found)


def test_own_limits_and_the_rest_of_the_budget():
    found = frontier(outputs(**THREE), loka.Budget(keep=("cheap",)), limits=[1e-3, 0.0, 1e-5])
    assert [p.budget for p in found.points] == [0.0, 1e-5, 1e-3]
    assert not any("cheap/output" in p.fp8 for p in found.points)


def test_without_times_it_claims_none():
    layers = {p: {Gemm.OUTPUT: {ROW: costing(None, effect(e))}} for p, e in (("a", 1e-5), ("b", 2e-5))}
    found = frontier(model_report(layers, timed=False))
    assert found.unit == "FLOPs"
    assert found.base / found.points[-1].time == pytest.approx(2.0)
    assert "no speed is claimed" in str(found)


def test_without_estimates_it_says_how_to_get_them():
    with pytest.raises(LokaError, match="estimate of its KL/H") as caught:
        frontier(outputs(a={ROW: measured(28, 50)}))
    assert "docs/ne.md" in str(caught.value)


def test_saved_as_json(tmp_path):
    found = frontier(outputs(**THREE))
    found.save(tmp_path / "frontier.json")
    record = json.loads((tmp_path / "frontier.json").read_text())
    assert (record["kind"], record["version"]) == ("loka-frontier", 1)
    content = record["content"]
    assert list(content) == ["model", "machine", "base", "unit", "points"]
    assert list(content["points"][1]) == ["budget", "ne", "spent", "time", "fp8", "knee"]
    assert content["points"][1]["fp8"] == {"cheap/output": ROW}
    assert [point["knee"] for point in content["points"]].count(True) == 1
    assert decode(Frontier, content) == found


def made_of(bought):
    """Points of (spent, time), as planning would leave them."""
    return tuple(Point(budget=spent, kl=effect(spent), spent=spent, time=time, fp8={}) for spent, time in bought)


STEPS = st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 100)), min_size=1, max_size=6)


@given(STEPS, st.integers(0, 5000))
def test_the_knee_lies_farthest_below_the_line_between_the_ends(steps, start):
    """Wherever the frontier starts: limits of one's own need not begin at 0."""
    spent = [start, *itertools.accumulate((ne for ne, _ in steps), initial=start)][1:]
    times = list(itertools.accumulate((-saved for _, saved in steps), initial=1000))
    points = made_of([(float(s), float(t)) for s, t in zip(spent, times, strict=True)])
    (s0, t0), (s1, t1) = (spent[0], times[0]), (spent[-1], times[-1])
    below = [(t0 - t) * (s1 - s0) - (t0 - t1) * (s - s0) for s, t in zip(spent, times, strict=True)]
    place = points.index(module._knee(points))
    assert below[place] == pytest.approx(max(below), abs=1e-6 * (s1 - s0) * (t0 - t1))


def test_the_table_says_what_each_step_buys():
    """cheap and slow save 40 and 10 of 300 us for 1e-5 each: 1.33 and 0.333 % for each 1e-6."""
    lines = [line.split() for line in str(frontier(outputs(**THREE))).splitlines()]
    told = [(line[3], *line[-3:]) for line in lines if line and line[0][0].isdigit()]
    assert [line[1:] for line in told] == [
        ("300", "1.000x", "-"),
        ("1.154x", "1.33", "%"),
        ("0.333", "%", "knee"),
        ("1.500x", "0.111", "%"),
    ]


def test_limits_are_in_even_ratios_from_the_cheapest_site_to_all():
    """Layers that cost 1, 2, 4, ...: a limit of those that double admits one more, or the next does."""
    count = 12
    cost = [1e-6 * 2**n for n in range(count)]
    report = outputs(**{f"layer{n:02}": {ROW: costing(50, effect(ne))} for n, ne in enumerate(cost)})
    found = frontier(report, count=count + 1)
    assert found.points[0].budget == 0
    assert found.points[1].budget == pytest.approx(cost[0])
    assert found.points[-1].budget == pytest.approx(sum(cost), rel=1e-8)
    assert len(found.points[-1].fp8) == count
    ratio = (sum(cost) / cost[0]) ** (1 / count)
    steps = [math.log(point.budget / cost[0], ratio) for point in found.points[1:]]
    assert steps == pytest.approx([round(step) for step in steps], abs=1e-6)
    assert len(steps) >= count  # nearly every limit buys something


def test_limits_cover_four_decades_at_most():
    report = outputs(a={ROW: costing(50, effect(1e-12))}, b={ROW: costing(50, effect(1e-3))})
    found = frontier(report)
    assert [len(point.fp8) for point in found.points] == [0, 1, 2]
    assert found.points[1].budget == pytest.approx(1e-7)


def test_a_frontier_without_a_limit_is_refused():
    with pytest.raises(LokaError, match="names no limit"):
        frontier(outputs(**THREE), limits=())
