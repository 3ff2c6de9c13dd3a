from dataclasses import replace

import pytest
import torch
from models import stats_of
from torch import nn

import loka
from loka.core.budget import upper_bound
from loka.core.recipe import Gemm, recipe_named
from loka.core.records.report import HP
from loka.core.storage.codec import encode
from loka.measurement.predicted_kl import predicted_kl
from loka.measurement.resume import continue_from
from loka.measurement.settings import Settings
from loka.statistics.effect_casts import CASTS, LEARNING

CANDIDATES = ("emulated:tensorwise_e4m3", "emulated:rowwise_e4m3")


@pytest.fixture(scope="module")
def stats():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 1))
    with loka.Probe(model, every=1) as probe:
        for x in torch.randn(4, 128, 48):
            nn.functional.binary_cross_entropy_with_logits(model(x)[:, 0], (x.sum(1) > 0).float()).backward()
    return probe.stats()


@pytest.fixture(scope="module")
def report(stats):
    return loka.measure(stats, device="cpu", candidates=CANDIDATES, settings=Settings(max_draws=4))


def test_each_output_has_the_effect_of_its_recipe(stats, report):
    for name, site in report.sites.items():
        for candidate, measured in site.measurements.items():
            if site.problem.gemm is not Gemm.OUTPUT or candidate == HP:
                assert "ne" not in measured.errors, name
            else:
                recipe = recipe_named(candidate.partition(":")[2])
                assert measured.errors["ne"] == predicted_kl(stats.layers[site.path], recipe)
                assert measured.errors["ne"].value > 0
    assert " KL/H " in str(report)


def test_of_what_regions_run_it_is_written_whoever_raced(stats, report, tmp_path):
    """Power-of-two scales have the SQNR of others, and another KL/H."""
    for site in report.sites.values():
        if site.problem.gemm is not Gemm.OUTPUT:
            assert not site.region_kl
            continue
        layer = stats.layers[site.path]
        known = {name: {"": predicted_kl(layer, recipe_named(name))} for name in ("rowwise_e4m3_pow2", "int8_row")}
        assert site.region_kl == known
        in_region = site.measured("emulated:rowwise_e4m3_pow2")
        raced = site.measurements["emulated:rowwise_e4m3"]
        assert in_region.errors == {**raced.errors, "ne": known["rowwise_e4m3_pow2"][""]}
        assert in_region.errors["ne"].value > raced.errors["ne"].value
    old = replace(report, sites={name: replace(site, region_kl={}) for name, site in report.sites.items()})
    assert "region_kl" not in str(encode(old))
    old.save(path := tmp_path / "report.json")
    again = loka.measure(stats, device="cpu", candidates=CANDIDATES, settings=Settings(max_draws=4), out=path)
    assert again == report, "measuring again completes a report of an earlier version"
    asked = ("emulated:rowwise_e4m3_pow2",)
    own = loka.measure(stats, device="cpu", candidates=asked, settings=Settings(max_draws=4)).sites["0/output"]
    assert set(own.region_kl) == {"int8_row"}


def test_histograms_tell_of_casts_that_were_not_tried_but_of_no_centred_ones(stats):
    centred = next(name for name in LEARNING if CASTS[name][0].centred)
    layer = stats.layers["0"]
    tried = {name: e for name, e in layer.effects.items() if name not in ("rowwise_e4m3", centred)}
    layer = replace(layer, effects=tried)
    found = predicted_kl(layer, recipe_named("rowwise_e4m3"))
    widest = max(effect.kl().high / effect.kl().value for effect in tried.values())
    assert found.high / found.value == pytest.approx(widest)
    assert widest > 1.01
    assert predicted_kl(layer, recipe_named(centred)) is None


def test_the_report_keeps_it_and_goes_on_from_no_other(report, tmp_path):
    report.save(path := tmp_path / "report.json")
    assert loka.Report.load(path) == continue_from(path, report) == report
    for change in ({"stats_digest": ""}, {"machine": replace(report.machine, torch="")}, {"settings": {}}):
        other = replace(report, **change)
        assert continue_from(path, other) is other


def test_a_budget_between_two_sites_buys_one(report):
    """Free of the pin on the logit layer, both could run; the budget holds for one of them."""
    effects = {
        path: min(
            upper_bound(m.errors["ne"]) for n, m in report.sites[f"{path}/output"].measurements.items() if n != HP
        )
        for path in ("0", "2")
    }
    budget = loka.Budget(ne=max(effects.values()) * 1.0001, keep_prediction=False, min_sqnr_db=None)
    plan = loka.plan(report, budget)
    low = [d.path for d in plan.decisions.values() if d.problem.gemm is Gemm.OUTPUT and d.candidate != HP]
    assert low == ["0"], "the first layer has 64 times the multiplications of the second"
    assert plan.kl is not None
    assert upper_bound(plan.kl) <= budget.ne
    assert "Predicted KL/H" in plan.summary()


def test_what_is_not_known_is_told_where_it_matters():
    """A model whose output is no logits: the reason is in the report, and in a plan with a budget of NE."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    stats = stats_of(model, torch.randn(64, 16))
    (reason,) = {layer.no_effect for layer in stats.layers.values()}
    assert reason
    report = loka.measure(stats, device="cpu", candidates=CANDIDATES, settings=Settings(max_draws=4))
    assert set(report.no_effect) == {"0", "2"}
    plan = loka.plan(report, loka.Budget(ne=1e-4))
    assert plan.decisions["0/output"].candidate == HP
    assert "not known" in plan.decisions["0/output"].reason
    assert any(reason in note for note in plan.notes)
    assert not any(reason in note for note in loka.plan(report).notes)
