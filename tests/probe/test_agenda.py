"""What a limited time is spent on; the order changes no result."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import loka
from loka.core.fusion import forced_fusion
from loka.core.report import Measurement
from loka.probe import Settings
from loka.probe.agenda import Job, agenda

sys.path.insert(0, str(Path(__file__).parent))
from timers import FakeTimer, install

ROWWISE = "emulated:rowwise_e4m3"
measuring = sys.modules["loka.probe.measure"]


class Branches(nn.Module):
    """A chain of small layers, one of large ones, and beside them a layer that is larger than both."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.large = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48))
        self.alone, self.logit = nn.Linear(64, 256), nn.Linear(320, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.small(x[:, :16]), self.large(x), torch.tanh(self.alone(x))
        return self.logit(torch.cat(parts, dim=1))


@pytest.fixture(scope="module")
def stats() -> loka.Stats:
    torch.manual_seed(0)
    model = Branches()
    with loka.Probe(model, every=1) as probe:
        model(torch.randn(24, 64, requires_grad=True)).square().mean().backward()
    return probe.stats()


def timed(stats: loka.Stats, **options) -> loka.Report:
    settings = Settings(min_draws=2, max_draws=2)
    return loka.measure(stats, device="cpu", candidates=[ROWWISE], settings=settings, **options)


def test_chains_first_then_layers_each_from_the_largest_on(stats: loka.Stats) -> None:
    wholes = [chain for chain in stats.chains if not chain.lone]
    assert [chain.name for chain in wholes] == ["small.0", "large.0"]

    def done(*paths: str, whole: str = "") -> list[tuple[str, str]]:
        jobs = [(kind, path) for kind in ("errors", "times") for path in paths]
        return [*jobs, ("whole", whole)] if whole else jobs

    assert agenda(stats, wholes, timed=True) == [
        *done("large.0", "large.2", whole="large.0"),
        *done("small.0", "small.2", whole="small.0"),
        *done("alone"),
        *done("logit"),
    ]
    untimed = [job.name for job in agenda(stats, wholes, timed=False)]
    assert untimed == ["large.0", "large.2", "small.0", "small.2", "alone", "logit"]


@forced_fusion()
def test_a_limited_time_goes_to_the_largest_chain(
    stats: loka.Stats, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A minute for each whole: the first is done when time is up, and the rest waits for the next call."""
    install(monkeypatch, FakeTimer())
    now, out = [1000.0], tmp_path / "report.json"
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def time_chain(chain, layers, kernels, **options) -> dict[str, Measurement]:
        now[0] += 60.0
        return {}

    monkeypatch.setattr(measuring, "time_chain", time_chain)
    part = timed(stats, out=out, time_limit=30.0)
    assert list(part.chain_times) == ["large.0"]
    assert {site.path for site in part.sites.values()} == {"large.0", "large.2"}
    assert not any(site.unfinished for site in part.sites.values())
    assert "time limit of 30 s" in part.notes[0]
    assert not part.complete
    whole = timed(stats, out=out)
    assert whole.complete
    assert whole.sites == timed(stats).sites
    assert list(whole.sites) == [
        f"{path}/{gemm}" for path in stats.layers for gemm in ("output", "grad_input", "grad_weight")
    ]


@forced_fusion()
def test_the_order_changes_no_result(stats: loka.Stats, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeTimer({ROWWISE: 60.0}))
    monkeypatch.setattr(
        measuring, "time_chain", lambda chain, layers, kernels, **options: dict.fromkeys(kernels)
    )
    ordered = timed(stats)

    def as_called(stats: loka.Stats, wholes, turned, *, timed: bool) -> list[Job]:
        layers = [Job(kind, path) for kind in ("errors", "times") for path in stats.layers]
        together = [("whole", whole.name) for whole in wholes]
        return [*layers, *(Job(*job) for job in together)]

    monkeypatch.setattr(measuring, "agenda", as_called)
    other = timed(stats)
    assert other == ordered
    assert list(other.sites) == list(ordered.sites)
    assert ordered.complete
