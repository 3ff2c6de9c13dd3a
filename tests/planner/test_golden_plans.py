"""The same report gives the same plan, byte for byte: moves and renames must not show in what is planned.

`golden_plans.json` holds, of each case, the SHA-256 of the plan's file and its summary. A change that
is meant to plan otherwise writes it anew and says so: `python tests/planner/test_golden_plans.py`.
"""

import dataclasses
import hashlib
import json
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # also where this runs as a script

from ne_reports import ROW, TENSOR, THREE, costing, effect, model_report, outputs
from reports import layer_report, measured
from test_regions import candidates, cell

import loka
from loka.core.recipe import Gemm
from loka.core.records.report import Report

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden_plans.json"


def layer():
    return layer_report({gemm: candidates() for gemm in Gemm})


def with_region(us):
    return dataclasses.replace(layer(), region_times={"fc": cell(us)})


def stored():
    return Report.load(ROOT / "benchmarks/wukong_step/report.json.xz")


def several():
    gemms = {gemm: {ROW: costing(60, effect(1e-5, 2e-6)), TENSOR: costing(50, effect(4e-5))} for gemm in Gemm}
    return model_report({f"layer{number}": gemms for number in range(5)})


CASES = {
    "measured on an H200": (stored, loka.Budget()),
    "measured on an H200, errors of 20 dB": (stored, loka.Budget(min_sqnr_db=20.0, min_speedup=1.0)),
    "a region wins": (lambda: with_region(165.0), loka.Budget()),
    "a region loses": (lambda: with_region(300.0), loka.Budget()),
    "a layer by itself": (layer, loka.Budget()),
    "a budget of NE": (lambda: outputs(**THREE), loka.Budget(ne=1e-4)),
    "a knapsack of layers": (several, loka.Budget(ne=6e-5)),
    "nothing timed": (
        lambda: layer_report({Gemm.OUTPUT: {ROW: measured(28.0)}, Gemm.GRAD_INPUT: {ROW: measured(20.0)}}),
        loka.Budget(),
    ),
}


def golden(case, folder):
    make, budget = CASES[case]
    plan = loka.plan(make(), budget)
    plan.save(folder / "plan.json")
    return {"sha256": hashlib.sha256((folder / "plan.json").read_bytes()).hexdigest(), "summary": plan.summary()}


@pytest.mark.parametrize("case", CASES)
def test_the_same_report_gives_the_same_plan(case, tmp_path):
    assert golden(case, tmp_path) == json.loads(GOLDEN.read_text())[case]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        found = {case: golden(case, Path(made)) for case in CASES}
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
