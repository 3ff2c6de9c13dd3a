import sys

import pytest
import torch
from models import stats_of
from timers import FakeTimer, install
from torch import nn

import loka
from loka.measurement import Settings
from loka.measurement.queue import Job, jobs_of

ROWWISE = "emulated:rowwise_e4m3"
measuring = sys.modules["loka.measurement.measure"]


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.small = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.large = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48))
        self.alone, self.logit = nn.Linear(64, 256), nn.Linear(320, 1)

    def forward(self, x):
        parts = self.small(x[:, :16]), self.large(x), torch.tanh(self.alone(x))
        return self.logit(torch.cat(parts, dim=1))


@pytest.fixture(scope="module")
def stats():
    torch.manual_seed(0)
    model = Branches()
    return stats_of(model, torch.randn(24, 64, requires_grad=True))


def timed(stats, **options):
    settings = Settings(min_draws=2, max_draws=2)
    return loka.measure(stats, device="cpu", candidates=[ROWWISE], settings=settings, **options)


LARGEST_FIRST = ["alone", "large.0", "large.2", "logit", "small.0", "small.2"]


def test_from_the_largest_on_each_with_errors_and_times(stats):
    assert jobs_of(stats, timed=True) == [
        Job(kind, path) for path in LARGEST_FIRST for kind in ("errors", "times", "region")
    ]
    assert [job.path for job in jobs_of(stats, timed=False)] == LARGEST_FIRST


def test_a_limited_time_goes_to_the_largest_layer(stats, monkeypatch, tmp_path):
    """Ten seconds a race: the first layer is done when time is up, and the rest waits for the next call."""
    timer, now, out = install(monkeypatch, FakeTimer()), [1000.0], tmp_path / "report.json"
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def ten_seconds(names):
        now[0] += 10.0

    timer.before = ten_seconds
    part = timed(stats, out=out, time_limit=55.0)
    assert {site.path for site in part.sites.values()} == {"alone"}
    assert not any(site.unfinished for site in part.sites.values())
    assert "time limit of 55 s" in part.notes[0]
    assert not part.complete
    whole = timed(stats, out=out)
    assert whole.complete
    assert whole.sites == timed(stats).sites
    assert list(whole.sites) == [
        f"{path}/{gemm}" for path in stats.layers for gemm in ("output", "grad_input", "grad_weight")
    ]


def test_the_order_changes_no_result(stats, monkeypatch):
    install(monkeypatch, FakeTimer({ROWWISE: 60.0}))
    ordered = timed(stats)

    def as_called(stats, *, timed):
        return [Job(kind, path) for kind in ("errors", "times", "region") for path in stats.layers]

    monkeypatch.setattr(measuring, "jobs_of", as_called)
    other = timed(stats)
    assert other == ordered
    assert list(other.sites) == list(ordered.sites)
    assert ordered.complete
