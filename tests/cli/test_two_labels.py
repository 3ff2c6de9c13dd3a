import json
import random
import re

import pytest
import with_pyarrow  # noqa: F401
from command_line import loka

from loka.core.records.plan import Plan
from loka.core.records.stats import Stats
from loka.validation.record import Validation

FEW = ("--batch-size", 64, "--device", "cpu", "--model", "dlrm")
COLUMNS = {"label": ["click", "buy"], "dense": ["price", "age"], "sparse": ["shop", "city"]}


def _table(rows):
    draw, lines = random.Random(0), ["click,buy,price,age,shop,city"]
    for _ in range(rows):
        shop, city = draw.randrange(9), draw.randrange(5)
        click = draw.random() < 0.3 + 0.4 * (shop % 3 == 0)
        buy = click and draw.random() < 0.2 + 0.5 * (city % 2)
        lines.append(f"{click:d},{buy:d},{draw.random():.3f},{draw.randrange(90)},s{shop},c{city}")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("two")
    (path / "rows.csv").write_text(_table(1000))
    (path / "schema.json").write_text(json.dumps(COLUMNS))
    one = {**COLUMNS, "label": "buy"}
    (path / "one.json").write_text(json.dumps(one))
    loka("data", "convert", "rows.csv", "--schema", "schema.json", "--out", "rows", "--min-count", 1, cwd=path)
    return path


def test_a_converted_folder_names_its_tasks_and_trains_as_the_table(folder):
    assert "2 tasks: click, buy" in loka("data", "info", "rows", cwd=folder)
    text = loka("train", "--data", "rows", "--segments", 0, *FEW, cwd=folder)
    table = loka("train", "--data", "rows.csv", "--schema", "schema.json", "--segments", 0, *FEW, cwd=folder)
    kept = [line for line in text.splitlines() if "held out: ne" in line]
    assert [line.split(":")[0] for line in kept] == ["click", "buy"]
    assert kept[0].split("ne ")[1] != kept[1].split("ne ")[1]
    assert "click: sparse 0 = 1: ne" in text
    assert "buy: sparse 0 = 1: ne" in text
    # The folder's vocabulary counted the held-out rows too; of five and nine categories none is rare.
    assert kept == [line for line in table.splitlines() if "held out: ne" in line]


def test_a_task_by_itself_is_another_model(folder):
    text = loka("train", "--data", "rows.csv", "--schema", "one.json", *FEW, cwd=folder)
    assert "held out: ne" in text
    assert "click" not in text
    refused = loka("train", "--data", "rows", "--test-data", "one", *FEW, cwd=_with_one(folder), fails=True)
    assert "labels: ('click', 'buy') and ('buy',)" in refused


def _with_one(folder):
    convert = ("data", "convert", "rows.csv", "--schema", "one.json", "--out", "one", "--vocabulary", "rows")
    loka(*convert, cwd=folder)
    return folder


@pytest.mark.slow
def test_probe_takes_the_labels_of_each(folder):
    text = loka("probe", "--data", "rows", "--every", 3, "--out", "stats", *FEW, cwd=folder)
    assert "click: " in text
    assert "; buy: " in text
    effects = [layer.effects["rowwise_e4m3"] for layer in Stats.load(folder / "stats").layers.values()]
    assert effects
    for effect in effects:
        click, buy = (share / effect.count for share in effect.probabilities)
        assert 0.35 < click < 0.55
        assert 0.1 < buy < 0.3


@pytest.mark.slow
def test_auto_keeps_its_budget_beside_another_limit(folder):
    auto = ("--auto", "--out", "auto", "--probe-every", 2, "--probe-steps", 6, "--min-speedup", 0)
    text = loka("train", "--data", "rows", *auto, *FEW, cwd=folder)
    assert "stays in bf16: the budget limits KL/H" in text
    assert "buy: held out: ne" in text
    text = loka("train", "--data", "rows", *auto, "--base-rate", 0.2, *FEW, cwd=folder, fails=True)
    assert "leave --base-rate out: the labels of each task are counted" in text


@pytest.mark.slow
def test_auto_goes_to_fp8_where_both_tasks_are_known(folder):
    (folder / "more.csv").write_text(_table(4000))
    loka("data", "convert", "more.csv", "--schema", "schema.json", "--out", "more", "--min-count", 1, cwd=folder)
    auto = ("--auto", "--out", "fp8", "--probe-every", 2, "--probe-steps", 45, "--ne", 0.1, "--min-speedup", 0)
    assert "sites in FP8" in loka("train", "--data", "more", *auto, *FEW, cwd=folder)


@pytest.mark.slow
def test_probe_of_a_checkpoint_counts_what_it_trained_on(folder):
    loka("train", "--data", "rows", "--checkpoints", "kept", *FEW, cwd=folder)
    text = loka("probe", "--data", "rows", "--checkpoint", "kept", "--out", "asitis", *FEW, cwd=folder)
    assert "effects on KL/H: of 6 of 6 sites" in text


def test_validate_has_a_verdict_for_each(folder):
    arguments = ("--arm", "naive", "--pairs", 1, "--segment", "sparse:0:2", "--data", "rows", *FEW)
    text = loka("validate", *arguments, "--out", "proof", cwd=folder, fails=4)
    assert "verdict: naive, click UNDECIDED, naive, buy UNDECIDED" in text
    assert "3 segments of each task" in text
    assert "all rows have an interval of 97.50 %" in text
    found = Validation.load(folder / "proof" / "validation.json")
    assert [arm.task for arm in found.arms] == ["click", "buy"]
    loka("report", "--validation", "proof/validation.json", "--out", "page.html", cwd=folder)
    assert "naive, buy" in (folder / "page.html").read_text()


