import importlib
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import typer.main
from command_line import SMALL, loka, measure_coarsely

from loka import cli as loka_cli
from loka.cli import app
from loka.cli.commands import demo
from loka.cli.terminal import printable
from loka.core.storage.alone import alone_in
from loka.core.storage.files import write_record


@pytest.fixture(scope="module")
def folder(measured, tmp_path_factory):
    folder = shutil.copytree(measured, tmp_path_factory.mktemp("cli") / "folder")
    loka("plan", "report.json", "--out", "plan.json", cwd=folder)
    return folder


def test_doctor_explains_every_candidate(tmp_path):
    text = loka("doctor", "--target", "sm_80", cwd=tmp_path)
    assert "sm_80 has no FP8 tensor cores" in text
    assert "emulated:blockwise_e4m3" in text
    if torch.version.cuda is None:
        assert "this torch brings no cuBLASLt" in text
        assert "cublaslt:tensorwise_e4m3 " not in text, "it is listed among those that do not work here"
    assert "UnknownName" in loka("doctor", "--target", "h-200", cwd=tmp_path, fails=True)


@pytest.mark.slow
def test_stage_by_stage(folder):
    text = loka("train", "--model", "dlrm", *SMALL, "--plan", "plan.json", cwd=folder)
    assert "sites in FP8" in text
    assert "held out: ne " in text
    assert "top.0/output" in text
    loka("plan", "report.json", "--out", "other.json", "--force", "top.*=hp", cwd=folder)
    twice = ("--force", "top.*=hp", "--force", "top.*=emulated:rowwise_e4m3")
    assert "is forced already" in loka("plan", "report.json", *twice, cwd=folder, fails=2)
    text = loka("diff", "plan.json", "other.json", cwd=folder)
    assert "top.0/output" in text
    assert "forced by 'top.*'" in text


def test_unknown_model_data_and_device(tmp_path):
    assert "wukong:2gf" in loka("probe", "--model", "gpt", cwd=tmp_path, fails=True)
    assert "one of" in loka("probe", "--model", "wukong:huge", cwd=tmp_path, fails=True)
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    text = loka("probe", "--data", "x.csv", cwd=tmp_path, fails=True)
    assert "DataRefused" in text
    assert "label" in text


