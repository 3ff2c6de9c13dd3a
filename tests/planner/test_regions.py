"""Layers planned as parts of compiled regions; every expected time is worked out by hand.

hp takes 100 us at each GEMM, 300 us a layer. A cell, the layer and the code around it, takes 330 us in hp.
"""

import dataclasses
import json

import pytest
import torch
from models import stats_of
from ne_reports import costing, effect, in_regions, model_report
from reports import around, layer_report, measured
from torch import nn

import loka
from loka.compiler.joint_sites import IN_REGIONS
from loka.compiler.notes import note_sites, record_text
from loka.core.error import Estimate
from loka.core.recipe import Gemm
from loka.core.records.coverage import Coverage
from loka.core.records.report import HP, REGION, Measurement, Report
from loka.core.storage.codec import decode, encode
from loka.core.storage.files import read_record, write_record
from loka.measurement import Settings
from loka.nn import sites_of
from loka.planner.baselines import fastest_of_library, only_library
from loka.planner.choice.ne_budget import cost_of
from loka.planner.frontier import base_time, frontier, saved_time
from loka.planner.replan import with_effects

FAST, SLOW = "torch_fast:rowwise_e4m3", "torch:rowwise_e4m3"
OUT, GIN, GWT = Gemm.OUTPUT, Gemm.GRAD_INPUT, Gemm.GRAD_WEIGHT
BY_GEMM = dict(zip(Gemm, IN_REGIONS, strict=True))


def cell(region_us, hp_us=330.0, *, noise=0.01):
    """As measurement/times/region_times.py times it."""
    return {
        HP: Measurement(microseconds=around(hp_us, noise), speedup=Estimate(1.0, 1.0, 1.0), rounds=15),
        REGION: Measurement(microseconds=around(region_us, noise), speedup=around(hp_us / region_us, noise), rounds=15),
    }


def candidates(us=90.0, *, sqnr=28.5):
    return {FAST: measured(sqnr, us, noise=0.001), SLOW: measured(sqnr, us + 5, noise=0.001)}


def layer(times, *, us=90.0, gemms=tuple(Gemm)):
    made = layer_report({gemm: candidates(us) for gemm in gemms})
    return dataclasses.replace(made, region_times={"fc": times})


def inside(plan):
    return {d.path for d in plan.decisions.values() if d.candidate in IN_REGIONS}


def names(plan):
    return {d.problem.gemm: d.candidate for d in plan.decisions.values()}


def test_a_region_that_is_fastest_is_planned_with_its_times():
    """The cell saves 165 of 330 us, so the GEMMs are left with 135 of 300: 45 each, of 100."""
    plan = loka.plan(layer(cell(165.0)))
    assert names(plan) == BY_GEMM
    for decision in plan.decisions.values():
        assert decision.reason == (
            "in a compiled region, where the layer and the code around it take 165 [163.3, 166.7] us, "
            "330 [326.7, 333.3] us in hp"
        )
        assert decision.microseconds.value == pytest.approx(45.0)
        # At 1.98 and 2.02 times as fast the cell saves 163.3 and 166.6 us: 136.7 and 133.4 are left.
        assert decision.microseconds.low == pytest.approx(133.4 / 3, abs=0.1)
        assert decision.microseconds.high == pytest.approx(136.7 / 3, abs=0.1)
        assert decision.hp_microseconds.value == 100.0
        assert decision.speedup.value == pytest.approx(2.0)
        assert decision.speedup.low == pytest.approx(1.98)
        assert decision.sqnr_db.value == 28.5, "that of the row scales which are no powers of two"
        assert decision.mere.value == 0.1
        assert decision.runner_up == HP
        assert decision.saved_us == 0.0
        assert decision.rejected == {FAST: "slower than in a region", SLOW: "slower than in a region"}


def test_sites_by_themselves_are_kept_where_they_are_faster():
    """The cell saves 30 us, the sites 150."""
    plan = loka.plan(layer(cell(300.0), us=50.0))
    assert set(names(plan).values()) == {FAST}
    assert all(d.reason.startswith("fastest") for d in plan.decisions.values())


def test_a_region_that_takes_longer_than_hp_is_not_planned():
    plan = loka.plan(layer(cell(340.0), us=110.0))
    assert set(names(plan).values()) == {HP}
    assert plan.decisions["fc/output"].rejected["region"].startswith("speed-up in a region 0.97")