@pytest.mark.parametrize("command", [("demo",), ("bench", "step")])
def test_what_is_of_one_task_says_so(folder, command):
    text = loka(*command, "--data", "rows", "--device", "cpu", cwd=folder, fails=True)
    assert "takes rows with one label, and these have 2: click, buy" in text
    assert '("label": "click")' in text


@pytest.mark.slow
def test_gates_by_a_domain_are_asked_for_in_the_models_name(folder):
    def train(name, *more, fails=False):
        return loka("train", "--data", "rows", *FEW[:4], "--model", name, *more, cwd=folder, fails=fails)

    by = {name: train(name, "--checkpoints", name[-1]) for name in ("mmoe:small:0", "mmoe:small:1")}
    for text in by.values():
        assert re.findall("(click|buy): held out: ne", text) == ["click", "buy"]
    assert len({text.split("held out")[1] for text in by.values()}) == 2
    # Both columns' gates are alike in size: the names of weights tell them apart.
    assert "another run" in train("mmoe:small:1", "--checkpoints", "0", fails=True)
    assert "the rows have 2 sparse columns" in train("mmoe:small:2", fails=True)
    for name in ("dlrm:small:0", "mmoe:small:", "mmoe:small:-1"):
        assert "mmoe:SIZE:COLUMN" in train(name, fails=True)


def test_a_factory_is_called_with_their_number(folder):
    (folder / "two_logits.py").write_text(
        "from loka.zoo import build\n\n\ndef model(dense_features, vocab_sizes, tasks):\n"
        "    return build('dcnv2', dense_features=dense_features, vocab_sizes=vocab_sizes, tasks=tasks)\n\n\n"
        "def deaf(dense_features, vocab_sizes):\n    raise AssertionError\n"
    )
    own = ("--data", "rows", *FEW[:4], "--model")
    assert "buy: held out: ne" in loka("train", *own, "two_logits:model", cwd=folder)
    text = loka("train", *own, "two_logits:deaf", cwd=folder, fails=True)
    assert "called with dense_features and vocab_sizes and tasks" in text


def test_more_labels_than_the_zoo_has_logits_are_refused(folder):
    names = [f"t{number}" for number in range(9)]
    row = ",".join(["1"] * 9 + ["0.5"])
    (folder / "many.csv").write_text("\n".join([",".join([*names, "x"]), *[row] * 50]) + "\n")
    (folder / "many.json").write_text(json.dumps({"label": names, "dense": ["x"]}))
    text = loka("train", "--data", "many.csv", "--schema", "many.json", *FEW, cwd=folder, fails=True)
    assert "have up to 8 logits" in text
    assert "--model package.module:factory" in text


@pytest.mark.slow
def test_limits_by_task_and_segment_from_probe_to_page(folder):
    """1000 rows hold out 200: enough for each task, and of no segment."""
    probe = ("probe", "--data", "rows", "--every", 3, "--out", "parts", "--segment", "sparse:0:1", *FEW)
    text = loka(*probe, cwd=folder)
    assert "buy: KL/H known to a factor of" in text
    assert "labels of" in text
    assert "do not tell the base rate (it takes 10): read more rows\n" in text
    loka("measure", "parts", "--out", "parts.json", "--errors-only", cwd=folder)
    asked = ("--ne-of", "click=1e-2", "--ne-of", "buy = 2e-2", "--min-sqnr-db", 10)
    text = loka("plan", "parts.json", *asked, "--out", "by_task.json", cwd=folder)
    assert "click" in text.split("Predicted KL/H by part, and its budget: ")[1]
    assert Plan.load(folder / "by_task.json").limits == {"click": 1e-2, "buy": 2e-2}
    loka("report", "--plan", "by_task.json", "--out", "tasks.html", cwd=folder)
    assert "Limits by task and segment" in (folder / "tasks.html").read_text()
    rare = next(part for part in Stats.load(folder / "parts").parts.values() if part.unknown)
    name = rare.segment
    text = loka("plan", "parts.json", "--ne-of", f"{name}=1e-2", cwd=folder, fails=True)
    assert "the budget limits KL/H where it is not known well enough" in text
    assert rare.unknown in text
    text = loka("plan", "parts.json", "--ne-of", "sales=1e-2", cwd=folder, fails=True)
    assert "the report knows no KL/H of 'sales'" in text
    text = loka("plan", "parts.json", "--ne-of", "buy=1e-9", "--ne-of", "buy =1", cwd=folder, fails=True)
    assert "--ne-of 'buy =1': buy has a limit already" in text
    text = loka("plan", "parts.json", "--ne", 1e-4, "--ne-of", "buy=1e-2", cwd=folder, fails=True)
    assert "leave --ne out and name every task" in text
    text = loka("drift", "by_task.json", "parts", "--report", "parts.json", cwd=folder, fails=2)
    assert "the plan has limits on click, buy" in text
    assert "KL/H before" not in text, "it is told before anything is"
    assert "keeps the limits of click, buy is not known" in loka("drift", "by_task.json", "parts", cwd=folder, fails=4)
