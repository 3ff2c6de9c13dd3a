"""`loka train` in its three ways, and what it refuses."""

from __future__ import annotations

import signal
from pathlib import Path

import command_line
import pytest
from typer.testing import CliRunner

from loka.cli.app import app
from loka.core.exceptions import LokaError
from loka.core.plan import Plan
from loka.train.timeline import load_timeline

SMALL = ["train", "--model", "dlrm", "--rows", "4000", "--batch-size", "128", "--device", "cpu"]
AUTO = ["--auto", "--probe-every", "4", "--probe-steps", "9", "--candidate", "emulated:rowwise_e4m3"]


def loka(*arguments: object) -> str:
    done = CliRunner().invoke(app, [*SMALL, *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def refused(*arguments: object) -> str:
    done = CliRunner().invoke(app, [*SMALL, *map(str, arguments)])
    assert isinstance(done.exception, LokaError)
    return str(done.exception)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run from a cold start."""
    folder = tmp_path_factory.mktemp("auto")
    return folder, loka(*AUTO, "--out", folder, "--no-cache")


def test_auto_goes_from_bf16_to_fp8(made: tuple[Path, str]) -> None:
    folder, text = made
    assert "step 9: probed: 3 of 9 steps sampled" in text
    assert "sites in FP8" in text
    assert "held out: ne " in text
    assert "ran " in text
    events = load_timeline(folder / "timeline.json")
    assert [event.phase for event in events] == ["probe", "measure", "fp8", "end"]
    assert "phase" in text
    assert Plan.load(folder / "plan.json").budget.ne == 2e-4


def test_the_same_command_again_does_nothing_again(made: tuple[Path, str]) -> None:
    folder, text = made
    again = loka(*AUTO, "--out", folder, "--no-cache")
    assert "continued from step 25" in again
    wanted = [line for line in text.splitlines() if line.startswith("held out")]
    assert [line for line in again.splitlines() if line.startswith("held out")] == wanted


def test_a_run_by_a_plan_is_continued_without_its_file(made: tuple[Path, str], tmp_path: Path) -> None:
    first = loka("--plan", made[0] / "plan.json", "--checkpoints", tmp_path)
    again = loka("--checkpoints", tmp_path)
    assert f"by the plan in {tmp_path / 'step-00000025'}" in again
    wanted = [line for line in first.splitlines() if line.startswith("held out")]
    assert [line for line in again.splitlines() if line.startswith("held out")] == wanted


def test_metrics_by_segment(tmp_path: Path) -> None:
    text = loka("--segments", 8, "--precision", "tf32", "--accumulate", 2, "--window", 5)
    assert "sparse 8 = 2: ne " in text  # column 8 has three ids
    assert "other: " in text
    (window,) = [line for line in text.splitlines() if line.startswith("window: ne ")]
    assert "(640 rows" in window


def test_what_it_refuses(tmp_path: Path) -> None:
    assert "one of bf16, tf32, fp32" in refused("--precision", "fp8")
    assert "one of eager, compile, graph" in refused("--step", "fast")
    assert "--ne without --auto" in refused("--ne", "1e-4")
    assert "makes its own plan" in refused("--auto", "--plan", tmp_path / "plan.json")
    assert "the rows have 26 sparse columns" in refused("--segments", 26)
    assert "more parts than the 128 rows" in refused("--accumulate", 200)
    assert "loka[tensorboard]" in refused("--tensorboard", tmp_path) or __import__("tensorboard")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, status: int
) -> None:
    sent: list[object] = []

    def send(model: object) -> None:
        if not sent:
            sent.append(model)
            signal.raise_signal(number)

    monkeypatch.setattr("loka.cli.train.check_finite", send)
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [*SMALL, "--checkpoints", "saved", "--log-every", "7"]
    try:
        text = command_line.loka(*command, cwd=tmp_path, fails=status)
    finally:
        signal.signal(signal.SIGINT, usual)
    assert "interrupted: step 7 is saved in saved, and the same command goes on from there" in text
    assert "Abort" not in text
    assert "continued from step 7" in command_line.loka(*command, cwd=tmp_path)


def test_an_interrupt_without_checkpoints_promises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(*others: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("loka.cli.train.check_finite", press)
    text = command_line.loka(*SMALL, cwd=tmp_path, fails=130)
    assert "interrupted: no checkpoint of this run was saved" in text
    monkeypatch.setattr("loka.cli.train.open_data", press)
    text = command_line.loka(*SMALL, cwd=tmp_path, fails=130)
    assert "interrupted; demo, measure, validate, bench and data convert go on" in text
