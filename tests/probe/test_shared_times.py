"""Timing layers that share their input: what is built from the record, and what races."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from timers import FakeTimer, install
from torch import nn

import loka
from loka.core.recipe import Gemm
from loka.core.report import HP
from loka.core.shared_input import SharedInput
from loka.nn.dataflow import find_chains
from loka.nn.shared_input import shared_runs
from loka.nn.shared_kernels import apart_name, shared_kernels, shared_name
from loka.probe import Settings, chain_times, shared_times
from loka.probe.agenda import Job, agenda
from loka.probe.shared_times import build_branches, fp8_branches, shared_key, time_shared, timed_groups

ROW = "emulated:rowwise_e4m3"
KERNELS = dict.fromkeys(Gemm, ROW)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.side = nn.Linear(24, 40), nn.Linear(24, 24, bias=False)
        self.gate, self.act = nn.Linear(24, 40, bias=False), nn.SiLU()
        self.logit = nn.Linear(40, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated = self.act(self.gate(x)) * self.up(x)
        return self.logit(gated) + self.side(x).view(-1).mean()


@pytest.fixture(scope="module")
def stats() -> loka.Stats:
    torch.manual_seed(0)
    model = Gated()
    with loka.Probe(model, every=1) as probe:
        model(torch.randn(32, 24)).sum().backward()
    return probe.stats()


@pytest.fixture(scope="module")
def report(stats: loka.Stats) -> loka.Report:
    names = [ROW, "emulated:tensorwise_e4m3"]
    return loka.measure(stats, device="cpu", candidates=names, settings=Settings(rows=32, max_draws=4))


def test_what_is_built_is_the_group_and_runs_as_one(stats: loka.Stats) -> None:
    (group,) = stats.shared
    assert group.name == "gate+up+side"
    assert [branch.dense for branch in group.branches] == [False, False, True]
    model, renamed = build_branches(group, torch.device("cpu"), torch.float32)
    x = torch.randn(32, 24)
    (found,) = find_chains(model, x).shared
    assert all(branch.dense for branch in renamed.branches)  # what reads columns is not timed: copies are
    assert found == replace(renamed, branches=tuple(replace(b, dense=False) for b in renamed.branches))
    apart, as_one = (fp8_branches(model, renamed, KERNELS, as_one=one) for one in (False, True))
    assert not shared_runs(apart)
    assert list(shared_runs(as_one)) == ["branch.0+branch.1+branch.2"]
    outputs = as_one(x)
    assert all(y.is_contiguous() for y in outputs)
    for mine, other in zip(outputs, apart(x), strict=True):
        torch.testing.assert_close(mine, other)


def test_a_group_is_timed_whole_and_without_what_chains_take(stats: loka.Stats) -> None:
    assert [group.name for group in timed_groups(stats)] == ["gate+up+side", "up+side"]
    only = {path: layer for path, layer in stats.layers.items() if path != "side"}
    assert [group.name for group in timed_groups(replace(stats, layers=only))] == ["gate+up"]
    frozen = {**stats.layers, "side": replace(stats.layers["side"], needs_weight_grad=False)}
    assert [group.name for group in timed_groups(replace(stats, layers=frozen))] == ["gate+up"]
    jobs = agenda(stats, [], timed_groups(stats), timed=True)
    assert jobs.index(Job("shared", "up+side")) > jobs.index(Job("shared", "gate+up+side"))
    assert jobs.index(Job("shared", "gate+up+side")) > jobs.index(Job("times", "gate"))
    assert jobs.index(Job("errors", "logit")) > jobs.index(Job("shared", "up+side"))


def test_equal_shapes_share_their_times(stats: loka.Stats, report: loka.Report) -> None:
    (group,) = stats.shared
    assert shared_key(group, stats.layers, report) == shared_key(group, dict(stats.layers), report)
    others = [
        shared_key(replace(group, branches=group.branches[:2]), stats.layers, report),
        shared_key(group, {p: replace(s, rows=64) for p, s in stats.layers.items()}, report),
        shared_key(group, {p: replace(s, needs_input_grad=True) for p, s in stats.layers.items()}, report),
    ]
    assert shared_key(group, stats.layers, report) not in others


def test_three_arms_race_while_measuring(stats: loka.Stats, monkeypatch: pytest.MonkeyPatch) -> None:
    as_one, apart = f"shared {ROW} hp {ROW}", f"apart {ROW} hp {ROW}"  # x wants no gradient
    timer = install(monkeypatch, FakeTimer({as_one: 50.0, apart: 80.0}), wholes=True)
    compiled: list[nn.Module] = []
    for module in (chain_times, shared_times):
        monkeypatch.setattr(module, "compile_in_place", lambda part: compiled.append(part) or part)
    settings = Settings(rows=32, max_draws=4)
    report = loka.measure(stats, device="cpu", candidates=[ROW], settings=settings)
    assert report.complete, report.notes
    assert [HP, apart, as_one] in timer.races
    assert sum(isinstance(module, shared_times.Branches) for module in compiled) == 2  # hp, of both groups
    assert report.shared_times["up+side"][as_one].speedup.value == pytest.approx(2.0, rel=0.05)
    plan = loka.plan(replace(report, sharing={}))  # the fake timer's passes take as long as a GEMM
    assert list(plan.shared) == ["gate+up+side"]  # no chain was faster
    assert plan.shared["gate+up+side"].microseconds.value == pytest.approx(50.0, rel=0.01)


def test_why_there_is_no_time(
    stats: loka.Stats, report: loka.Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain_times, "time_interleaved", FakeTimer())
    monkeypatch.setattr(shared_times, "compile_in_place", lambda part: part)
    (group,) = stats.shared
    options = {"device": torch.device("cpu"), "settings": Settings()}
    tensors_only = {
        name: replace(site, measurements={n: m for n, m in site.measurements.items() if n != ROW})
        for name, site in report.sites.items()
    }
    times = time_shared(group, stats.layers, replace(report, sites=tensors_only), **options)
    assert "no kernel with scales of rows" in times[HP].unsupported

    def refuse(model: nn.Module, group: SharedInput) -> None:
        raise RuntimeError("not today")

    monkeypatch.setattr(shared_times, "share_input", refuse)
    kernels, _ = shared_kernels(group, report.sites)
    times = time_shared(group, stats.layers, report, **options)
    assert times[shared_name(kernels)].unsupported == "RuntimeError: not today"
    assert times[apart_name(kernels)].speedup is not None


def test_which_kernels_run(report: loka.Report) -> None:
    group = report.shared[0]
    kernels, why = shared_kernels(group, report.sites)
    assert (kernels, why) == ({**KERNELS, Gemm.GRAD_INPUT: HP}, None)  # scales of rows only
    lacking = {name: site for name, site in report.sites.items() if name != "up/output"}
    assert "runs at some of them only" in shared_kernels(group, lacking)[1]
    unable = {
        name: replace(
            site,
            measurements={
                n: replace(m, errors={}, unsupported="no") if name == "up/output" else m
                for n, m in site.measurements.items()
            },
        )
        for name, site in report.sites.items()
    }
    assert "output at all of them" in shared_kernels(group, unable)[1]


@pytest.mark.gpu
def test_on_a_gpu(stats: loka.Stats) -> None:
    wide = {
        path: replace(layer, rows=8192, dtype="bfloat16", weight_dtype="bfloat16")
        for path, layer in stats.layers.items()
    }
    measured = replace(stats, layers=wide)
    report = loka.measure(measured, device="cuda", candidates=["torch:rowwise_e4m3"])
    kernels, _ = shared_kernels(report.shared[0], report.sites)
    times = report.shared_times["gate+up+side"]
    for name in (HP, apart_name(kernels), shared_name(kernels)):
        assert times[name].microseconds is not None, times[name]
