import io
import json
import random

import pytest
import typer
import with_pyarrow  # noqa: F401
from command_line import loka

from loka.cli.app import app
from loka.cli.inputs import model_builder
from loka.cli.terminal import say
from loka.data import SyntheticClicks

COLUMNS = {"label": "y", "dense": ["price", "age"], "sparse": ["shop", "city"]}
FEW = ("--batch-size", 64, "--device", "cpu")


def write(path, rows, seed, extra=""):
    draw = random.Random(seed)
    lines = [
        f"{draw.randrange(2)},{draw.random():.3f},{draw.randrange(90)},s{draw.randrange(9)},{extra}c{draw.randrange(5)}"
        for _ in range(rows)
    ]
    path.write_text("\n".join(["y,price,age,shop,city", *lines]) + "\n")


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "train.csv", 400, 0)
    write(tmp_path / "test.csv", 120, 1)
    (tmp_path / "schema.json").write_text(json.dumps(COLUMNS))
    return tmp_path


def commands_with(option):
    found = set()

    def walk(group, before):
        for name, command in group.commands.items():
            if isinstance(command, typer.core.TyperGroup):
                walk(command, f"{before}{name} ")
            elif any(option in parameter.opts for parameter in command.params):
                found.add(f"{before}{name}")

    walk(typer.main.get_command(app), "")
    return found


def test_what_reads_tables_takes_a_schema_and_what_judges_a_test_set():
    served = {f"serve {verb}" for verb in ("freeze", "check", "bench", "package")}
    assert commands_with("--data") == {"demo", "probe", "train", "validate", "scale", "bench step"} | served
    assert commands_with("--schema") == commands_with("--data") | {"data convert"}
    assert commands_with("--test-data") == {"demo", "train", "validate"}


def test_the_refusal_names_an_option_that_the_command_has(folder):
    for command in (("train",), ("probe", "--out", "stats"), ("validate", "--arm", "naive"), ("demo",)):
        text = loka(*command, "--data", "train.csv", *FEW, cwd=folder, fails=True)
        assert "columns do not fit the schema" in text
        assert "--schema FILE" in text


def test_train_on_columns_of_ones_own_and_judge_on_another_file(folder):
    given = ("--model", "dlrm", "--data", "train.csv", "--schema", "schema.json", *FEW)
    text = loka("train", *given, cwd=folder)
    assert "(80 rows" in text
    text = loka("train", *given, "--test-data", "test.csv", cwd=folder)
    assert "train: 7 steps" in text, "all 400 rows"
    assert "(120 rows" in text
    text = loka("probe", *given, "--every", 2, "--out", "stats", cwd=folder)
    assert "steps sampled" in text


@pytest.mark.slow
def test_demo_and_validate_take_them_too(folder):
    given = ("--data", "train.csv", "--schema", "schema.json", "--test-data", "test.csv", *FEW)
    text = loka("validate", "--arm", "naive", "--model", "dlrm", "--pairs", 1, *given, cwd=folder, fails=4)
    assert "400 + 120 held out of test.csv" in text
    text = loka("demo", "--model", "dlrm", "--pairs", 1, "--out", "out", *given, cwd=folder)
    assert "400 + 120 held out of test.csv, 2 dense and 2 sparse features" in text
    assert f"loka validate --model dlrm {' '.join(given[:6])} --batch-size" in text
    write(folder / "other.csv", 120, 2)
    other = [*given[:4], "--test-data", "other.csv", *FEW]
    text = loka("demo", "--model", "dlrm", "--pairs", 1, "--out", "out", *other, cwd=folder, fails=True)
    assert "test_data: test.csv there, other.csv now" in text


def test_prepared_folders_go_together(folder):
    convert = ("--schema", "schema.json", "--out")
    loka("data", "convert", "train.csv", *convert, "a", "--min-count", 1, cwd=folder)
    loka("data", "convert", "test.csv", *convert, "b", "--vocabulary", "a", cwd=folder)
    loka("data", "convert", "test.csv", *convert, "c", "--buckets", 50, cwd=folder)
    train = ("train", "--model", "dlrm", "--data", "a", *FEW)
    assert "(120 rows" in loka(*train, "--test-data", "b", cwd=folder)
    text = loka(*train, "--test-data", "c", cwd=folder, fails=True)
    assert "c has other columns or ids than a" in text
    assert "ids of sparse feature 0: 10 and 51" in text
    assert "one is a table and the other a folder" in loka(*train, "--test-data", "test.csv", cwd=folder, fails=True)
    assert "a folder has its columns already" in loka(*train, "--schema", "schema.json", cwd=folder, fails=True)
    for option in (("--schema", "schema.json"), ("--test-data", "test.csv")):
        assert f"{option[0]} without --data" in loka("train", *option, cwd=folder, fails=True)


def test_what_a_folder_counted_is_told_once(folder):
    text = (folder / "train.csv").read_text().splitlines()
    text[5] = "1,,3,,c1"
    text[300] = "junk"
    (folder / "holes.csv").write_text("\n".join(text) + "\n")
    convert = ("data", "convert", "holes.csv", "--schema", "schema.json", "--out", "a", "--min-count", 1)
    assert "1 missing categories" in loka(*convert, cwd=folder)
    told = loka("train", "--model", "dlrm", "--data", "a", *FEW, cwd=folder)
    assert "rows read: 1 missing categories (whole folder, when converted)\n" in told
    assert "rows read: 1 malformed lines (whole folder, when converted)\n" in told
    told = loka("train", "--model", "dlrm", "--data", "holes.csv", "--schema", "schema.json", *FEW, cwd=folder)
    assert "rows read: 1 missing categories (all passes of this process)\n" in told


def test_a_factory_is_told_of_the_history(tmp_path, monkeypatch):
    """Nothing else says of how many ids a table of events has to be."""
    (tmp_path / "told_of_history.py").write_text(
        "from torch import nn\n"
        "def plain(dense_features, vocab_sizes):\n    return nn.Linear(dense_features, 1)\n"
        "def reads(dense_features, vocab_sizes, history):\n"
        "    model = nn.Embedding(history.vocab_size, 4)\n    model.history = history\n    return model\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rows = SyntheticClicks(rows=64, seed=0, history=20)
    found = model_builder("told_of_history:reads")(rows)
    assert found.history == rows.history
    assert found.num_embeddings == rows.history.vocab_size
    assert model_builder("told_of_history:plain")(rows).in_features == rows.dense_features


def test_a_terminal_that_lacks_a_letter_of_a_name_ends_nothing(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    say("written: \u00fcber/plan.json")
    assert out.buffer.getvalue() == b"written: \\xfcber/plan.json\n"


def test_home_is_meant_where_the_shell_leaves_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for option in (("--data=~/none.csv",), ("--data", "~/none.csv")):
        text = loka("train", *option, cwd=tmp_path, fails=2)
        assert f"{tmp_path}/home/none.csv" in text
