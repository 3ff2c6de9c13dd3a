"""Which chains a plan forms, and that convert runs them."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import loka
from loka.core.error import Estimate
from loka.core.exceptions import NotConverted
from loka.core.report import HP, Measurement
from loka.kernels.run import kernel_runs, reset_kernel_runs
from loka.nn.chain import running_chains
from loka.probe.settings import Settings

pytestmark = pytest.mark.usefixtures("forced_fusion")

CANDIDATES = ("emulated:tensorwise_e4m3", "emulated:rowwise_e4m3", "emulated:tensorwise_e5m2")


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(48, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 80), nn.LayerNorm(80), nn.SiLU(),
        nn.Linear(80, 1),
    )  # fmt: skip
    loka.mods.apply(model, [loka.mods.NoBias(), loka.mods.BlockNorm(32), loka.mods.HardSwish()])
    return model


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(x)[:, 0], (x.sum(1) > 0).float())


@pytest.fixture(scope="module")
def report() -> loka.Report:
    model = build()
    with loka.Probe(model, every=1) as probe:
        loss_of(model, torch.randn(128, 48)).backward()
    settings = Settings(max_draws=4)
    return loka.measure(probe.stats(), device="cpu", candidates=CANDIDATES, settings=settings)


def timed(report: loka.Report, **microseconds: float) -> loka.Report:
    """As if the chain had been raced: hp takes 100 us."""

    def measurement(value: float) -> Measurement:
        return Measurement(
            microseconds=Estimate(value, value - 1, value + 1),
            speedup=Estimate(100 / value, 99 / value, 101 / value),
            rounds=15,
        )

    times = {f"fused:{name}": measurement(value) for name, value in microseconds.items()}
    return replace(report, chain_times={"0": {HP: measurement(100.0), **times}})


def test_a_chain_is_formed_when_asked_or_when_timed_and_faster(report: loka.Report) -> None:
    assert not loka.plan(report).chains
    assert "chain at 0 stays in parts: it was not timed" in "\n".join(loka.plan(report).notes)
    always = loka.plan(report, loka.Budget(chains="always"))
    assert list(always.chains) == ["0"]
    assert always.chains["0"].recipe == "e4m3_row_z8"
    assert always.chains["0"].chain.paths == ("0", "1", "2", "3", "4", "5")
    assert always.chains["0"].speedup is None
    fast = loka.plan(timed(report, e4m3_row=60.0))
    assert fast.chains["0"].speedup.value == pytest.approx(100 / 60)
    assert "chain 0: 2 layers, 128 rows, e4m3_row" in str(fast)
    assert not loka.plan(timed(report, e4m3_row=60.0), loka.Budget(chains="never")).chains


def test_what_was_timed_goes_before_what_was_not(report: loka.Report) -> None:
    """By default e4m3_row_z8 is the first of equals; here nobody knows how fast it is."""
    always = loka.plan(timed(report, e4m3_row=60.0), loka.Budget(chains="always"))
    assert always.chains["0"].recipe == "e4m3_row"
    assert always.chains["0"].speedup.value == pytest.approx(100 / 60)


def test_a_plan_of_chains_alone_counts_their_sites(report: loka.Report) -> None:
    def at(found: Measurement, us: float) -> Measurement:
        return replace(found, microseconds=Estimate(us, us, us), speedup=Estimate(*[10 / us] * 3), rounds=15)

    slow = {
        name: replace(
            site, measurements={n: at(m, 10.0 if n == HP else 20.0) for n, m in site.measurements.items()}
        )
        for name, site in report.sites.items()
    }
    plan = loka.plan(replace(timed(report, e4m3_row=60.0), sites=slow))
    assert {decision.candidate for decision in plan.decisions.values()} == {HP}
    assert list(plan.chains) == ["0"]
    inside = sum(decision.path in plan.inside for decision in plan.decisions.values())
    assert plan.summary().startswith(
        f"{inside} of {len(plan.decisions)} sites in FP8: {inside} as part of a whole"
    )
    assert "100 us in hp, 60 us" not in plan.summary(), "the others' sites count too"


def test_a_slow_chain_stays_in_parts(report: loka.Report) -> None:
    slow = loka.plan(timed(report, e4m3_row=99.0))
    assert not slow.chains
    assert any("below 1.05" in note for note in slow.notes)


def test_a_chain_must_beat_what_its_sites_would_save(report: loka.Report) -> None:
    sites = {}
    for name, site in report.sites.items():
        us = {HP: 20.0, "emulated:rowwise_e4m3": 5.0}
        measured = {
            candidate: replace(
                m,
                microseconds=Estimate(
                    us.get(candidate, 30.0), us.get(candidate, 30.0), us.get(candidate, 30.0)
                ),
                speedup=Estimate(*([20 / us.get(candidate, 30.0)] * 3)),
            )
            for candidate, m in site.measurements.items()
        }
        sites[name] = replace(site, measurements=measured)
    by_sites = loka.plan(replace(timed(report, e4m3_row=60.0), sites=sites))
    assert not by_sites.chains
    assert any("where its sites by themselves need about" in note for note in by_sites.notes)


def test_the_budget_judges_each_site_under_the_recipe(report: loka.Report) -> None:
    strict = loka.plan(report, loka.Budget(chains="always", min_sqnr_db=40.0))
    assert not strict.chains
    assert any("is below 40" in note for note in strict.notes)
    raced = timed(report, e4m3_row=70.0, e4m3_tensor=60.0, e5m2_tensor=50.0)
    everything = ("e4m3_row", "e4m3_tensor", "e5m2_tensor")
    assert loka.plan(raced).chains["0"].recipe == "e4m3_row"
    # e5m2's gradients are at 24.5 dB: the default floor refuses them, however fast they are.
    assert loka.plan(raced, loka.Budget(chain_recipes=everything)).chains["0"].recipe == "e4m3_tensor"
    lifted = loka.Budget(chain_recipes=everything, min_sqnr_db=None)
    assert loka.plan(raced, lifted).chains["0"].recipe == "e5m2_tensor"


def test_what_is_kept_in_eight_bits_counts_against_the_floor(report: loka.Report) -> None:
    """Behind hard swish it takes 1.2 dB off grad_weight, of the 28 dB or so that it has."""
    raced = timed(report, e4m3_row=70.0, e4m3_row_z8=60.0)
    only = loka.plan(raced, loka.Budget(chain_recipes=("e4m3_row",)))
    assert only.chains["0"].recipe == "e4m3_row"
    both = ("e4m3_row", "e4m3_row_z8")
    measured = min(
        site.measurements["emulated:tensorwise_e4m3"].errors["sqnr_db"].low
        for name, site in report.sites.items()
        if name in ("0/grad_weight", "3/grad_weight")
    )
    strict = loka.plan(raced, loka.Budget(chain_recipes=both, min_sqnr_db=measured - 0.5))
    assert strict.chains["0"].recipe == "e4m3_row"
    refused = loka.plan(raced, loka.Budget(chain_recipes=both[1:], min_sqnr_db=measured - 0.5))
    assert not refused.chains
    assert any("grad_weight: sqnr_db" in note and "is below" in note for note in refused.notes)
    admitted = loka.plan(raced)
    assert admitted.chains["0"].recipe == "e4m3_row_z8"
    assert loka.Plan.from_json(admitted.to_json()) == admitted
    model, x = build(), torch.randn(128, 48)
    low = loka.convert(copy.deepcopy(model), admitted)
    running = running_chains(low)["0"]
    assert [running.rounds_z(link) for link in (0, 1)] == [True, True]
    for one in (model, low):
        loss_of(one, x).backward()
    for found, exact in zip(low.parameters(), model.parameters(), strict=True):
        error = (found.grad - exact.grad).square().sum() / exact.grad.square().sum()
        assert error < 10**-1.8  # two layers: 31.5 - 10 log10(4 + 2 (2 + 0.14) + 0.5), and 3 for few rows


def test_forced_and_kept_sites_stay_out_of_chains(report: loka.Report) -> None:
    budget = loka.Budget(chains="always")
    forced = loka.plan(report, budget, force={"3/output": "emulated:rowwise_e4m3"})
    assert not forced.chains
    assert any("3/output is forced by" in note for note in forced.notes)
    kept = loka.plan(report, loka.Budget(chains="always", keep=("0",)))
    assert not kept.chains


def test_budget_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="always"):
        loka.Budget(chains="sometimes")
    with pytest.raises(loka.LokaError, match="e4m3_row"):
        loka.Budget(chain_recipes=("e3m4",))


def test_convert_trains_as_well_as_float32(report: loka.Report) -> None:
    plan = loka.plan(report, loka.Budget(chains="always"))
    plain = build()
    low = loka.convert(copy.deepcopy(plain), plan)
    assert list(running_chains(low)) == ["0"]
    with pytest.raises(NotConverted, match="already"):
        loka.convert(low, plan)
    with pytest.raises(NotConverted, match="revert"):
        loka.mods.apply(low, [loka.mods.HardSwish()])
    reset_kernel_runs()
    losses = {}
    for name, model in {"float32": plain, "fp8": low}.items():
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        torch.manual_seed(1)
        for _ in range(60):
            loss = loss_of(model, torch.randn(256, 48))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        losses[name] = loss.item()
    # Six GEMMs a step, less the gradient of an input that needs none.
    assert sum(n for (name, _), n in kernel_runs().items() if name != HP) == 60 * 5
    assert losses["fp8"] < 0.5 * 0.69
    assert abs(losses["fp8"] - losses["float32"]) < 0.02
    loka.revert(low)
    assert not running_chains(low)
    assert type(low[0]) is nn.Linear


def test_a_diff_names_chains(report: loka.Report) -> None:
    whole = loka.plan(report, loka.Budget(chains="always"))
    apart = loka.plan(report, loka.Budget(chains="never"))
    assert "chain 0: e4m3_row_z8 -> in parts" in str(loka.diff(whole, apart))
    assert not loka.diff(whole, whole)


def test_a_budget_of_before_there_were_recipes_means_the_one_there_was() -> None:
    content = loka.Budget().to_json()
    del content["chain_recipes"]
    assert loka.Budget.from_json(content).chain_recipes == ("e4m3_row",)
