import dataclasses
import json
import math
from fractions import Fraction

import pytest
from ne_reports import ROW, TENSOR, THREE, chosen, costing, effect, model_report, outputs
from reports import measured

import loka
from loka.core.budget import Budget, total_effect, upper_bound
from loka.core.error import Estimate
from loka.core.recipe import Gemm
from loka.core.records.parts import Part


def test_the_budget_goes_where_it_saves_most():
    """cheap saves 40 us for 1e-5, slow 10 for 1e-5, dear 50 for 1.5e-4: the last where there is room."""
    report = outputs(**THREE)
    assert chosen(loka.plan(report, Budget(ne=1e-5))) == {"cheap": ROW, "dear": "hp", "slow": "hp"}
    assert chosen(loka.plan(report, Budget(ne=2e-5))) == {"cheap": ROW, "dear": "hp", "slow": ROW}
    assert chosen(loka.plan(report, Budget(ne=1.65e-4))) == {"cheap": ROW, "dear": ROW, "slow": "hp"}
    everything = loka.plan(report, Budget(ne=1.7e-4))
    assert set(chosen(everything).values()) == {ROW}
    assert chosen(everything) == chosen(loka.plan(report)), "a budget that binds nothing changes nothing"
    refused = loka.plan(report, Budget(ne=1.6e-4 - 1e-8)).decisions["dear/output"]
    assert "is better spent elsewhere" in refused.rejected[ROW]
    assert (
        "above all that the sum of layers may spend, 0.0001"
        in loka.plan(report, Budget(ne=1e-4)).decisions["dear/output"].reason
    )


def test_a_doubtful_effect_costs_its_upper_end():
    """1.96 standard errors are half of the interval; 1.64 are charged: 1e-5 + 0.839 * 1e-5."""
    assert upper_bound(effect(1e-5, 1e-5)) == pytest.approx(1.839e-5, rel=1e-3)
    assert upper_bound(Estimate(1e-5, -math.inf, math.inf)) == math.inf
    assert upper_bound(Estimate(math.nan, math.nan, math.nan)) == math.inf
    report = outputs(sure={ROW: costing(60, effect(1.2e-5))}, unsure={ROW: costing(60, effect(1e-5, 1e-5))})
    assert chosen(loka.plan(report, Budget(ne=1.5e-5))) == {"sure": ROW, "unsure": "hp"}
    two = outputs(a={ROW: costing(60, effect(1e-5, 1e-5))}, b={ROW: costing(70, effect(1e-5, 1e-5))})
    assert chosen(loka.plan(two, Budget(ne=3e-5))) == {"a": ROW, "b": "hp"}, "in a sum, too"


@pytest.mark.parametrize(
    "limit",
    [
        {"ne": Fraction(1, 10**4)},
        {"ne": 10**400},
        {"min_sqnr_db": "25"},
        {"min_speedup": "1"},
        {"regions": "no"},
        {"keep_prediction": 0},
    ],
)
def test_a_limit_that_no_file_could_hold_is_refused_by_name(limit):
    """A plan with it was made, and could not be saved."""
    with pytest.raises(ValueError, match=f"{next(iter(limit))} is "):
        Budget(**limit)


@pytest.mark.parametrize("budget", [Budget(), Budget(ne=1.0)])
def test_what_is_beyond_second_order_is_told(budget):
    """Sites add up to it: 0.12 was predicted where 0.28 was lost."""
    for each, told in ((0.02, False), (0.03, True)):
        plan = loka.plan(outputs(a={ROW: costing(60, effect(each))}, b={ROW: costing(60, effect(each))}), budget)
        assert any("beyond second order" in note for note in plan.notes) == told


def test_the_plan_carries_what_it_costs(tmp_path):
    report = outputs(a={ROW: costing(60, effect(1e-5, 4e-6))}, b={ROW: costing(60, effect(2e-5, 1e-6))})
    plan = loka.plan(report, Budget(ne=1e-4))
    assert plan.decisions["a/output"].kl == effect(1e-5, 4e-6)
    # Both sites were estimated on the same rows, so the ends add up, not the variances.
    assert plan.kl == total_effect([effect(1e-5, 4e-6), effect(2e-5, 1e-6)])
    assert plan.kl.high == pytest.approx(3.5e-5)
    assert "Predicted KL/H: 3e-05 [2.5e-05, 3.5e-05]; the budget is 0.0001." in plan.summary()
    assert "1.0e-05" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert loka.Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    ("rate", "told"), [(0.0, "0 of the peak, so by that it is"), (0.7, "NO: its"), (None, "Not known")]
)
def test_a_plan_says_whether_the_model_was_annealed(rate, told, tmp_path):
    """KL/H tells the change of NE by the labels only of a model whose rate has decayed."""
    report = dataclasses.replace(outputs(a={ROW: costing(60, effect(1e-5))}), final_rate=rate)
    report.save(tmp_path / "report.json")
    plan = loka.plan(loka.Report.load(tmp_path / "report.json"), Budget(ne=1e-4))
    asked = [note for note in plan.notes if "is this model annealed?" in note]
    assert len(asked) == 1
    assert told in asked[0]
    assert not any("annealed" in note for note in loka.plan(report).notes), "without KL/H it is not asked"


