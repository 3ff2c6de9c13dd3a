"""Chains in records: written, read back the same, and refused where they fit no model."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loka.core.budget import Budget
from loka.core.chain import Activation, Chain, Epilogue, Link, Norm, chains_from_json
from loka.core.device import Fingerprint
from loka.core.error import Estimate
from loka.core.exceptions import FileRefused
from loka.core.files import read_record, write_record
from loka.core.plan import ChainDecision, Decision, Plan
from loka.core.problem import linear_problem
from loka.core.recipe import Gemm
from loka.core.report import Measurement, Report
from loka.core.signature import LinearShape, ModelSignature

MODEL = ModelSignature(
    name="Net",
    layers={
        "a": LinearShape(in_features=16, out_features=32, bias=False),
        "b": LinearShape(in_features=32, out_features=64, bias=True),
    },
)
CHAIN = Chain(
    prologue=Epilogue(norm=Norm.LAYER, eps=1e-5, gamma=True, beta=True),
    members=("norm",),
    links=(
        Link(
            path="a",
            in_features=16,
            out_features=32,
            bias=False,
            epilogue=Epilogue(norm=Norm.BLOCK, block=8, eps=1e-6, activation=Activation.HARD_SWISH),
            members=("n", "act"),
        ),
        Link(path="b", in_features=32, out_features=64, bias=True),
    ),
)
H200 = Fingerprint(device="NVIDIA H200", target="sm_90", driver="1", cuda="13.0", torch="2.11.0")
TIMED = Measurement(
    errors={"sqnr_db": Estimate(25.0, 24.0, 26.0)},
    microseconds=Estimate(80.0, 79.0, 81.0),
    speedup=Estimate(1.25, 1.2, 1.3),
    rounds=3,
)


def a_report() -> Report:
    return Report(
        model=MODEL,
        machine=H200,
        stats_digest="0",
        settings={},
        sites={},
        chains=(CHAIN,),
        chain_times={"a": {"fused:e4m3_row": TIMED, "fused:e4m3": Measurement(unsupported="too narrow")}},
    )


def a_plan() -> Plan:
    problem = linear_problem(
        Gemm.OUTPUT, rows=4096, in_features=16, out_features=32, dtype="bfloat16", target="sm_90"
    )
    decision = Decision(path="a", problem=problem, candidate="hp", reason="faster alone")
    decided = ChainDecision(
        chain=CHAIN,
        recipe="e4m3_row",
        candidates={"a/output": "cublaslt:rowwise_e4m3", "b/grad_weight": "hp"},
        reason="1.25x as a whole",
        microseconds=Estimate(80.0, 79.0, 81.0),
        hp_microseconds=Estimate(100.0, 99.0, 101.0),
        speedup=Estimate(1.25, 1.2, 1.3),
    )
    return Plan(
        model=MODEL,
        machine=H200,
        budget=Budget(),
        timed=True,
        decisions={"a/output": decision},
        chains={"a": decided},
    )


def test_a_chain_is_read_back() -> None:
    content = json.loads(json.dumps(CHAIN.to_json()))
    assert Chain.from_json(content, MODEL) == CHAIN


@pytest.mark.parametrize(
    "spoil",
    [
        lambda chain: chain.update(links=[]),
        lambda chain: chain["links"].reverse(),
        lambda chain: chain["links"][0].update(path="c"),
        lambda chain: chain["links"][0].update(bias=True),
        lambda chain: chain["links"][1].update(members=["act"]),
        lambda chain: chain["links"][1].update(more=1),
        lambda chain: chain["links"][0]["epilogue"].update(block=0),
        lambda chain: chain["links"][0]["epilogue"].update(norm="batch"),
        lambda chain: chain["prologue"].update(eps=-1.0),
        lambda chain: chain["prologue"].update(activation="tanh"),
        lambda chain: chain.pop("members"),
    ],
)
def test_what_is_no_chain_of_the_model(spoil: Callable[[dict[str, Any]], Any]) -> None:
    content = copy.deepcopy(CHAIN.to_json())
    spoil(content)
    with pytest.raises((LookupError, TypeError, ValueError)):
        Chain.from_json(content, MODEL)


def test_a_module_is_in_one_chain_only() -> None:
    with pytest.raises(ValueError, match="two chains"):
        chains_from_json([CHAIN.to_json(), CHAIN.to_json()], MODEL)


def test_a_report_with_chains(tmp_path: Path) -> None:
    report = a_report()
    report.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == report


def test_times_of_a_chain_that_is_not_there(tmp_path: Path) -> None:
    replace(a_report(), chains=()).save(tmp_path / "report.json")
    with pytest.raises(FileRefused, match="chains that are not there"):
        Report.load(tmp_path / "report.json")


def test_a_plan_with_chains(tmp_path: Path) -> None:
    plan = a_plan()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    text = str(plan).splitlines()
    assert "chain a: 2 layers, 4096 rows, e4m3_row, 80.0 us, hp 100.0 us, 1.25x: 1.25x as a whole" in text
    assert any(line.startswith("a/output") for line in text)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda chains: chains.update(b=chains.pop("a")), "begins at a"),
        (lambda chains: chains["a"]["candidates"].update({"c/output": "hp"}), "no site c/output"),
        (lambda chains: chains["a"]["candidates"].update({"a/output": "fast"}), "no candidate"),
        (lambda chains: chains["a"].update(recipe=None), "lacks its recipe"),
    ],
)
def test_what_is_no_decision(spoil: Callable[[dict[str, Any]], Any], message: str) -> None:
    content = copy.deepcopy(a_plan().to_json())
    spoil(content["chains"])
    with pytest.raises(ValueError, match=message):
        Plan.from_json(content)


def test_files_from_before_there_were_chains(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    for record, kind, fields in (
        (a_report(), "loka-report", ("chains", "crosses", "chain_times")),
        (a_plan(), "loka-plan", ("chains", "crosses")),
    ):
        record.save(path)
        content = read_record(path, kind=kind, version=2, way_out="", parse=dict)
        for name in fields:
            del content[name]
        write_record(path, kind=kind, version=2, content=content)
        assert not type(record).load(path).chains
        assert not type(record).load(path).crosses
