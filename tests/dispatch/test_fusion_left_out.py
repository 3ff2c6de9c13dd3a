"""Outside of the internal switch nothing runs as a whole: it is not timed, not planned, and not formed."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import loka
from loka.core.error import Estimate
from loka.core.exceptions import FusionLeftOut
from loka.core.fusion import NOT_PLANNED, as_it_runs, forced_fusion, fusion_forced, left_out
from loka.core.report import HP, Measurement
from loka.nn import health_of, sites_of
from loka.nn.chain import runs_fused
from loka.nn.turned import turned_linears
from loka.probe import Settings
from loka.probe.agenda import agenda
from loka.zoo.dcn import CrossLayer

CANDIDATES = ("emulated:tensorwise_e4m3", "emulated:rowwise_e4m3")
ALWAYS = loka.Budget(chains="always")
SETTINGS = Settings(rows=64, max_draws=4)


class Net(nn.Module):
    """A stack of cross layers, a layer over tokens and a chain: x [B, 32] -> [B]."""

    def __init__(self) -> None:
        super().__init__()
        self.cross = nn.ModuleList(CrossLayer(32, rank=None) for _ in range(2))
        self.tokens = nn.Linear(4, 4, bias=False)
        self.deep = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16), nn.ReLU())
        self.logit = nn.Linear(16, 1)

    def forward(self, x0: torch.Tensor) -> torch.Tensor:
        x = x0
        for layer in self.cross:
            x = layer(x0, x)
        mixed = self.tokens((x * 1.0).unflatten(1, (4, 8)).transpose(1, 2)).transpose(1, 2)
        return self.logit(self.deep(mixed.flatten(1))).squeeze(1)


def build() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def stats() -> loka.Stats:
    model = build()
    with loka.Probe(model, every=1) as probe:
        model(torch.randn(64, 32, requires_grad=True)).square().mean().backward()
    stats = probe.stats()
    assert [stack.name for stack in stats.crosses] == ["cross.0"]
    assert "deep.0" in {chain.name for chain in stats.chains if not chain.lone}
    return stats


@pytest.fixture(scope="module")
def report(stats: loka.Stats) -> loka.Report:
    found = loka.measure(stats, device="cpu", candidates=CANDIDATES, settings=SETTINGS)
    twice = Measurement(microseconds=Estimate(5, 5, 5), speedup=Estimate(2, 1.9, 2.1), rounds=9)
    return replace(found, turned_times={"tokens": twice})


@pytest.fixture
def fused(report: loka.Report, tmp_path: Path) -> loka.Plan:
    """A plan that another LoKA stored, with something of each kind."""
    with forced_fusion():
        plan = loka.plan(report, ALWAYS, force={"tokens": HP})
    plan.save(tmp_path / "plan.json")
    plan = loka.Plan.load(tmp_path / "plan.json")
    assert plan.chains
    assert plan.crosses
    assert plan.turned
    return plan


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("budget", [loka.Budget(), ALWAYS, loka.Budget(chains="never")])
def test_a_plan_has_sites_alone(report: loka.Report, budget: loka.Budget) -> None:
    plan = loka.plan(report, budget, force={"tokens": HP})
    assert not plan.wholes
    assert not plan.turned
    assert (NOT_PLANNED in plan.notes) == (budget is ALWAYS)
    model = loka.convert(build(), plan)
    assert not runs_fused(model)
    assert {"cross.0.u", "deep.0", "deep.2"} <= set(sites_of(model))


def test_times_of_an_earlier_report_are_not_passed_over_in_silence(report: loka.Report) -> None:
    half = Measurement(microseconds=Estimate(50, 50, 50), speedup=Estimate(2, 2, 2), rounds=9)
    hp = Measurement(microseconds=Estimate(100, 100, 100), speedup=Estimate(1, 1, 1), rounds=9)
    known = replace(report, chain_times={"deep.0": {HP: hp, "fused:e4m3_row": half}})
    with forced_fusion():
        assert list(loka.plan(known).chains) == ["deep.0"]
    plan = loka.plan(known)
    assert not plan.chains
    assert NOT_PLANNED in plan.notes


def test_measure_times_no_wholes(stats: loka.Stats, monkeypatch: pytest.MonkeyPatch) -> None:
    module, asked = sys.modules["loka.probe.measure"], []

    def seen(*args: object, **options: object) -> list[object]:
        asked.append(args[1:])
        return agenda(*args, **options)

    monkeypatch.setattr(module, "agenda", seen)
    for _ in range(2):
        report = loka.measure(stats, device="cpu", candidates=[], settings=SETTINGS)
        assert report.complete
    with forced_fusion():
        loka.measure(stats, device="cpu", candidates=[], settings=SETTINGS)
    by_user, _, forced = asked
    assert by_user == ([], [])
    assert {whole.name for whole in forced[0]} >= {"cross.0", "deep.0"}
    assert forced[1] == ["tokens"]


def test_a_stored_plan_runs_by_its_sites_and_says_what_is_left_out(fused: loka.Plan) -> None:
    model = build()
    with pytest.warns(FusionLeftOut, match="left out") as caught:
        loka.convert(model, fused)
    told = str(caught[0].message)
    assert caught[0].filename == __file__
    assert "chains: deep.0" in told
    assert "stacks of cross layers: cross.0" in told
    assert "turned layers: tokens" in told
    assert not runs_fused(model)
    assert not turned_linears(model)
    expected = loka.convert(build(), as_it_runs(fused))
    x = torch.randn(64, 32)
    assert torch.equal(model(x), expected(x))
    ran = {site for site, found in health_of(model).items() if found["runs"]}
    low = {name for name, decision in fused.decisions.items() if decision.candidate != HP}
    assert ran == {name for name in low if name.endswith("/output")}
    loka.revert(model)
    assert not sites_of(model)


@pytest.mark.usefixtures("quiet")
def test_inside_of_the_switch_it_runs_as_planned(fused: loka.Plan) -> None:
    with forced_fusion():
        model = loka.convert(build(), fused)
        assert as_it_runs(fused) is fused
    assert left_out(fused)
    assert runs_fused(model)
    assert set(turned_linears(model)) == {"tokens"}
    model(torch.randn(64, 32)).sum().backward()
    loka.revert(model)


def test_the_switch_ends_with_its_block_and_stays_in_its_thread() -> None:
    found = []
    with forced_fusion():
        assert fusion_forced()
        thread = threading.Thread(target=lambda: found.append(fusion_forced()))
        thread.start()
        thread.join()
    assert found == [False]
    assert not fusion_forced()

    @forced_fusion()
    def fails() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert not fusion_forced()