def test_without_a_budget_plans_are_what_they_were(tmp_path):
    report = outputs(a={ROW: measured(28, 60)})
    content = loka.plan(report).to_json()
    assert "ne" not in content["budget"]
    assert "ne" not in content["decisions"]["a/output"]
    assert "NE" not in str(loka.plan(report))
    with_budget = loka.plan(report, Budget(ne=1e-4))
    assert any("ne None -> 0.0001" in line for line in loka.diff(loka.plan(report), with_budget).context)
    assert any("ne 0.0001 -> None" in line for line in loka.diff(with_budget, loka.plan(report)).context)
    json.dumps(content, allow_nan=False)


def test_a_site_without_an_estimate_stays_in_hp_and_says_how_to_get_one():
    report = outputs(known={ROW: costing(60, effect(1e-6))}, unknown={ROW: costing(50, None)})
    plan = loka.plan(report, Budget(ne=1e-4))
    assert chosen(plan) == {"known": ROW, "unknown": "hp"}
    assert "not known" in plan.decisions["unknown/output"].reason
    assert "plan with ne=None" in plan.decisions["unknown/output"].reason
    assert plan.kl_unknown == ()
    forced = loka.plan(report, Budget(ne=1e-4), force={"unknown": ROW})
    assert forced.kl_unknown == ("unknown/output",)
    assert "and 1 without an estimate" in forced.summary()


def test_a_limit_of_a_segment_tells_how_many_forced_sites_its_sum_lacks():
    known = dataclasses.replace(costing(60, effect(1e-5)), kl_by_part={"g": effect(2e-5)})
    report = outputs(known={ROW: known}, forced={ROW: costing(60, effect(1e-5))})
    report = dataclasses.replace(report, parts={"g": Part(segment="g", rows=1000, read=1000, width=1.2)})
    plan = loka.plan(report, Budget(segments={"g": 1e-4}), force={"forced": ROW})
    assert plan.kl_unknown_of("g") == ("forced/output",)
    assert "g 2e-05 [2e-05, 2e-05] of 0.0001, and 1 without an estimate." in plan.summary()


def test_floors_hold_beside_the_budget():
    free = effect(1e-9)
    report = outputs(
        exact={ROW: costing(60, free)}, rough={ROW: costing(60, free, sqnr=20)}, slow={ROW: costing(98, free)}
    )
    plan = loka.plan(report, Budget(ne=1.0))
    assert chosen(plan) == {"exact": ROW, "rough": "hp", "slow": "hp"}
    kept = loka.plan(report, Budget(ne=1.0, min_sqnr_db=None, keep=("exact",)))
    assert chosen(kept) == {"exact": "hp", "rough": ROW, "slow": "hp"}


def test_gradients_spend_nothing_and_keep_their_rules():
    gemms = {gemm: {ROW: costing(60, None)} for gemm in (Gemm.GRAD_INPUT, Gemm.GRAD_WEIGHT)}
    report = model_report({"a": {Gemm.OUTPUT: {ROW: costing(60, effect(1e-3))}, **gemms}})
    plan = loka.plan(report, Budget(ne=1e-4))
    assert {site: d.candidate for site, d in plan.decisions.items()} == {
        "a/output": "hp",
        "a/grad_input": ROW,
        "a/grad_weight": ROW,
    }
    assert plan.kl is None


def test_a_layer_can_be_bought_at_two_prices():
    """Tensor scales are 10 us faster and three times as dear; rows where the budget is short."""
    both = {ROW: costing(60, effect(1e-5)), TENSOR: costing(50, effect(3e-5))}
    report = outputs(a=both, b=both)
    assert set(chosen(loka.plan(report, Budget(ne=2e-5))).values()) == {ROW}
    assert sorted(chosen(loka.plan(report, Budget(ne=4e-5))).values()) == [ROW, TENSOR]
    assert set(chosen(loka.plan(report, Budget(ne=6e-5))).values()) == {TENSOR}


def test_of_what_is_tied_in_time_the_cheaper_is_taken():
    """0.5 us of 60 is noise: no NE is spent on it, however much is left."""
    for cheap, dear in ((ROW, TENSOR), (TENSOR, ROW)):
        both = {cheap: costing(60, effect(1e-5)), dear: costing(59.5, effect(3e-5))}
        assert chosen(loka.plan(outputs(a=both), Budget(ne=1.0))) == {"a": cheap}


