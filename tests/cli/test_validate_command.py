"""`loka validate` and `loka report`: exit statuses, messages, files."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from loka.cli.report import report
from loka.cli.validate import validate
from loka.core.exceptions import LokaError
from loka.train.validate_record import Validation

app = typer.Typer()
app.command()(validate)
app.command()(report)
RUNNER = CliRunner()


def call(*arguments: object):
    return RUNNER.invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


SMALL = ("--model", "dlrm", "--rows", 2000, "--batch-size", 192, "--pairs", 1)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, int]:
    out = tmp_path_factory.mktemp("validate")
    result = call("validate", "--arm", "naive", *SMALL, "--segment", "dense:0:2", "--out", out / "v")
    return out, result.output, result.exit_code


def test_one_pair_is_undecided_and_says_so_by_its_exit_status(judged):
    out, printed, status = judged
    assert status == 4
    assert "3 more pairs before anything is judged" in printed
    assert "verdict: naive UNDECIDED" in printed
    assert "pair 1 of 1: naive: undecided" in printed
    found = Validation.load(out / "v" / "validation.json")
    assert [segment.name.partition(" ")[0] for segment in found.arms[0].segments] == ["dense:0"] * 2


def test_finished_runs_are_judged_again_without_training(judged):
    out, _, _ = judged
    wide = ("--limit", 1000, "--segment", "none")
    result = call("validate", "--arm", "naive", *SMALL, *wide, "--out", out / "v")
    assert "step" not in result.output  # no log line: nothing was trained
    assert "No segments were judged" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arm", "nonsense"), "naive, tensorwise_e4m3"),
        (("--arm", "naive", "--segment", "dense:99"), "dense:0 to dense:12"),
        (("--arm", "naive", "--limit", 0), "lets nothing pass"),
        (("--arm", "missing.json"), "no such file"),
    ],
)
def test_mistakes_are_answered_with_what_there_is(tmp_path, arguments, message):
    with pytest.raises(LokaError, match=message):
        call("validate", *arguments, *SMALL, "--out", tmp_path / "v")


def test_a_report_of_it_is_one_file(judged):
    out, _, _ = judged
    record = out / "v" / "validation.json"
    result = call("report", "--validation", record, "--out", out / "page.html")
    assert result.exit_code == 0
    text = (out / "page.html").read_text()
    assert text.startswith("<!doctype html>")
    assert "Training curves" in text
    call("report", "--validation", record, "--out", out / "again.html")
    assert (out / "again.html").read_bytes() == (out / "page.html").read_bytes()


def test_a_report_of_nothing_is_refused(tmp_path):
    with pytest.raises(LokaError, match="--validation"):
        call("report", "--out", tmp_path / "page.html")
    with pytest.raises(LokaError, match="no such file"):
        call("report", "--plan", tmp_path / "plan.json", "--out", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