def test_what_was_replaced_is_counted_over_both_parts(tmp_path):
    """80 training rows and 20 held out; a value is missing in 10 and in 3 of them, once a pass."""
    columns = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    lines = [",".join(columns)]
    for row in range(100):
        dense = ["" if (row < 10 or row >= 97) and i == 0 else "1" for i in range(13)]
        lines.append(",".join([str(row % 3 // 2), *dense, *["a"] * 26]))
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    text = loka("train", "--model", "dcnv2", "--data", "rows.csv", "--batch-size", 32, cwd=tmp_path)
    assert "rows read: 13 missing dense values" in text


def test_own_model_by_factory(net, tmp_path):
    text = loka("probe", "--model", net, *SMALL, cwd=tmp_path)
    assert "written: stats" in text
    assert (tmp_path / "stats" / "stats.json").exists()


@pytest.mark.parametrize("head", ["Linear(37, 2)", "Linear(37, 1)", "LSTM(37, 1)"])
def test_a_model_of_two_tasks_is_refused_with_a_way_out(head, net, tmp_path):
    """torch would speak of target sizes; [B, 1] is no logit a row either, and a tuple is none at all."""
    (tmp_path / "mine.py").write_text(
        (tmp_path / "mine.py").read_text().replace("Linear(37, 1)", head).replace(".squeeze(1)", "")
    )
    text = loka("train", "--model", net, *SMALL, "--no-mods", cwd=tmp_path, fails=2)
    assert "not one logit for each of 256 rows" in text
    assert 'or "label": ["click", "buy"]' in text.replace("\n", " ")
    assert ("`.squeeze(1)` at the end of forward" in text.replace("\n", " ")) == (head == "Linear(37, 1)")


def test_demo_writes_its_records_and_goes_on_when_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "measure", measure_coarsely)
    arguments = ("demo", "--model", "dlrm", *SMALL, "--pairs", 2, "--out", "out")
    text = loka(*arguments, cwd=tmp_path)
    end = text[text.index("\nfound\n") :].strip().splitlines()
    assert len(end) < 25, "one screen"
    assert all(f"\n{title}\n" in text for title in ("found", "saves", "costs", "next"))
    for part in ("may run in eight bits", "times need a GPU", "over 2 pairs", "out/report.html", "--verbose"):
        assert part in text
    for command in (line.partition("  ")[0] for line in end if line.startswith("loka ")):
        name, arguments_of = typer.main.get_command(app.app).commands[command.split()[1]], command.split()[2:]
        assert name.make_context(command, arguments_of).params, command
    details = (tmp_path / "out" / "details.txt").read_text()
    assert text.count("mods: 20 modules changed, 1 kept, by NoBias, BlockNorm, HardSwish\n") == 1
    assert "logit          kept: a prediction layer with 1 outputs" in details
    for part in ("Plan for DLRM", "FP8 GEMMs that ran", "paired difference", "mean of 2 pairs", "calibration"):
        assert part in details
        assert part not in text or part == "calibration"
    assert "never ran" not in details
    for page in (tmp_path / "out" / "report.html", tmp_path / "out" / "dlrm" / "report.html"):
        assert page.read_text().startswith("<!doctype html>")
    assert 'href="dlrm/report.html"' in (tmp_path / "out" / "report.html").read_text()
    made = tmp_path / "out" / "dlrm"
    assert {"stats", "report.json", "plan.json", "train.json"} <= {p.name for p in made.iterdir()}
    content = json.loads((made / "train.json").read_text())["content"]
    assert len(content["pairs"]) == 2
    assert content["pairs"][0]["fp8"]["runs"]
    again = loka(*arguments, "--verbose", cwd=tmp_path)
    assert again.endswith("\n".join(end) + "\n")
    assert "paired difference" in again
    assert (tmp_path / "out" / "details.txt").read_text() == details
    assert json.loads((made / "train.json").read_text())["content"]["pairs"] == content["pairs"]
    other = loka("demo", "--model", "dlrm", "--rows", 4000, "--out", "out", cwd=tmp_path, fails=True)
    assert "holds another demo" in other
    assert "rows: 3000 there, 4000 now" in other


def test_a_demo_of_another_model_of_that_name_is_refused(net, tmp_path, monkeypatch):
    """Runs, statistics and plan of the one before were taken for its own."""
    monkeypatch.setattr(demo, "measure", measure_coarsely)
    command = ("demo", "--model", net, *SMALL, "--pairs", 1, "--out", "out")
    loka(*command, cwd=tmp_path)
    file = tmp_path / "mine.py"
    file.write_text(file.read_text().replace("37", "38 "))  # of another length: bytecode goes by it
    del sys.modules["mine"]
    importlib.invalidate_caches()
    text = " ".join(loka(*command, cwd=tmp_path, fails=True).split())
    assert "a.weight: torch.float32 (37, 13)" in text
    assert "torch.float32 (38, 13)" in text


@pytest.mark.parametrize(
    "wrong",
    [
        ("probe", "--rows", 1),
        ("probe", "--batch-size", 0),
        ("probe", "--device", "tpu"),
        ("probe", "--model", "math:pi"),
        ("probe", "--model", ":x"),
        ("demo", "--pairs", -1),
        ("plan", "absent.json"),
        ("measure", "absent"),
        ("doctor", "--target", "hopper"),
    ],
    ids=str,
)
def test_mistakes_are_answered_with_a_message(wrong, tmp_path):
    assert loka(*wrong, cwd=tmp_path, fails=True).strip()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("a\rb\x08c\x7f\x9b31m", r"a\rb\x08c\x7f\x9b31m"),
        ("\u202eeslaf\u2066\u2028", r"\u202eeslaf\u2066\u2028"),
        ("\ud800", r"\ud800"),
        ("two\nlines\tand mläöüß 中文 ≤ →", "two\nlines\tand mläöüß 中文 ≤ →"),
    ],
)
def test_control_characters_are_shown_and_not_sent(text, shown):
    assert printable(text) == shown


def test_names_in_records_cannot_speak_to_the_terminal(measured, tmp_path):
    content = json.loads((measured / "report.json").read_text())["content"]
    evil = "\x1b[2Jtop"
    text = json.dumps(content).replace('"top.', json.dumps(evil)[:-1] + ".")
    path = tmp_path / "report.json"
    write_record(path, kind="loka-report", version=2, content=json.loads(text))
    shown = loka("plan", path, "--min-sqnr-db", 20, "--min-speedup", 0, cwd=tmp_path)
    shown += loka("diff", "plan.json", "plan.json", cwd=tmp_path)
    shown += loka("plan", path, "--force", f"{evil}=x", cwd=tmp_path, fails=True)
    assert "\x1b" not in shown
    assert r"\x1b[2Jtop.0" in shown


def test_every_command_prints_by_way_of_it():
    folder = Path(loka_cli.__file__).parent
    bare = [
        path.name
        for path in folder.rglob("*.py")
        if path.name != "terminal.py" and re.search(r"(?<![\w.])print\b", path.read_text())
    ]
    assert bare == []


def test_commands_that_write_into_a_folder_are_alone_in_it(net, tmp_path):
    with alone_in(tmp_path / "out", "working"):
        for command in (
            ("probe", "--model", net, *SMALL),
            ("bench", "gemm", "--rounds", 9, "--model", "dlrm"),
            ("demo", "--model", net, *SMALL),
        ):
            text = loka(*command, "--out", "out", cwd=tmp_path, fails=2)
            assert "InUse: another process is" in text
            assert "choose another folder" in text