def test_quantizing_once_is_part_of_what_a_layer_saves():
    """a: grad_weight loses alone (104 us) and wins 30 us of shared input beside an FP8 output."""
    gwt = {Gemm.GRAD_WEIGHT: {ROW: costing(104, None)}}
    layers = {
        "a": {Gemm.OUTPUT: {ROW: costing(80, effect(1e-5))}, **gwt},
        "b": {Gemm.OUTPUT: {ROW: costing(75, effect(1e-5))}},
    }
    savings = {"a": {"input": {"e4m3_row+e4m3_row": Estimate(30, 30, 30)}}}
    plan = loka.plan(model_report(layers, quantize_once_savings=savings), Budget(ne=1e-5))
    assert {site: d.candidate for site, d in plan.decisions.items()} == {
        "a/output": ROW,
        "a/grad_weight": ROW,
        "b/output": "hp",
    }


def test_what_is_forced_spends_first():
    report = outputs(**THREE)
    plan = loka.plan(report, Budget(ne=1.6e-4), force={"dear": ROW})
    assert chosen(plan) == {"cheap": ROW, "dear": ROW, "slow": "hp"}
    over = loka.plan(report, Budget(ne=1e-4), force={"dear": ROW})
    assert chosen(over) == {"cheap": "hp", "dear": ROW, "slow": "hp"}
    assert any("left for the sum" in note for note in over.notes)
    just = loka.plan(report, Budget(ne=1.5e-4), force={"dear": ROW})  # all of it
    assert chosen(just) == {"cheap": "hp", "dear": ROW, "slow": "hp"}
    assert not any("left for the sum" in note for note in just.notes)


def untimed(**sides):
    report = model_report({path: {Gemm.OUTPUT: {ROW: costing(None, effect(1e-5))}} for path in ("a", "b")}, timed=False)
    site = report.sites["b/output"]
    problem = dataclasses.replace(site.problem, **{k: of(getattr(site.problem, k)) for k, of in sides.items()})
    return dataclasses.replace(report, sites={**report.sites, "b/output": dataclasses.replace(site, problem=problem)})


def test_without_times_multiplications_are_saved():
    plan = loka.plan(untimed(n=lambda n: 4096), Budget(ne=1e-5))
    assert chosen(plan) == {"a": "hp", "b": ROW}
    assert "is better spent elsewhere" in plan.decisions["a/output"].reason
    assert "no speed is claimed" in plan.summary()
    both = {ROW: costing(None, effect(1e-5)), TENSOR: costing(None, effect(3e-6))}
    exact = model_report({"a": {Gemm.OUTPUT: both}}, timed=False)
    assert chosen(loka.plan(exact, Budget(ne=1e-4))) == {"a": TENSOR}


def test_without_times_the_limit_that_is_spent_most_of_decides():
    """Rows spend 0.9 of one limit and 0.01 of the other, tensor scales half of each."""
    made = {name: costing(None, effect(1e-5)) for name in (ROW, TENSOR)}
    for name, kl in ((ROW, (9e-5, 1e-6)), (TENSOR, (5e-5, 5e-5))):
        made[name] = dataclasses.replace(made[name], kl_by_part=dict(zip("gh", map(effect, kl), strict=True)))
    parts = {name: Part(segment=name, rows=1000, read=1000, width=1.2) for name in "gh"}
    report = dataclasses.replace(model_report({"a": {Gemm.OUTPUT: made}}, timed=False), parts=parts)
    assert chosen(loka.plan(report, Budget(segments={"g": 1e-4, "h": 1e-4}))) == {"a": TENSOR}


@pytest.mark.parametrize("side", ["m", "n", "k"])
def test_without_times_each_side_of_a_gemm_is_work(side):
    longer = untimed(**{side: lambda size: 2 * size})
    assert chosen(loka.plan(longer, Budget(ne=1e-5))) == {"a": "hp", "b": ROW}


NOT_KNOWN = [
    Estimate(math.nan, math.nan, math.nan),
    Estimate(1e-5, 0.0, math.inf),
    Estimate(math.inf, math.inf, math.inf),
]


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("wild", NOT_KNOWN)
def test_a_forced_effect_that_is_not_finite_is_one_that_is_not_known(wild, timed):
    us = 60 if timed else None
    layers = {"wild": {Gemm.OUTPUT: {ROW: costing(us, wild)}}, "tame": {Gemm.OUTPUT: {ROW: costing(us, effect(1e-5))}}}
    report = model_report(layers, timed=timed)
    assert chosen(loka.plan(report, Budget(ne=1e-4))) == {"wild": "hp", "tame": ROW}
    plan = loka.plan(report, Budget(ne=1e-4), force={"wild": ROW})
    assert chosen(plan) == {"wild": ROW, "tame": ROW}
    assert plan.kl_unknown == ("wild/output",)
    assert plan.kl == effect(1e-5)
    assert "and 1 without an estimate" in plan.summary()
