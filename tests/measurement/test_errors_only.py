import sys

import pytest
import torch
from models import stats_of
from timers import FakeTimer, install
from torch import nn

import loka
from loka.core.error import sqnr_db
from loka.measurement import Settings

ROWWISE, TENSORWISE = "emulated:rowwise_e4m3", "emulated:tensorwise_e4m3"


@pytest.fixture(scope="module")
def stats():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    return stats_of(model, torch.randn(24, 32, requires_grad=True))


def measured(stats, out, **options):
    settings = Settings(max_draws=4)
    return loka.measure(stats, device="cpu", settings=settings, candidates=[ROWWISE, TENSORWISE], out=out, **options)


def refused(*args, **options):
    raise AssertionError("times were taken, or compiled for")


def test_errors_only_is_complete_says_so_and_can_be_planned_over(stats, monkeypatch, tmp_path):
    timer = install(monkeypatch, FakeTimer())
    monkeypatch.setattr(sys.modules["loka.measurement.measure"], "compile_ahead", refused)
    report = measured(stats, tmp_path / "report.json", errors_only=True)
    assert timer.races == []
    assert report.complete
    assert not report.timed
    assert {site.unfinished for site in report.sites.values()} == {None}
    assert report.notes == ("nothing was timed, as errors only were asked for; measure again without that to time",)
    assert "nothing was timed" in str(report)
    assert loka.Report.load(tmp_path / "report.json") == report
    plan = loka.plan(report, loka.Budget(keep=("2",)))
    taken = {site: d for site, d in plan.decisions.items() if d.candidate != "hp"}
    assert set(taken) == {"0/output", "0/grad_input", "0/grad_weight"}, "min_speedup binds where times are"
    assert all("not timed" in decision.reason for decision in taken.values())
    assert "the report is incomplete; sites not yet measured stay in hp" not in plan.notes


def test_times_follow_into_the_same_file(stats, monkeypatch, tmp_path):
    timer = install(monkeypatch, FakeTimer({"hp": 90.0, ROWWISE: 60.0}))
    out = tmp_path / "report.json"
    errors = measured(stats, out, errors_only=True)
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["loka.measurement.measure"], "draw_errors", refused)
        cut = measured(stats, out, time_limit=0)
        assert not cut.complete, "what had errors only lacks its times now"
        assert any(note.startswith("not timed: 0/output") for note in cut.notes)
        report = measured(stats, out)
    assert report.timed
    assert report.complete
    assert report.notes == ()
    assert timer.races
    for name, site in report.sites.items():
        for candidate, found in site.measurements.items():
            assert found.errors == errors.sites[name].measurements[candidate].errors
            assert found.microseconds is not None
    assert report == measured(stats, tmp_path / "fresh.json"), "as if it had been timed at once"


def test_errors_only_keeps_the_times_that_are_there(stats, monkeypatch, tmp_path):
    install(monkeypatch, FakeTimer())
    timed = measured(stats, tmp_path / "report.json")
    assert timed.complete
    assert measured(stats, tmp_path / "report.json", errors_only=True) == timed
    begun = measured(stats, tmp_path / "begun.json", time_limit=0)
    assert not begun.sites
    drawn = measured(stats, tmp_path / "begun.json", errors_only=True)
    assert not drawn.complete, "times were asked for first, and are missing still"
    assert set(drawn.sites) == set(timed.sites)
    assert measured(stats, tmp_path / "begun.json") == timed


def test_without_a_gpu_nothing_changes(stats, tmp_path):
    only = measured(stats, tmp_path / "report.json", errors_only=True)
    assert only == measured(stats, tmp_path / "other.json")


def test_the_command_takes_it(stats, monkeypatch, tmp_path, capsys):
    from loka.cli.app import app

    timer = install(monkeypatch, FakeTimer())
    stats.save(tmp_path / "stats")
    out = tmp_path / "report.json"
    words = ["measure", str(tmp_path / "stats"), "--device", "cpu", "--candidate", ROWWISE, "--no-cache"]
    app([*words, "--errors-only", "--out", str(out)], standalone_mode=False)
    assert timer.races == []
    assert "nothing was timed" in capsys.readouterr().out
    assert loka.Report.load(out).complete


def test_integers_are_told_by_the_tails_of_the_probed_rows():
    """Gaussian draws told 6 dB more. 1 dB: the interval, the weight, the centre."""
    torch.manual_seed(0)
    x = torch.rand(512, 256).pow(-0.4)  # Pareto's, alpha 2.5
    model = nn.Sequential(nn.Linear(256, 64, bias=False))
    stats = stats_of(model, x, torch.sum, effect_samples=0, depth_rows=512)
    step = x.amax(dim=1, keepdim=True) / 127
    exact = sqnr_db(model(step * (x / step).round()), model(x))
    for name in ("emulated:int8_row", "emulated:int8_row_centred"):
        report = loka.measure(stats, device="cpu", candidates=[name], errors_only=True)
        assert report.sites["0/output"].measured(name).errors["sqnr_db"].value == pytest.approx(exact, abs=1)