def test_a_region_needs_the_least_speedup_at_the_safe_end():
    """1.06x with 2 % of noise may be 1.04x."""
    unsure, sure = cell(330 / 1.06, noise=0.02), cell(330 / 1.06, noise=0.001)
    assert set(names(loka.plan(layer(unsure, us=110.0))).values()) == {HP}
    assert names(loka.plan(layer(sure, us=110.0))) == BY_GEMM
    strict = loka.Budget(min_speedup=1.1)
    assert set(names(loka.plan(layer(sure, us=110.0), strict)).values()) == {HP}


def test_a_region_wins_where_no_gemm_wins_by_itself():
    """Which is what regions are for: narrow layers, whose casts by themselves eat what FP8 gains."""
    plan = loka.plan(layer(cell(220.0), us=130.0))
    assert names(plan) == BY_GEMM
    assert "300 us in hp, 190 us by plan (1.58x)" in plan.summary()


def test_one_gemm_beyond_the_error_limits_refuses_the_region():
    sites = {gemm: candidates() for gemm in Gemm}
    sites[GWT] = {FAST: measured(28.5, 90.0), SLOW: measured(24.0, 95.0)}  # SLOW is what regions run there
    report = dataclasses.replace(layer_report(sites), region_times={"fc": cell(165.0)})
    assert set(names(loka.plan(report)).values()) == {FAST}
    assert names(loka.plan(report, loka.Budget(min_sqnr_db=20.0))) == BY_GEMM
    assert set(names(loka.plan(report, loka.Budget(min_sqnr_db=None, max_mere=0.05))).values()) == {HP}


@pytest.mark.parametrize("gemm", list(Gemm))
def test_a_region_whose_errors_are_not_known_or_that_cannot_run_is_not_planned(gemm):
    other = {"fbgemm:rowwise_e4m3": measured(28.5, 110.0)}
    lost = {name: Measurement(unsupported="no kernel") for name in (FAST, SLOW)}
    for found, why in (
        (other, f"the errors of {BY_GEMM[gemm]}, or of hp, were not measured at fc/{gemm}"),
        (other | lost, f"fc/{gemm}: no kernel"),
    ):
        sites = {each: candidates(110.0) for each in Gemm} | {gemm: found}
        plan = loka.plan(dataclasses.replace(layer_report(sites), region_times={"fc": cell(165.0)}))
        assert set(names(plan).values()) == {HP}
        assert {d.rejected["region"] for d in plan.decisions.values()} == {why}


def test_errors_with_fast_accumulation_stand_for_exact_sums():
    sites = {gemm: candidates(110.0) for gemm in Gemm}
    del sites[GWT][SLOW]
    report = dataclasses.replace(layer_report(sites), region_times={"fc": cell(165.0)})
    assert names(loka.plan(report)) == BY_GEMM


@pytest.mark.parametrize(
    "times",
    [
        {},
        {REGION: Measurement(unsupported="in_features = 13 is no multiple of 16")},
        {HP: Measurement(unsupported="cannot be timed: it raised")},
        {HP: cell(165.0)[HP], REGION: Measurement(unsupported="cannot be timed: it raised")},
    ],
)
def test_a_region_that_was_not_timed_is_not_planned(times):
    plan = loka.plan(layer(times, us=110.0))
    assert set(names(plan).values()) == {HP}
    assert all(d.rejected["region"] for d in plan.decisions.values())
    assert "in a compiled region" not in str(layer(times))


def test_measured_under_its_own_name_it_does_not_reject_itself():
    sites = {gemm: {**candidates(), BY_GEMM[gemm]: measured(27.0, 92.0)} for gemm in Gemm}
    report = dataclasses.replace(layer_report(sites), region_times={"fc": cell(165.0)})
    plan = loka.plan(report)
    assert names(plan) == BY_GEMM
    for decision in plan.decisions.values():
        assert decision.sqnr_db.value == 27.0
        assert set(decision.rejected) == {FAST, SLOW}
    timeless = {gemm: {**candidates(), BY_GEMM[gemm]: measured(27.0)} for gemm in Gemm}
    report = dataclasses.replace(layer_report(timeless), region_times={"fc": cell(165.0)})
    assert all(set(d.rejected) == {FAST, SLOW} for d in loka.plan(report).decisions.values())


