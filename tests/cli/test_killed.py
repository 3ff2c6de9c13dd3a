"""Commands that are killed and started again end in the same numbers. `make kills` does it at random
moments."""

import functools
import itertools
import json
import os
import signal
import sys
import time

import pytest
from command_line import SMALL, loka, measure_coarsely
from forked import start_loka

from loka.cli import app
from loka.cli.commands import demo
from loka.core.exceptions import LokaError
from loka.core.records.report import Report
from loka.train import newest_step


def kill_at_step(step, checkpoints, process):
    deadline = time.monotonic() + 60
    while newest_step(checkpoints) < step and process.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, "it ended before it was killed"


def content_of(path):
    def timeless(found):
        if isinstance(found, dict):
            return {key: timeless(entry) for key, entry in found.items() if key != "rows_per_second"}
        return [timeless(entry) for entry in found] if isinstance(found, list) else found

    return timeless(json.loads(path.read_bytes())["content"])


def test_killed_training_ends_with_the_same_numbers(measured, tmp_path):
    """SIGKILL after the first checkpoints, twice; then the same command, by plan."""
    loka("plan", measured / "report.json", cwd=tmp_path)
    arguments = ["train", "--model", "dlrm", *SMALL, "--plan", "plan.json", "--checkpoint-every", 2]
    whole = loka(*arguments, "--checkpoints", "whole", cwd=tmp_path)
    for step in (2, 4):
        command = (*arguments, "--checkpoints", "killed")
        process = start_loka(*command, cwd=tmp_path, output=tmp_path / "printed")
        kill_at_step(step, tmp_path / "killed", process)
    resumed = loka(*arguments, "--checkpoints", "killed", cwd=tmp_path)
    assert "continued from step" in resumed

    def judged(text):
        return [line for line in text.splitlines() if line.startswith(("held out", "ran "))]

    assert judged(resumed) == judged(whole)
    assert len(judged(whole)) > 3


def killed(command, at, *arguments, cwd, **replaced):
    bars = {f"loka.cli.{command}.ProgressBars": functools.partial(_Dying, at), **replaced}
    process = start_loka(*arguments, cwd=cwd, output=cwd / "printed", **bars)
    process.join()
    assert process.exitcode == -signal.SIGKILL, (cwd / "printed").read_text()


