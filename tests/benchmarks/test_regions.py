"""benchmarks/regions: what a line of a run stands for, and what its scripts say where they cannot run."""

import json
import sys
from pathlib import Path

import pytest
from forked import run_script

FOLDER = Path(__file__).parents[2] / "benchmarks"

SCRIPT = """
import runpy, sys
sys.argv = {arguments!r}
sys.path.insert(0, str({folder!r}))
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    print(end.code)
"""


@pytest.fixture
def printed(tmp_path):
    def run(script, *options):
        path = FOLDER / script
        code = SCRIPT.format(arguments=[str(path), *map(str, options)], folder=str(path.parent))
        return run_script(code, name=path.name, cwd=tmp_path, output=tmp_path / "printed")

    return run


RECORD = {
    "cell": "relu_8192x1024",
    "mode": "autocast",
    "tiny": True,
    "machine": {"device": "cpu", "target": "cpu", "driver": "", "cuda": "", "torch": "2.13.0+cpu", "libraries": {}},
    "loka": "0.1.0",
    "budget": {"min_speedup": 1.0},
    "force": {},
    "arms": {"bf16_whole": {}, "loka": {}},
    "us": {"bf16_whole": 10.0, "loka": 5.0},
    "speedup": [2.0, 1.9, 2.1],
    "rounds": 9,
    "fatal": False,
}


@pytest.fixture
def records(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER / "regions"))
    import records

    yield records
    del sys.modules["records"]


def test_a_line_of_other_conditions_stands_for_none_of_these(records):
    """A table would mix versions, machines and options, and the run would call it done."""
    same = ("mode", "tiny", "machine", "loka", "budget", "force")
    assert not records.differences(RECORD, {name: RECORD[name] for name in same})
    newer = {**RECORD["machine"], "torch": "2.14.0", "driver": "other"}
    forced = {"force": {"*": "hp"}, "budget": {"min_speedup": 3.0}, "candidates": ["what the line does not say"]}
    assert records.differences(RECORD, {"machine": newer, **forced}) == ["torch", "force", "budget"]


def test_a_table_says_what_its_lines_were_measured_on(printed, tmp_path):
    machine = {**RECORD["machine"], "device": "NVIDIA H200", "target": "sm_90", "libraries": {"triton": "3.6.0"}}
    real = {**RECORD, "cell": "relu_8192x2048", "machine": machine, "tiny": False, "force": {"*": "hp"}}
    (tmp_path / "out.jsonl").write_text(f"{json.dumps(RECORD)}\n{json.dumps(real)}\n")
    text = printed("regions/regions.py", "--table", "--out", "out.jsonl")
    assert "- NVIDIA H200, torch 2.13.0+cpu, triton 3.6.0, autocast, 9 rounds, forced *=hp: relu_8192x2048\n" in text
    assert "tiny: few rows and narrow layers" in text
    assert "tell nothing of a GPU: relu_8192x1024\n" in text
    assert "there is no such file" in printed("regions/regions.py", "--table", "--out", "other.jsonl")


@pytest.mark.parametrize(
    ("script", "options", "told"),
    [
        ("regions/regions.py", ["--device", "gpu"], "is no device that is measured; say cuda or cpu"),
        ("regions/regions.py", ["--device", "cpu", "--rounds", "0"], "a race takes one round at least"),
        ("regions/regions.py", ["--device", "cpu", "--force", "hp"], "write SITES=CANDIDATE"),
        ("serve/package.py", ["--device", "cpu", "--models", "none"], "unknown: none; known: wukong_2gf, dcnv2_raw"),
    ],
)
def test_options_that_mean_nothing_are_told(printed, script, options, told):
    text = printed(script, *options)
    assert told in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    "script", ["regions/regions.py", "serve/package.py", "distributed/steps.py", "distributed/torchrec_steps.py"]
)
def test_without_a_gpu_a_script_says_so_at_once(printed, script):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    text = printed(script, "--out", "out.jsonl")
    assert "torch sees no GPU here; --device cpu" in text
    assert "Traceback" not in text