def test_kept_and_forced_gemms_leave_no_region():
    """The layer is in a region as a whole, or not at all."""
    report = layer(cell(165.0))
    for keep in ("fc", "fc/grad_weight"):
        plan = loka.plan(report, loka.Budget(keep=(keep,)))
        assert not set(names(plan).values()) & set(IN_REGIONS)
        assert plan.decisions["fc/grad_weight"].candidate == HP
    assert set(names(loka.plan(report, force={"*": HP})).values()) == {HP}
    one = loka.plan(report, force={"fc/output": FAST})
    assert set(names(one).values()) == {FAST}


def test_a_prediction_layer_is_in_no_region():
    report = layer(cell(165.0))
    shape = dataclasses.replace(report.model.layers["fc"], out_features=8)
    narrow = dataclasses.replace(report, model=dataclasses.replace(report.model, layers={"fc": shape}))
    assert set(names(loka.plan(narrow)).values()) == {HP}
    assert names(loka.plan(narrow, loka.Budget(keep_prediction=False))) == BY_GEMM


def test_a_region_by_force_is_told_with_the_errors_of_its_recipe():
    """Where nothing could be timed in regions, such as on a CPU."""
    plan = loka.plan(layer({}), force={f"fc/{gemm}": name for gemm, name in BY_GEMM.items()})
    assert names(plan) == BY_GEMM
    for decision in plan.decisions.values():
        assert decision.reason.startswith("forced by")
        assert decision.sqnr_db.value == 28.5
        assert decision.microseconds is None, "not that of the candidate by itself"
        assert decision.speedup is None


def test_a_layer_without_grad_input():
    """The first layer of a model: 55 of 110 us are saved in the cell, of 200 us of its GEMMs."""
    plan = loka.plan(layer(cell(165.0, 220.0), gemms=(OUT, GWT)))
    assert names(plan) == {OUT: IN_REGIONS[0], GWT: IN_REGIONS[2]}
    assert plan.decisions["fc/output"].microseconds.value == pytest.approx(72.5)
    assert plan.candidates("fc") == {"output": IN_REGIONS[0], "grad_input": HP, "grad_weight": IN_REGIONS[2]}


def test_a_tie_goes_to_fewer_gemms_in_fp8():
    """One GEMM in FP8 saves 40 us, the region 40.5: within 1 % of what differs."""
    sites = {gemm: candidates(110.0) for gemm in Gemm} | {OUT: candidates(60.0)}
    report = dataclasses.replace(layer_report(sites), region_times={"fc": cell(330 - 40.5)})
    assert names(loka.plan(report)) == {OUT: FAST, GIN: HP, GWT: HP}
    faster = dataclasses.replace(report, region_times={"fc": cell(330 - 50.0)})
    assert names(loka.plan(faster)) == BY_GEMM


def with_ne(cost, **others):
    """Layers `a` and `b`; in regions each costs as much KL/H as by themselves."""
    gemms = {OUT: {FAST: costing(97, cost), **others}, GIN: {FAST: costing(97, None)}, GWT: {SLOW: costing(97, None)}}
    made = model_report({"a": gemms, "b": gemms}, region_times={"a": cell(165.0), "b": cell(220.0)})
    return in_regions(made, cost)


def test_a_region_costs_what_its_own_recipe_does_at_output():
    """Power-of-two scales have the SQNR of others, and cost more KL/H."""
    report = in_regions(with_ne(effect(1e-4, 1e-5)), effect(3e-4, 1e-5))
    site = report.sites["a/output"]
    everything = {"": 1.0}
    assert cost_of(site, IN_REGIONS[0], everything) > cost_of(site, FAST, everything) > (0,)
    plan = loka.plan(report, loka.Budget(ne=1.0))
    assert all(d.candidate in IN_REGIONS for d in plan.decisions.values())
    assert plan.kl.value == pytest.approx(6e-4)
    assert {d.sqnr_db.value for d in plan.decisions.values()} == {28.0}
    assert plan.kl_unknown == ()
    assert "Predicted KL/H" in plan.summary()
    assert inside(loka.plan(report, loka.Budget(ne=4e-4))) == {"a"}
    raced = {**site.measurements, "emulated:rowwise_e4m3_pow2": costing(99, effect(5e-4))}
    assert dataclasses.replace(site, measurements=raced).kl_of_recipe("rowwise_e4m3_pow2") == {"": effect(5e-4)}
    by_task = dataclasses.replace(site, region_kl={"rowwise_e4m3_pow2": {"ctr": effect(2e-4)}}).measured(IN_REGIONS[0])
    assert by_task.kl_by_part == {"ctr": effect(2e-4)}
    assert by_task.kl_of("") is None