class _Dying:
    """Progress bars that end the process with SIGKILL before item `at` of all that they count."""

    def __init__(self, at, *_):
        self._left = itertools.count(at, -1)

    def __call__(self, items, what, total):
        for item in items:
            if next(self._left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item


def test_a_killed_measurement_ends_with_the_same_report(measured, tmp_path, monkeypatch):
    """SIGKILL twice: after three layers, and at once, when what the first one saved is still there."""
    command = ("measure", measured / "stats", "--candidate=emulated:rowwise_e4m3")
    found = []
    often = {"loka.cli.app.measure_stats": measure_coarsely, "loka.measurement.measure._SAVING_SHARE": 0}
    for at in (3, 1):
        killed("app", at, *command, cwd=tmp_path, **often)
        found.append(Report.load(tmp_path / "report.json"))
    assert 0 < len(found[0].sites) <= len(found[1].sites)
    assert not found[1].complete
    monkeypatch.setattr(app, "measure_stats", measure_coarsely)
    left = tmp_path / ".report.json.0a1b2c3d4e5f.unfinished"  # by a kill in the middle of a save
    others = tmp_path / ".other.json.0a1b2c3d4e5f.unfinished"
    left.touch(), others.touch()
    loka(*command, cwd=tmp_path)
    assert (left.exists(), others.exists()) == (False, True)
    loka(*command, "--out", "whole.json", cwd=tmp_path)
    assert (tmp_path / "report.json").read_bytes() == (tmp_path / "whole.json").read_bytes()


@pytest.mark.slow
def test_a_killed_validation_ends_with_the_same_verdict(tmp_path):
    command = ("validate", "--arm", "naive", "--model", "dlrm", *SMALL, "--pairs", 1, "--segment", "none")
    for at in (4, 18):  # ten steps a run, three batches to judge it by, and once more by the mean
        killed("commands.validate", at, *command, "--out", "killed", cwd=tmp_path)
    assert (tmp_path / "killed" / "runs" / "bf16-0" / "run.json").exists()
    assert not (tmp_path / "killed" / "runs" / "naive-0" / "run.json").exists()
    for out in ("killed", "whole"):
        loka(*command, "--out", out, cwd=tmp_path, fails=4)
    other, whole = tmp_path / "killed", tmp_path / "whole"
    names = sorted(path.relative_to(whole) for path in whole.rglob("*"))
    assert names == sorted(path.relative_to(other) for path in other.rglob("*")), "and nothing beside it"
    for name in names:
        if name.suffix == ".json":
            assert content_of(other / name) == content_of(whole / name)
        elif (whole / name).is_file():
            assert (other / name).read_bytes() == (whole / name).read_bytes()


def test_sigterm_saves_what_was_measured(measured, tmp_path, monkeypatch):
    """A scheduler's notice ends a measurement as Ctrl-C does: with the report so far, and 143."""
    whole = Report.load(measured / "report.json").sites
    sent = []

    def progress(*_):
        def track(items, what, total):
            for place, item in enumerate(items):
                if place == 2 and not sent:
                    sent.append(what)
                    signal.raise_signal(signal.SIGTERM)
                yield item

        return track

    monkeypatch.setattr(app, "ProgressBars", progress)
    monkeypatch.setattr(app, "measure_stats", measure_coarsely)
    # Of two layers the first one is saved at once, and the second one at the end alone.
    monkeypatch.setattr(sys.modules["loka.measurement.measure"], "_SAVING_SHARE", 1e9)
    candidates = [f"--candidate=emulated:{name}" for name in ("rowwise_e4m3", "tensorwise_e4m3")]
    command = ("measure", measured / "stats", *candidates)
    text = loka(*command, cwd=tmp_path, fails=143)
    assert "interrupted; demo, measure, validate, bench and data convert go on" in text
    found = Report.load(tmp_path / "report.json")
    assert not found.complete
    assert len({site.path for site in found.sites.values()}) == 2
    loka(*command, cwd=tmp_path)
    assert Report.load(tmp_path / "report.json").sites == whole
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("place", ["typer.main.get_command", "typer.core.TyperGroup.parse_args"])
def test_sigterm_before_a_command_begins_is_told_too(place, tmp_path, monkeypatch):
    """A traceback there, or click's "Aborted!", would say that something broke."""

    def sent(*_, **__):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(place, sent)
    text = loka("doctor", cwd=tmp_path, fails=143)
    assert text.startswith("interrupted; ")


def test_sigterm_counts_where_a_library_speaks_of_ctrl_c(tmp_path, monkeypatch):
    """Kills found such ends, one in ten of SIGTERM's."""

    def library(target):
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(app, "diagnose", library)
    loka("doctor", cwd=tmp_path, fails=143)


@pytest.mark.slow
def test_a_killed_demo_watches_every_step_again(net, tmp_path, monkeypatch):
    """SIGKILL during the probed run, after a checkpoint; the rerun's statistics cover all of its steps."""
    command = ("demo", "--model", net, "--rows", 18_000, "--batch-size", 64, "--pairs", 1, "--out", "out")
    often = {"loka.cli.commands.demo._CHECKPOINT_EVERY": 20}
    process = start_loka(*command, cwd=tmp_path, output=tmp_path / "printed", **often)
    arm = tmp_path / "out" / "mine-Net" / "runs" / "bf16-0"
    kill_at_step(20, arm / "checkpoints", process)
    assert not (arm / "run.json").exists(), "the probed run had ended"

    def enough(*args, **options):
        raise LokaError("what comes after it, other tests run")

    monkeypatch.setattr(demo, "_CHECKPOINT_EVERY", 20)
    monkeypatch.setattr(demo, "measure", enough)
    text = loka(*command, cwd=tmp_path, fails=True)
    assert "of 225 steps sampled" in text
    assert "other tests run" in text
