import dataclasses

import pytest
from ne_reports import ROW, THREE, chosen, effect, outputs
from reports import H200

import loka
from loka.core.exceptions import PlanMismatch
from loka.planner.replan import replan, with_effects


def test_decisions_follow_the_effects():
    """cheap becomes five times as dear: the budget goes to slow alone."""
    report = outputs(**THREE)
    made = loka.plan(report, loka.Budget(ne=2e-5))
    assert chosen(made) == {"cheap": ROW, "dear": "hp", "slow": ROW}
    changed = replan(made, report, {"cheap": {"rowwise_e4m3": effect(5e-5)}})
    assert [site[:3] for site in changed.sites] == [("cheap/output", ROW, "hp")]
    assert not replan(made, report, {"cheap": {"rowwise_e4m3": effect(1e-5)}})
    assert not replan(made, report, {"cheap": {"tensorwise_e4m3": effect(5e-5)}})


def test_times_and_other_errors_stay():
    report = outputs(**THREE)
    new = with_effects(report, {"cheap": {"rowwise_e4m3": effect(5e-5)}})
    before, after = (r.sites["cheap/output"].measurements[ROW] for r in (report, new))
    assert after.errors["ne"] == effect(5e-5)
    assert dataclasses.replace(after, errors=before.errors) == before
    assert "ne" not in new.sites["cheap/output"].measurements["hp"].errors


def test_the_report_must_be_the_plans():
    report = outputs(**THREE)
    made = loka.plan(report)
    elsewhere = dataclasses.replace(report, machine=dataclasses.replace(H200, torch="2.12.0"))
    with pytest.raises(PlanMismatch, match="not the one behind"):
        replan(made, elsewhere, {})