def test_no_other_recipes_cost_stands_for_that_of_a_region():
    """A report of an earlier version knows only the recipes that raced."""
    report = with_ne(effect(9.9e-5))
    sites = {name: dataclasses.replace(site, region_kl={}) for name, site in report.sites.items()}
    old = dataclasses.replace(report, sites=sites)
    plan = loka.plan(old, loka.Budget(ne=1e-3))
    assert inside(plan) == set()
    assert "does not hold the KL/H of rowwise_e4m3_pow2" in plan.decisions["a/output"].rejected[REGION]
    (note,) = [note for note in plan.notes if "a, b" in note]
    assert "measure again" in note
    assert not any("measure again" in note for note in loka.plan(old, loka.Budget(ne=1e-3, regions=False)).notes)
    assert not any("measure again" in note for note in loka.plan(report, loka.Budget(ne=1e-3)).notes)
    without = loka.plan(old)
    assert inside(without) == {"a", "b"}, "no limit on KL/H holds"
    assert without.kl is None
    assert without.kl_unknown == ("a/output", "b/output")


def test_a_tight_budget_takes_the_region_that_saves_most_and_refuses_the_other():
    report = with_ne(effect(1e-4))
    one = loka.plan(report, loka.Budget(ne=1.5e-4))
    assert one.candidates("a") == dict(zip(map(str, Gemm), IN_REGIONS, strict=True))
    assert one.decisions["b/output"].candidate == HP
    assert one.decisions["b/output"].rejected[FAST].startswith("speed-up 1.031"), "by itself it gains too little"
    assert one.decisions["b/output"].rejected[REGION] == f"KL/H {effect(1e-4)} is better spent elsewhere"
    assert one.kl.value == pytest.approx(1e-4)
    none = loka.plan(report, loka.Budget(ne=5e-5))
    assert not {d.candidate for d in none.decisions.values()} & set(IN_REGIONS)
    assert none.kl is None


def test_a_region_without_an_estimate_is_not_admitted_to_a_budget():
    report = with_ne(effect(1e-4))
    sites = {**report.sites}
    raced = {HP: measured(55, 100.0), FAST: costing(97, None)}
    lost = dataclasses.replace(sites["a/output"], measurements=raced, region_kl={})
    report = dataclasses.replace(report, sites={**sites, "a/output": lost}, no_effect={"a": "no samples"})
    plan = loka.plan(report, loka.Budget(ne=1.0))
    assert plan.decisions["a/output"].candidate == HP
    assert plan.decisions["b/output"].candidate == IN_REGIONS[0]


def test_later_effects_change_what_a_region_costs():
    report = with_effects(with_ne(effect(1e-4)), {"a": {"rowwise_e4m3_pow2": effect(3e-4)}})
    assert cost_of(report.sites["a/output"], IN_REGIONS[0], {"": 1.0}) == pytest.approx((3e-4,))


def test_the_frontier_of_ne_counts_what_regions_save():
    report = with_ne(effect(1e-4))
    found = frontier(report, limits=(0.0, 1.5e-4, 3e-4))
    assert [len(point.fp8) for point in found.points] == [0, 3, 6]
    assert found.base == base_time(report) == 600.0
    # a: 150 of 300 us; b: a third of its cell, 110 us.
    assert [found.base - point.time for point in found.points] == pytest.approx([0.0, 165.0, 275.0])
    assert saved_time(loka.plan(report, loka.Budget(ne=3e-4))) == pytest.approx(275.0)


def test_single_libraries_have_no_regions():
    """They are what a user without LoKA would run."""
    for gemms in (tuple(Gemm), (OUT, GIN)):
        report = layer(cell(165.0), gemms=gemms)
        sites = set(report.sites)
        alone = only_library(report, "torch")
        assert {d.candidate for d in loka.plan(alone).decisions.values()} == {FAST}
        for everywhere in (True, False):
            assert fastest_of_library(report, "torch", loka.Budget(), everywhere=everywhere) == dict.fromkeys(
                sites, FAST
            )


