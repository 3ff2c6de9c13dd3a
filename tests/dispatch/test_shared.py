"""Layers that share their input, through the whole loop: which a plan runs as one, and that convert does."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import loka
from loka.core.error import Estimate, sqnr_db
from loka.core.exceptions import FileRefused, NotConverted, PlanMismatch
from loka.core.plan import Plan
from loka.core.recipe import Gemm
from loka.core.report import HP, Measurement
from loka.core.shared_input import SharedInput
from loka.dispatch.frontier import saved_time
from loka.kernels.run import kernel_runs, reset_kernel_runs
from loka.nn.shared_input import shared_runs
from loka.nn.shared_kernels import apart_name, shared_kernels, shared_name
from loka.probe import Settings

ROW, TENSOR = "emulated:rowwise_e4m3", "emulated:tensorwise_e4m3"
ALWAYS = loka.Budget(chains="always")


class Foreign(nn.Module):
    """Attention over 6 fields, and a tower with a gate beside it; x [B, 6, 24] -> logits [B]."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(24, 40, bias=False), nn.Linear(24, 40, bias=False)
        self.v = nn.Linear(24, 56)
        self.gate, self.up = nn.Linear(336, 72, bias=False), nn.Linear(336, 72)
        self.act = nn.SiLU()
        self.logit = nn.Linear(72, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(2, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        found = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(1)
        return self.logit(self.act(self.gate(found)) * self.up(found)).squeeze(1)


def build() -> nn.Module:
    torch.manual_seed(0)
    return Foreign()


def step(model: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    x = torch.randn(32, 6, 24, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    model.zero_grad()
    logits = model(x)
    nn.functional.softplus(-logits * x.detach().sum((1, 2)).sign()).mean().backward()
    return {"logits": logits.detach(), "x": x.grad, **{n: p.grad for n, p in model.named_parameters()}}


@pytest.fixture(scope="module")
def report() -> loka.Report:
    model = build()
    with loka.Probe(model, every=1) as probe:
        step(model)
    assert [group.name for group in probe.stats().shared] == ["q+k+v", "gate+up"]
    return loka.measure(
        probe.stats(), device="cpu", candidates=[ROW, TENSOR], settings=Settings(rows=64, max_draws=4)
    )


def timed(report: loka.Report, name: str, microseconds: Mapping[str, float]) -> loka.Report:
    """As if a group had been raced: hp takes 100 us. "shared" and "apart" are what runs row scales."""
    group = next(group for group in report.shared if group.name == name)
    kernels, _ = shared_kernels(group, report.sites)
    arms = {HP: HP, "shared": shared_name(kernels), "apart": apart_name(kernels)}
    times = {
        arms[arm]: Measurement(
            microseconds=Estimate(us, us - 1, us + 1), speedup=Estimate(100 / us, 99 / us, 101 / us), rounds=9
        )
        for arm, us in {HP: 100.0, **microseconds}.items()
    }
    return replace(report, shared_times={**report.shared_times, name: times})


def test_the_whole_loop(report: loka.Report, tmp_path: Path) -> None:
    assert not loka.plan(report).shared
    assert "q+k+v read one tensor and run by themselves: not timed" in "\n".join(loka.plan(report).notes)
    assert not loka.plan(report, loka.Budget(chains="never")).shared
    plan = loka.plan(report, ALWAYS)
    assert list(plan.shared) == ["q+k+v"]  # gate and its activation are a chain: then up reads alone
    assert list(plan.chains) == ["gate"]
    assert plan.candidates("v") == dict.fromkeys(Gemm, ROW)
    assert plan.decisions["k/output"].reason == "runs as one with q, v"
    assert plan.decisions["k/output"].sqnr_db == report.sites["k/output"].measurements[ROW].errors["sqnr_db"]
    assert "shared input q+k+v: 3 layers read one tensor: not timed" in str(plan)

    plan.save(tmp_path / "plan.json")
    report.save(tmp_path / "report.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert loka.Report.load(tmp_path / "report.json") == report
    model, apart = build(), build()
    wanted, keys = step(build()), list(model.state_dict())
    loka.convert(model, Plan.load(tmp_path / "plan.json"))
    loka.convert(apart, replace(plan, shared={}))
    assert list(model.state_dict()) == keys
    reset_kernel_runs()
    by_itself = step(apart)
    several = kernel_runs()
    reset_kernel_runs()
    found = step(model)
    for gemm in Gemm:
        assert several[ROW, gemm] - kernel_runs()[ROW, gemm] == 2  # one where there were three
    (run,) = shared_runs(model).values()
    assert (run.together, run.alone) == (3, 0)
    for name, value in found.items():
        # Two roundings of 31.5 dB in each GEMM on the way, of which there are five at most.
        assert sqnr_db(value, wanted[name]) > 31.5 - 10.0, name
        torch.testing.assert_close(found["logits"], by_itself["logits"])
    loka.revert(model)
    assert not shared_runs(model)
    assert torch.equal(step(model)["logits"], wanted["logits"])
    with pytest.raises(NotConverted):
        loka.revert(model)


def test_it_is_formed_where_it_is_fastest_of_all(report: loka.Report) -> None:
    fast = loka.plan(timed(report, "q+k+v", {"shared": 60.0, "apart": 80.0}))
    assert fast.shared["q+k+v"].speedup.value == pytest.approx(100 / 60)
    assert "60.0 us, hp 100.0 us, 1.67x: fastest as one" in str(fast)
    assert Plan.from_json(json.loads(json.dumps(fast.to_json()))) == fast
    assert saved_time(replace(fast, timed=True)) == pytest.approx(40.0)
    for times, reason in (
        ({"shared": 99.0, "apart": 120.0}, "is below 1.05"),
        ({"shared": 60.0, "apart": 60.2}, "one by one"),
        ({"apart": 60.0}, "not timed"),
    ):
        slow = loka.plan(timed(report, "q+k+v", times))
        assert not slow.shared
        assert any(reason in note for note in slow.notes), reason
    by_sites = timed(report, "q+k+v", {"shared": 60.0, "apart": 80.0})
    us = {HP: Estimate(20.0, 20.0, 20.0), ROW: Estimate(12.0, 12.0, 12.0), TENSOR: Estimate(5.0, 5.0, 5.0)}
    sites = {
        name: replace(
            site,
            measurements={
                candidate: replace(
                    m, microseconds=us[candidate], speedup=Estimate(*[20 / us[candidate].value] * 3)
                )
                for candidate, m in site.measurements.items()
            },
        )
        for name, site in by_sites.sites.items()
    }
    better = loka.plan(replace(by_sites, sites=sites))  # nine sites that save 15 us each
    assert not better.shared
    assert any("its sites by themselves need" in note for note in better.notes)
    assert better.candidates("q") == dict.fromkeys(Gemm, TENSOR)


def test_a_chain_gives_way_to_what_saves_more(report: loka.Report) -> None:
    (chain,) = [chain for chain in report.chains if chain.name == "gate"]
    times = {
        name: Measurement(microseconds=Estimate(us, us, us), speedup=Estimate(*[100 / us] * 3), rounds=9)
        for name, us in ((HP, 100.0), ("fused:e4m3_row", 80.0))
    }
    raced = replace(report, chain_times={chain.name: times})
    assert list(loka.plan(raced).chains) == ["gate"]
    for microseconds, chains, groups in ((70.0, [], ["gate+up"]), (85.0, ["gate"], [])):
        plan = loka.plan(timed(raced, "gate+up", {"shared": microseconds, "apart": 99.0}))
        assert (list(plan.chains), list(plan.shared)) == (chains, groups)
        assert ("chain at gate gives way" in "\n".join(plan.notes)) is (not chains)
    loka.convert(build(), plan)
    never_timed = loka.plan(timed(report, "gate+up", {"shared": 70.0}), loka.Budget(chains="always"))
    assert list(never_timed.chains) == ["gate"]


def test_limits_and_what_the_user_keeps(report: loka.Report) -> None:
    kept = loka.plan(report, loka.Budget(chains="always", keep=("k",)))
    assert list(kept.shared) == ["q+v"]
    forced = loka.plan(report, ALWAYS, force={"k/grad_weight": HP, "v": HP})
    assert not forced.shared
    strict = loka.plan(report, loka.Budget(chains="always", min_sqnr_db=40.0))
    assert not strict.shared
    assert any("below 40" in note for note in strict.notes)
    site = report.sites["v/grad_input"]
    only_tensor = {name: m for name, m in site.measurements.items() if name != ROW}
    lacking = replace(report, sites={**report.sites, site.name: replace(site, measurements=only_tensor)})
    assert not loka.plan(lacking, ALWAYS).shared
    frozen = {name: site for name, site in report.sites.items() if name != "k/grad_weight"}
    assert list(loka.plan(replace(report, sites=frozen), ALWAYS).shared) == ["q+v"]


def test_it_spends_no_more_ne_than_its_sites(report: loka.Report) -> None:
    def with_ne(row: float, tensor: float) -> loka.Report:
        effects = {HP: 0.0, ROW: row, TENSOR: tensor}
        sites = {
            name: replace(
                site,
                measurements={
                    c: replace(m, errors={**m.errors, "ne": Estimate(*[effects[c]] * 3)})
                    for c, m in site.measurements.items()
                },
            )
            for name, site in report.sites.items()
        }
        return replace(report, sites=sites)

    budget = loka.Budget(chains="always", ne=1e-3)
    plan = loka.plan(with_ne(1e-5, 2e-5), budget)
    assert list(plan.shared) == ["q+k+v"]
    assert not plan.ne_unknown
    dearer = loka.plan(with_ne(2e-5, 1e-5), budget)
    assert not dearer.shared
    assert any("better spent elsewhere" in note for note in dearer.notes)
    assert not loka.plan(with_ne(1e-2, 1e-2), budget).shared


def test_a_plan_of_another_model_or_edited_is_refused(report: loka.Report, tmp_path: Path) -> None:
    plan = loka.plan(report, ALWAYS)
    other = build()
    other.k = nn.Linear(24, 41, bias=False)
    with pytest.raises(PlanMismatch):
        loka.convert(other, plan)
    assert type(other.q) is nn.Linear
    for edit in (
        lambda c: c["shared"][0]["group"]["branches"].pop(),
        lambda c: c["shared"][0]["group"]["branches"][0].update(out_features=41),
        lambda c: c["decisions"]["k/output"].update(candidate=TENSOR),
        lambda c: c["shared"].append(copy.deepcopy(c["shared"][0])),
        lambda c: c["shared"][0].update(reason=None),
        lambda c: c["shared"][0]["group"]["branches"][0].update(dense="yes"),
    ):
        content = json.loads(json.dumps(plan.to_json()))
        edit(content)
        if len(content["shared"][0]["group"]["branches"]) == 2:  # any two may run as one
            assert list(Plan.from_json(content).shared) == ["q+k"]
            continue
        with pytest.raises((LookupError, TypeError, ValueError)):
            Plan.from_json(content)
    with pytest.raises(FileRefused):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(ValueError, match="two layers"):
        SharedInput.from_json({"in_features": 24, "branches": []}, plan.model)


def test_what_changed_between_plans(report: loka.Report) -> None:
    never, always = loka.plan(report, loka.Budget(chains="never")), loka.plan(report, ALWAYS)
    assert "shared input q+k+v: by themselves -> as one" in str(loka.diff(never, always))


def test_it_trains_as_its_layers_by_themselves_and_with_an_average(report: loka.Report) -> None:
    plan = loka.plan(report, ALWAYS)
    losses = []
    for own in (plan, replace(plan, shared={})):
        model = loka.convert(build(), own)
        average = torch.optim.swa_utils.AveragedModel(model)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for seed in range(12):
            step(model, seed)
            optimizer.step()
            average.update_parameters(model)
        losses.append(step(average.module, 99)["logits"])
        assert bool(shared_runs(average.module)) is bool(own.shared)
    # Rounding errors of the gradients differ, and Adam's steps amplify the smallest.
    assert sqnr_db(losses[0], losses[1]) > 20
