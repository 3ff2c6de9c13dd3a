import pytest
import typer
from typer.testing import CliRunner

from loka.cli.commands.power import Power
from loka.cli.commands.report import report
from loka.cli.commands.validate import validate
from loka.core.exceptions import LokaError
from loka.validation.record import Validation

app = typer.Typer()
app.command()(validate)
app.command()(report)
RUNNER = CliRunner()


def call(*arguments):
    return RUNNER.invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


SMALL = ("--model", "dlrm", "--rows", 2000, "--batch-size", 192, "--pairs", 1)


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    out = tmp_path_factory.mktemp("validate")
    result = call("validate", "--arm", "naive", *SMALL, "--segment", "dense:0:2", "--out", out / "v")
    return out, result.output, result.exit_code


def test_one_pair_is_undecided_and_says_so_by_its_exit_status(judged):
    out, printed, status = judged
    assert status == 4
    assert "3 more pairs before there is a verdict" in printed
    assert "verdict: naive UNDECIDED" in printed
    assert "pair 1 of 1: naive: undecided" in printed
    found = Validation.load(out / "v" / "validation.json")
    assert [segment.name.partition(" ")[0] for segment in found.arms[0].segments] == ["dense:0"] * 2


def test_finished_runs_are_judged_again_without_training(judged):
    out, _, _ = judged
    wide = ("--limit", 1000, "--segment", "none")
    result = call("validate", "--arm", "naive", *SMALL, *wide, "--out", out / "v")
    assert "seed 0: step" not in result.output  # no log line: nothing was trained
    assert "There are no segments" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arm", "nonsense"), "naive, nudged, tensorwise_e4m3"),
        (("--arm", "naive", "--schedule", "step"), "one of cosine, linear, wsd, constant"),
        (("--arm", "naive", "--sequential"), "looks begin after 4"),
        (("--arm", "naive", "--segment", "dense:99"), "dense:0 to dense:12"),
        (("--arm", "naive", "--segment", "sparse:1", "--segment", "sparse:1"), "--segment sparse:1 is given twice"),
        (("--arm", "naive", "--segment", "none", "--segment", "sparse:1"), "none alone, or leave it out"),
        (("--arm", "naive", "--limit", 0), "a finite number above 0"),
        (("--arm", "naive", "--limit", "inf"), "a finite number above 0"),
        (("--arm", "naive", "--segment-limit", "inf"), "a finite number above 0"),
        (("--arm", "missing.json"), "no such file"),
    ],
)
def test_mistakes_are_answered_with_what_there_is(tmp_path, arguments, message):
    with pytest.raises(LokaError, match=message):
        call("validate", *arguments, *SMALL, "--out", tmp_path / "v")


@pytest.mark.slow
def test_it_says_what_the_rates_do_and_whether_that_annealed(judged):
    _, printed, _ = judged
    assert "rates rise over 1 steps, then fall along a cosine to 0 over 8" in printed
    assert "bf16 is annealed: " in printed or "bf16 is not known whether" in printed
    assert "all rows, by the mean of the weights: " in printed
    level = call("validate", "--arm", "naive", *SMALL, "--schedule", "constant", "--out", judged[0] / "level")
    assert "stay constant: the model is not annealed at the end" in level.output
    assert "bf16 is NOT annealed: the last rate is 1 of the peak" in level.output


@pytest.mark.slow
def test_a_bank_tells_before_what_pairs_can_decide(tmp_path):
    common = (*SMALL[:-2], "--segment", "none", "--bank", tmp_path / "bank.json")
    arms = ("--arm", "nudged")
    first = call("validate", *arms, *common, "--pairs", 3, "--out", tmp_path / "v").output
    assert "how many pairs will decide is not known before the first ones" in first
    assert "none has 4 pairs yet" in first
    second = call("validate", *arms, *common, "--pairs", 4, "--out", tmp_path / "v").output
    assert "by 3 banked pairs of nudged: at a standard deviation of " in second
    assert "held-out rows are needed" in second
    assert "nudged, 4 pairs, " in second
    assert "interval contains 0 in " in second
    moved = ("--schedule", "constant", "--pairs", 1, "--out", tmp_path / "w")
    third = call("validate", *arms, *common, *moved).output
    assert "bank.json holds pairs of 1 other models, rows or settings" in third
    given = call("validate", *arms, *common, *moved, "--prior-sd", "0.025").output
    assert "by the given standard deviation of 0.025 %: at a standard deviation of 0.025 % between pairs, " in given
    assert "pass at 0.02 % in 80% of validations where nothing is wrong" in given


def test_two_tasks_are_said_to_need_more_pairs_than_one():
    asked = {"file": None, "prior_sd": 0.025, "pairs": 4, "limit": 0.02, "sequential": False}
    one, two = (Power(tasks=tasks, **asked).before("", (), 1000) for tasks in (1, 2))
    assert "20 pairs pass" in one
    assert "24 pairs pass" in two


@pytest.mark.slow
def test_a_sequential_validation_is_announced(tmp_path):
    shown = call(
        *("validate", "--arm", "nudged", *SMALL[:-2], "--pairs", 5, "--sequential"),
        *("--segment", "none", "--limit", 50, "--out", tmp_path / "v"),
    ).output
    assert "4 pairs against bf16, limit 50 % of NE; a look after every pair, 5 at most" in shown
    assert "verdict: nudged PASS" in shown


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
