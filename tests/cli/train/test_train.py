import json
import signal

import command_line
import pytest
import torch
from sweeps import sweep
from typer.testing import CliRunner

from loka.cli.app import app
from loka.core.exceptions import LokaError
from loka.core.records.plan import Plan
from loka.core.records.stats import Stats
from loka.data import SyntheticClicks
from loka.train.automatic.timeline import load_timeline

SMALL = ["train", "--model", "dlrm", "--batch-size", "128", "--device", "cpu"]
AUTO = ["--auto", "--probe-every", "4", "--probe-steps", "9", "--candidate", "emulated:rowwise_e4m3"]


def small(*arguments):
    return [*SMALL, *([] if "--data" in arguments else ["--rows", "4000"]), *map(str, arguments)]


def loka(*arguments):
    done = CliRunner().invoke(app, small(*arguments), catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def refused(*arguments):
    done = CliRunner().invoke(app, small(*arguments))
    assert isinstance(done.exception, LokaError)
    return str(done.exception)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("auto")
    return folder, loka(*AUTO, "--out", folder, "--no-cache")


def test_auto_goes_from_bf16_to_fp8(made):
    folder, text = made
    assert "step 9: probed: 3 of 9 steps sampled" in text
    assert "sites in FP8" in text
    assert "held out: ne " in text
    assert "ran " in text
    events = load_timeline(folder / "timeline.json")
    assert [event.phase for event in events] == ["probe", "measure", "fp8", "end"]
    assert "phase" in text
    assert Plan.load(folder / "plan.json").budget.ne == 2e-4


def test_the_same_command_again_does_nothing_again(made):
    folder, text = made
    assert "base_rate" in refused(*AUTO, "--out", folder, "--no-cache", "--base-rate", "0.5")
    again = loka(*AUTO, "--out", folder, "--no-cache")
    assert "continued from step 25" in again
    wanted = [line for line in text.splitlines() if line.startswith("held out")]
    assert [line for line in again.splitlines() if line.startswith("held out")] == wanted


def test_a_run_by_a_plan_is_continued_without_its_file(made, tmp_path):
    first = loka("--plan", made[0] / "plan.json", "--checkpoints", tmp_path)
    again = loka("--checkpoints", tmp_path)
    assert f"by the plan in {tmp_path / 'step-00000025'}" in again
    wanted = [line for line in first.splitlines() if line.startswith("held out")]
    assert [line for line in again.splitlines() if line.startswith("held out")] == wanted


def test_metrics_by_segment(tmp_path):
    text = loka("--segments", 8, "--precision", "tf32", "--accumulate", 2, "--window", 5)
    assert "sparse 8 = 2: ne " in text  # column 8 has three ids
    assert "other: " in text
    (window,) = [line for line in text.splitlines() if line.startswith("window: ne ")]
    assert "(640 rows" in window


@pytest.mark.slow
def test_rates_decay_by_default_and_a_mean_is_judged_beside(tmp_path):
    text = loka("--average", "tail")
    assert "rates rise over 3 steps, then fall along a cosine to 0 over 22" in text
    assert "held out, by the mean of the weights (tail): ne " in text
    level = loka("--schedule", "constant")
    assert "not annealed at the end" in level
    assert "mean of the weights" not in level


def test_labels_that_are_all_equal_are_said_and_nothing_is_promised(tmp_path):
    """In --auto no plan, in the quality no NE; tests/cli/test_probe_command.py has the probe."""
    file = tmp_path / "rows.csv"
    names = [f"i{n}" for n in range(3)] + [f"c{n}" for n in range(2)]
    lines = [",".join(["label", *names])] + [f"0,{n % 7},1,2,{n % 5},{n % 3}" for n in range(2000)]
    file.write_text("\n".join(lines) + "\n")
    schema = {"label": "label", "dense": names[:3], "sparse": names[3:]}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    runner = CliRunner()
    convert = ["data", "convert", str(file), "--out", str(tmp_path / "rows"), "--buckets", "50"]
    done = runner.invoke(app, [*convert, "--schema", str(tmp_path / "schema.json")], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    data = ["--data", tmp_path / "rows"]
    text = loka(*data)
    assert "whose labels are all 0: NE, AUC and calibration are not defined" in text
    assert "all 1600 labels read are 0: H is 0" in refused(*data, "--auto", "--out", tmp_path / "a")
    demo = ["demo", "--model", "dlrm", *map(str, data), "--device", "cpu", "--out", str(tmp_path / "d")]
    assert "the rows to train on: all 1600 labels read are 0" in str(runner.invoke(app, demo).exception)


@pytest.mark.slow
def test_a_probe_takes_the_share_of_the_labels_it_reads(tmp_path):
    """At few positives the mean prediction of a fresh model is many times off."""
    command = ["probe", "--model", "dlrm", "--rows", "2000", "--batch-size", "128", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*command, "--device", "cpu"], catch_exceptions=False)
    labels = torch.cat([batch.label for batch in SyntheticClicks(rows=1600, seed=0).batches(400)])
    positive = int(labels.sum())
    assert f"{positive} of 1600 labels are positive" in done.output
    effect = next(e for layer in Stats.load(tmp_path).layers.values() for e in layer.effects.values())
    assert effect.probabilities[0] / effect.count == pytest.approx(positive / 1600)


def test_what_it_refuses(tmp_path):
    assert "one of bf16, tf32, fp32" in refused("--precision", "fp8")
    assert "one of eager, compile, graph" in refused("--step", "fast")
    assert "one of cosine, linear, wsd, constant" in refused("--schedule", "step")
    assert "one of none, ema, tail" in refused("--average", "swa")
    assert "decay is 0.0" in refused("--decay", 0)
    assert "--probe-every 'often'" in refused("--auto", "--probe-every", "often", "--out", tmp_path / "a")
    assert "--ne without --auto" in refused("--ne", "1e-4")
    assert "no candidate is called 'x'" in refused("--auto", "--candidate", "x", "--out", tmp_path / "a")
    assert not (tmp_path / "a").exists()
    assert "makes its own plan" in refused("--auto", "--plan", tmp_path / "plan.json")
    assert "the rows have 26 sparse columns" in refused("--segments", 26)
    assert "more parts than the 128 rows" in refused("--accumulate", 200)
    assert "loka[tensorboard]" in refused("--tensorboard", tmp_path) or __import__("tensorboard")


@pytest.mark.parametrize(
    ("number", "status"), sweep([(signal.SIGTERM, 143), (signal.SIGINT, 130)], [(signal.SIGTERM, 143)])
)
def test_a_signal_saves_and_says_where(tmp_path, monkeypatch, number, status):
    sent = []

    def send(model):
        if not sent:
            sent.append(model)
            signal.raise_signal(number)

    monkeypatch.setattr("loka.cli.commands.train.check_finite", send)
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    command = small("--checkpoints", "saved", "--log-every", "7")
    try:
        text = command_line.loka(*command, cwd=tmp_path, fails=status)
    finally:
        signal.signal(signal.SIGINT, usual)
    assert "interrupted: step 7 is saved in saved, and the same command goes on from there" in text
    assert "Abort" not in text
    assert "continued from step 7" in command_line.loka(*command, cwd=tmp_path)


def test_an_interrupt_without_checkpoints_promises_nothing(tmp_path, monkeypatch):
    def press(*others, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr("loka.cli.commands.train.check_finite", press)
    text = command_line.loka(*small(), cwd=tmp_path, fails=130)
    assert "interrupted: no checkpoint of this run was saved" in text
    monkeypatch.setattr("loka.cli.commands.train.open_data", press)
    text = command_line.loka(*small(), cwd=tmp_path, fails=130)
    assert "interrupted; demo, measure, validate, bench and data convert go on" in text


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--candidate x --probe-steps 5 --no-cache", "--probe-steps, --candidate, --no-cache without --auto"),
        ("--checkpoint-every 3", "--checkpoint-every without --checkpoints"),
        ("--no-pipeline", "--no-pipeline without --engine torchrec"),
        ("--decay 0.2", "--decay with --schedule cosine"),
        ("--schedule constant --final-rate 0", "--final-rate with --schedule constant"),
        ("--average-share 0.5", "--average-share with --average none"),
        ("--rows 4000 --data rows.csv", "--rows 4000 sets the number of synthetic rows, and rows.csv is read in full"),
    ],
)
def test_an_option_that_nothing_reads_is_refused(given, told):
    assert told in refused(*given.split())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("probe --checkpoint kept --every 3 --schedule wsd", "--every, --schedule with --checkpoint"),
        ("validate --arm naive --decay 0.2", "--decay with --schedule cosine"),
        ("validate --arm naive --segment none --segment-limit 1", "--segment-limit with --segment none"),
        ("serve bench server --rate 5 --load 0.7", "--load with --rate"),
        ("serve package server --name ranker", "--name without --triton"),
        ("serve package server --triton models --out a.pt2", "--out with --triton"),
        ("serve check server --rows 100 --data rows.csv", "rows.csv is read in full"),
        ("demo --rows 100 --data rows.csv", "rows.csv is read in full"),
    ],
)
def test_other_commands_refuse_them_too(given, told):
    assert told in str(CliRunner().invoke(app, given.split()).exception)
