import json
import shutil
from dataclasses import replace

import pytest
from command_line import loka
from typer.testing import CliRunner

from loka.cli.app import app
from loka.core.exceptions import LokaError
from loka.core.records.stats import Stats


@pytest.fixture(scope="module")
def folder(measured, tmp_path_factory):
    return shutil.copytree(measured, tmp_path_factory.mktemp("ne") / "folder")


def test_a_budget_is_spent_and_told(folder):
    text = loka("plan", "report.json", "--ne", "1e-3", "--out", "plan.json", cwd=folder)
    assert "Predicted KL/H" in text
    assert "the budget is 0.001" in text
    nothing = loka("plan", "report.json", "--ne", "0", "--out", "none.json", cwd=folder)
    assert "is above all that the sum of layers may spend, 0" in nothing, "each output says what it would have cost"
    content = json.loads((folder / "plan.json").read_text())
    assert '"ne": 0.001' in json.dumps(content)


def test_the_papers_budget(folder):
    loka("plan", "report.json", "--budget", "paper", "--out", "paper.json", cwd=folder)
    text = (folder / "paper.json").read_text()
    assert '"max_mere": 0.2' in text
    assert '"min_sqnr_db": null' in text
    loka("plan", "report.json", "--budget", "paper", "--max-mere", "0.3", "--out", "paper.json", cwd=folder)
    assert '"max_mere": 0.3' in (folder / "paper.json").read_text()
    assert "no budget is called" in loka("plan", "report.json", "--budget", "x", cwd=folder, fails=True)


def test_the_frontier(folder):
    text = loka("plan", "report.json", "--frontier", "--out", "frontier.json", cwd=folder)
    assert "knee" in text
    assert "no speed is claimed" in text
    points = json.loads((folder / "frontier.json").read_text())["content"]["points"]
    assert len(points) > 2
    assert "cannot draw" in loka("plan", "report.json", "--frontier", "--out", "f.doc", cwd=folder, fails=True)
    loka("plan", "report.json", "--frontier", "--ne", "1e-4", cwd=folder, fails=True)


def test_drift(folder):
    loka("plan", "report.json", "--ne", "1e-3", "--out", "plan.json", cwd=folder)
    same = ["drift", "plan.json", "stats", "--before", "stats", "--report", "report.json"]
    assert "the plan holds" in loka(*same, cwd=folder)
    stats = Stats.load(folder / "stats")
    moved = {}
    for path, layer in stats.layers.items():
        given = layer.operands["input"]
        tensors = {**given.tensors, "amax": given.tensors["amax"] * 8}
        moved[path] = replace(layer, operands={**layer.operands, "input": replace(given, tensors=tensors)})
    replace(stats, layers=moved).save(folder / "moved")
    text = loka("drift", "plan.json", "moved", "--before", "stats", cwd=folder, fails=True)
    assert "amax of input rose by 3.0 octaves" in text
    assert "the drift guard should hold in hp" in text
    # Three safe windows after the unsafe one open it again; two do not.
    loka("drift", "plan.json", "moved", "stats", "stats", "--before", "stats", cwd=folder, fails=True)
    loka("drift", "plan.json", "moved", "stats", "stats", "stats", "--before", "stats", cwd=folder)


def test_statistics_that_are_not_behind_the_plan_are_refused(folder):
    """Such a `before` hid what moved: it was said that the plan holds."""
    loka("plan", "report.json", "--ne", "1e-3", "--out", "plan.json", cwd=folder)
    stats = Stats.load(folder / "stats")
    layers = {
        path: replace(layer, effects={n: replace(e, total=2 * e.total) for n, e in layer.effects.items()})
        for path, layer in stats.layers.items()
    }
    replace(stats, layers=layers).save(folder / "other")
    replace(stats, steps=stats.steps + 1).save(folder / "later")
    text = loka("drift", "plan.json", "stats", "--before", "other", cwd=folder, fails=True)
    assert "was not made of the statistics to compare with" in text
    assert "the plan holds" not in text
    given = ("--before", "later", "--report", "report.json")
    assert "measured on other statistics" in loka("drift", "plan.json", "stats", *given, cwd=folder, fails=True)


def test_a_window_that_does_not_tell_is_not_said_to_hold(folder):
    loka("plan", "report.json", "--ne", "1e-3", "--out", "plan.json", cwd=folder)
    stats = Stats.load(folder / "stats")
    blind = {path: replace(layer, effects={}, no_effect="no logits") for path, layer in stats.layers.items()}
    replace(stats, layers=blind).save(folder / "blind")
    replace(stats, sampled_steps=0).save(folder / "empty")
    text = loka("drift", "plan.json", "blind", "--before", "stats", cwd=folder, fails=True)
    assert "whether the plan holds is not known" in text
    assert "effect of rowwise_e4m3 on NE: no logits" in text or "effect of tensorwise_e4m3" in text
    assert "\nthe plan holds" not in text
    refused = loka("drift", "plan.json", "empty", cwd=folder, fails=True)
    assert "DataRefused" in refused


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "no-such-report.json", "--ne", "inf"],
        ["plan", "no-such-report.json", "--max-mere", "nan"],
        ["probe", "--segment", "dense:0", "--segment", "sparse:1"],
        ["probe", "--base-rate", "0"],
        ["probe", "--base-rate", "2"],
        ["probe", "--base-rate", "nan"],
        ["demo", "--min-sqnr-db", "nan"],
        ["bench", "step", "--min-sqnr-db", "inf"],
    ],
)
def test_numbers_that_make_no_sense_are_refused_before_any_work(command, tmp_path):
    refused = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert isinstance(refused.exception, LokaError), refused.output
    assert command[-1] in str(refused.exception)
    assert "Way out" in str(refused.exception)
