import dataclasses

import pytest
from ne_reports import ROW, THREE, chosen, costing, effect, outputs
from reports import H200

import loka
from loka.core.exceptions import LokaError, PlanMismatch
from loka.core.records.parts import Part
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


@pytest.mark.parametrize("asked", [{"force": {"sl*": "hp", "*": ROW}}, {"target": "package"}])
def test_what_a_plan_was_asked_for_is_asked_again(tmp_path, asked):
    """Also by its file. A plan of patterns whose order counts, and one for a package, which runs `output` alone."""
    report = outputs(**THREE)
    loka.plan(report, loka.Budget(ne=2e-5), **asked).save(tmp_path / "plan.json")
    made = loka.Plan.load(tmp_path / "plan.json")
    assert loka.plan(report, made.budget, force=dict(made.force), target=made.target) == made
    changed = replan(made, report, {"cheap": {"rowwise_e4m3": effect(5e-5)}})
    assert bool(changed) == ("force" not in asked)  # forced, it stays whatever it costs


def test_a_package_is_planned_again_as_one():
    """What cannot go into it may cost what it likes."""
    report = outputs(a={"cublaslt:tensorwise_e4m3": costing(40, effect(1e-5)), ROW: costing(60, effect(1e-5))})
    dearer = {"a": {"tensorwise_e4m3": effect(1.0)}}
    assert replan(loka.plan(report, loka.Budget(ne=2e-5)), report, dearer)
    assert not replan(loka.plan(report, loka.Budget(ne=2e-5), target="package"), report, dearer)


def test_effects_of_all_rows_say_nothing_of_a_segments_limit():
    made = dataclasses.replace(costing(60, effect(1e-5)), kl_by_part={"g": effect(2e-5)})
    parts = {"g": Part(segment="g", rows=1000, read=1000, width=1.2)}
    report = dataclasses.replace(outputs(a={ROW: made}), parts=parts)
    with pytest.raises(LokaError, match="the plan has limits on g"):
        replan(loka.plan(report, loka.Budget(segments={"g": 1e-4})), report, {})


def test_the_report_must_be_the_plans():
    report = outputs(**THREE)
    made = loka.plan(report)
    elsewhere = dataclasses.replace(report, machine=dataclasses.replace(H200, torch="2.12.0"))
    with pytest.raises(PlanMismatch, match="not the one behind"):
        replan(made, elsewhere, {})