def test_a_report_keeps_region_times_and_tells_them(tmp_path):
    report = layer(cell(165.0))
    report.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == report
    assert "in a compiled region fc takes 165.0 us with the code around it, 330.0 us in hp (2.00x)" in str(report)


def test_a_report_of_before_has_none(tmp_path):
    path = tmp_path / "report.json"
    layer_report({OUT: candidates()}).save(path)
    content = read_record(path, kind="loka-report", version=2, way_out="", parse=dict)
    assert "region_times" not in content, "a report without is written as before"
    old = {**content, "chain_times": {}, "turned_times": {}}
    write_record(path, kind="loka-report", version=2, content=json.loads(json.dumps(old)))
    report = Report.load(path)
    assert report.region_times == {}
    assert loka.plan(report).decisions["fc/output"].candidate == FAST


def test_a_plan_of_regions_is_written_and_told(tmp_path):
    flops = {str(gemm): 1e9 for gemm in Gemm}
    report = dataclasses.replace(layer(cell(165.0)), coverage=Coverage(sites={"fc": flops}))
    plan = loka.plan(report)
    plan.save(tmp_path / "plan.json")
    assert loka.Plan.load(tmp_path / "plan.json") == plan
    assert f"3 of 3 sites in FP8: 1 {IN_REGIONS[2]}, 2 {IN_REGIONS[0]}" in plan.summary()
    # More than the 2.00x of the layer with the code around it, whose savings are among the 165 us.
    assert "300 us in hp, 135 us by plan (2.22x), regions in cells of single layers: loka.confirm" in plan.summary()
    assert plan.coverage_lines()[0].startswith("100.0 % of the step's matmul FLOPs run in FP8")
    assert plan.output_recipes == {"fc": "rowwise_e4m3_pow2"}
    assert "in a compiled region" in str(plan)
    told = str(loka.diff(loka.plan(dataclasses.replace(report, region_times={})), plan))
    assert "in a compiled region" in told


def test_counters_that_lie_where_others_lay_know_nothing():
    """Memory is used again: of a model that was freed by a copy, say, that never ran."""
    memory = bytearray(3 * 3 * 8)
    model = nn.Sequential(nn.Linear(32, 16))
    stats = stats_of(model, torch.randn(16, 32), torch.sum, effect_samples=0)
    report = loka.measure(
        stats, device="cpu", candidates=["emulated:rowwise_e4m3_pow2"], settings=Settings(max_draws=2, min_draws=2)
    )
    loka.convert(model, loka.plan(report, force={"*": "emulated:rowwise_e4m3_pow2"}))
    (site,) = sites_of(model).values()
    site.health = torch.frombuffer(memory, dtype=torch.int64).view(3, 3)
    note_sites([site.health], [torch.ones(1)], [0], [0], record_text([["0"]], {}))
    assert loka.regions(model).applied == (("0",),)
    site.health = torch.zeros(3, 3, dtype=torch.int64)
    site.health = torch.frombuffer(memory, dtype=torch.int64).view(3, 3)
    listed = loka.regions(model)
    assert not listed.applied
    assert listed.apart == {"0": "it has not run yet, or on no rows: call the compiled model"}


def test_a_site_that_never_runs_where_others_do_is_told_so():
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16)), torch.randn(16, 32)
    stats = stats_of(model, x, torch.sum, effect_samples=0)
    report = loka.measure(
        stats, device="cpu", candidates=["emulated:rowwise_e4m3_pow2"], settings=Settings(max_draws=2, min_draws=2)
    )
    loka.convert(model, loka.plan(report, force={"*": "emulated:rowwise_e4m3_pow2"}))
    assert "not run yet" in loka.regions(model).apart["1"]
    nn.functional.linear(model[0](x), model[1].weight)  # past the second site
    assert "other sites have" in loka.regions(model).apart["1"]
    assert "it ran" in loka.regions(model).apart["0"]


def test_a_budget_without_regions_plans_by_what_sites_take_alone():
    report = layer(cell(165.0))
    assert names(loka.plan(report)) == BY_GEMM
    plan = loka.plan(report, loka.Budget(regions=False))
    assert set(names(plan).values()) == {FAST}
    assert decode(loka.Budget, encode(plan.budget)) == plan.budget
    assert "regions" not in encode(loka.Budget())
