"""What a line of benchmarks/regions stands for, and what the scripts say where they cannot run."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from forked import run_script

FOLDER = Path(__file__).parents[2] / "benchmarks"
MACHINE = {"device": "cpu", "target": "cpu", "driver": "", "cuda": "", "torch": "2.13.0", "libraries": {}}
RECORD = {
    "cell": "relu_8192x1024", "mode": "autocast", "tiny": True, "machine": MACHINE, "budget": {"min_speedup": 1.0},
    "force": {}, "arms": {}, "us": {"bf16_whole": 10.0, "loka": 5.0}, "speedup": [2.0, 1.9, 2.1], "rounds": 9,
}  # fmt: skip


@pytest.fixture
def printed(tmp_path):
    def run(script, *options):
        path = FOLDER / script
        code = f"""
import runpy, sys
sys.argv, sys.path[:0] = {[str(path), *options]}, [{str(path.parent)!r}]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    print(end.code)
"""
        return run_script(code, name=path.name, cwd=tmp_path, output=tmp_path / "printed")

    return run


def test_a_line_of_other_conditions_stands_for_none_of_these():
    """A table would mix versions, machines and options, and the run would call it done."""
    spec = importlib.util.spec_from_file_location("records", FOLDER / "regions" / "records.py")
    records = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(records)
    assert not records.differences(RECORD, {name: RECORD[name] for name in ("mode", "tiny", "machine", "force")})
    asked = {"machine": {**MACHINE, "torch": "2.14.0", "driver": "other"}, "force": {"*": "hp"}, "candidates": ["new"]}
    assert records.differences(RECORD, asked) == ["torch", "force"]


def test_a_table_says_what_its_lines_were_measured_on(printed, tmp_path):
    machine = {**MACHINE, "device": "NVIDIA H200", "target": "sm_90", "libraries": {"triton": "3.6.0"}}
    other = {**RECORD, "cell": "relu_8192x2048", "machine": machine, "tiny": False, "force": {"*": "hp"}}
    (tmp_path / "out.jsonl").write_text(f"{json.dumps(RECORD)}\n{json.dumps(other)}\n")
    text = printed("regions/regions.py", "--table", "--out", "out.jsonl")
    assert "- NVIDIA H200, torch 2.13.0, triton 3.6.0, autocast, 9 rounds, forced *=hp: relu_8192x2048\n" in text
    assert "9 rounds, tiny, times of a CPU: relu_8192x1024\n" in text
    assert "there is no such file" in printed("regions/regions.py", "--table", "--out", "other.jsonl")


@pytest.mark.parametrize(
    ("script", "options", "told"),
    [
        ("regions/regions.py", ["--device", "gpu"], "say cuda or cpu"),
        ("regions/regions.py", ["--device", "cpu", "--rounds", "0"], "a race takes one round at least"),
        ("regions/regions.py", ["--device", "cpu", "--force", "hp"], "write SITES=CANDIDATE"),
        ("serve/package.py", ["--device", "cpu", "--models", "none"], "unknown: none; known: wukong_2gf, dcnv2_raw"),
        *(
            (script, ["--out", "out.jsonl"], "torch sees no GPU here; --device cpu")
            for script in ("regions/regions.py", "serve/package.py", "distributed/steps.py")
        ),
    ],
)
def test_what_cannot_run_is_told_at_once(printed, script, options, told):
    if "GPU" in told and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    text = printed(script, *options)
    assert told in text
    assert "Traceback" not in text
