"""NE against time over budgets, on reports whose answers are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ne_reports import ROW, THREE, costing, effect, model_report, outputs
from reports import measured

import loka
from loka.core.exceptions import LokaError
from loka.core.recipe import Gemm
from loka.core.storage.codec import decode
from loka.planner.frontier import Frontier, base_time, frontier, saved_time


def test_every_step_of_the_frontier_is_there() -> None:
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


def test_the_knee_is_where_ne_stops_buying_more_than_its_share() -> None:
    """On average 100 us for 1.7e-4, 5.9 us per 1e-5: slow's 10 us are above that, dear's 3.3 are not."""
    found = frontier(outputs(**THREE))
    assert found.knee.spent == pytest.approx(2e-5)
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines if line.endswith("knee")] == [f"{found.knee.budget:.2e}"]
    assert "hp takes 300 us" in lines[-1]


def test_times_agree_with_the_summary() -> None:
    report = outputs(**THREE)
    made = loka.plan(report, loka.Budget(ne=1.0))
    assert (
        f"{base_time(report):.0f} us in hp, {base_time(report) - saved_time(made):.0f} us" in made.summary()
    )


def test_own_limits_and_the_rest_of_the_budget() -> None:
    found = frontier(outputs(**THREE), loka.Budget(keep=("cheap",)), limits=[1e-3, 0.0, 1e-5])
    assert [p.budget for p in found.points] == [0.0, 1e-5, 1e-3]
    assert not any("cheap/output" in p.fp8 for p in found.points)


def test_without_times_it_claims_none() -> None:
    layers = {p: {Gemm.OUTPUT: {ROW: costing(None, effect(e))}} for p, e in (("a", 1e-5), ("b", 2e-5))}
    found = frontier(model_report(layers, timed=False))
    assert found.unit == "multiplications"
    assert found.base / found.points[-1].time == pytest.approx(2.0)
    assert "no speed is claimed" in str(found)


def test_without_estimates_it_says_how_to_get_them() -> None:
    with pytest.raises(LokaError, match="estimate of its KL/H") as caught:
        frontier(outputs(a={ROW: measured(28, 50)}))
    assert "docs/ne.md" in str(caught.value)


def test_saved_as_json(tmp_path: Path) -> None:
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
