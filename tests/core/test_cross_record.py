"""Stacks of cross layers in records: written, read back the same, and refused where they fit no model."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loka.core.budget import Budget
from loka.core.chain import Chain, Epilogue, Link, Norm
from loka.core.cross_record import CrossLink, CrossStack, crosses_from_json
from loka.core.device import Fingerprint
from loka.core.error import Estimate
from loka.core.exceptions import FileRefused
from loka.core.plan import ChainDecision, CrossDecision, Decision, Plan
from loka.core.problem import linear_problem
from loka.core.recipe import Gemm
from loka.core.report import Measurement, Report
from loka.core.signature import LinearShape, ModelSignature
from loka.core.stats import Stats

MODEL = ModelSignature(
    name="Net",
    layers={
        "c.0.v": LinearShape(in_features=64, out_features=16, bias=False),
        "c.0.u": LinearShape(in_features=16, out_features=64, bias=True),
        "c.1.u": LinearShape(in_features=64, out_features=64, bias=False),
        "out": LinearShape(in_features=64, out_features=32, bias=False),
    },
)
STACK = CrossStack(
    joint=True,
    layers=(
        CrossLink(path="c.0", u="c.0.u", v="c.0.v", features=64, rank=16, bias=True),
        CrossLink(path="c.1", u="c.1.u", v=None, features=64, rank=None, bias=False),
    ),
)
CHAIN = Chain(links=(Link(path="out", in_features=64, out_features=32, bias=False),))
H200 = Fingerprint(device="NVIDIA H200", target="sm_90", driver="1", cuda="13.0", torch="2.11.0")
TIMED = Measurement(microseconds=Estimate(80.0, 79.0, 81.0), speedup=Estimate(1.25, 1.2, 1.3), rounds=3)


def a_stats() -> Stats:
    return Stats(model=MODEL, steps=1, sampled_steps=1, layers={}, chains=(CHAIN,), crosses=(STACK,))


def a_report() -> Report:
    return Report(
        model=MODEL,
        machine=H200,
        stats_digest="0",
        settings={},
        sites={},
        chains=(CHAIN,),
        crosses=(STACK,),
        chain_times={"c.0": {"fused:e4m3_row": TIMED}},
    )


def a_plan() -> Plan:
    problem = linear_problem(
        Gemm.OUTPUT, rows=4096, in_features=64, out_features=16, dtype="bfloat16", target="sm_90"
    )
    decided = CrossDecision(
        stack=STACK,
        recipe="e4m3_row",
        candidates={"c.0.u/output": "torch_fast:tensorwise_e4m3"},
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
        decisions={
            "c.0.v/output": Decision(path="c.0.v", problem=problem, candidate="hp", reason="faster alone")
        },
        chains={"out": ChainDecision(chain=CHAIN, recipe="e4m3_row", candidates={}, reason="so")},
        crosses={"c.0": decided},
    )


def test_a_stack_is_read_back() -> None:
    assert STACK.name == "c.0"
    assert STACK.linears == ("c.0.v", "c.0.u", "c.1.u")
    assert CrossStack.from_json(json.loads(json.dumps(STACK.to_json())), MODEL) == STACK


@pytest.mark.parametrize(
    "spoil",
    [
        lambda stack: stack.update(layers=[]),
        lambda stack: stack.pop("joint"),
        lambda stack: stack.update(joint="no"),
        lambda stack: stack["layers"][0].update(u="out"),
        lambda stack: stack["layers"][0].update(v=None),
        lambda stack: stack["layers"][0].update(rank=8),
        lambda stack: stack["layers"][0].update(bias=False),
        lambda stack: stack["layers"][1].update(features=32),
        lambda stack: stack["layers"][1].update(path="c.0"),
        lambda stack: stack["layers"][1].update(u="c.0.u"),
        lambda stack: stack["layers"][1].update(more=1),
    ],
)
def test_what_is_no_stack_of_the_model(spoil: Callable[[dict[str, Any]], Any]) -> None:
    content = copy.deepcopy(STACK.to_json())
    spoil(content)
    with pytest.raises((LookupError, TypeError, ValueError)):
        CrossStack.from_json(content, MODEL)


def test_a_module_is_in_one_of_them_only() -> None:
    with pytest.raises(ValueError, match="a stack of cross layers"):
        crosses_from_json([STACK.to_json(), STACK.to_json()], [], MODEL)
    inside = Chain(links=(Link(path="c.1.u", in_features=64, out_features=64, bias=False),))
    with pytest.raises(ValueError, match="a stack of cross layers"):
        crosses_from_json([STACK.to_json()], [inside], MODEL)
    with pytest.raises(TypeError, match="reader"):
        crosses_from_json([{**STACK.to_json(), "reader": 1}], [], MODEL)


def test_who_reads_a_stack() -> None:
    read = replace(STACK, reader="out")
    assert crosses_from_json([read.to_json()], [CHAIN], MODEL) == (read,)
    older = {name: value for name, value in read.to_json().items() if name != "reader"}
    assert crosses_from_json([older], [CHAIN], MODEL) == (STACK,)
    assert read.feeds(CHAIN)
    assert not STACK.feeds(CHAIN)
    link = CHAIN.links[0]
    as_wide = replace(CHAIN, links=(replace(link, out_features=64),))
    assert not read.feeds(as_wide), "nothing would tell its result from what the stack returns"
    normed = replace(CHAIN, prologue=Epilogue(norm=Norm.LAYER), members=("norm",))
    assert not replace(STACK, reader="norm").feeds(normed), "a norm reads more than FP8"


def test_records_with_stacks(tmp_path: Path) -> None:
    a_stats().save(tmp_path / "stats")
    assert Stats.load(tmp_path / "stats") == a_stats()
    assert replace(a_stats(), crosses=()).digest() != a_stats().digest()
    a_report().save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == a_report()
    a_plan().save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == a_plan()
    line = "cross layers c.0: 2 layers, 4096 rows, e4m3_row, 80.0 us, hp 100.0 us, 1.25x: 1.25x as a whole"
    assert line in str(a_plan()).splitlines()


def test_times_of_a_stack_that_is_not_there(tmp_path: Path) -> None:
    replace(a_report(), crosses=()).save(tmp_path / "report.json")
    with pytest.raises(FileRefused, match="chains that are not there"):
        Report.load(tmp_path / "report.json")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda plan: plan["crosses"].update(c=plan["crosses"].pop("c.0")), "begins at c.0"),
        (
            lambda plan: plan["crosses"]["c.0"]["candidates"].update({"out/output": "hp"}),
            "no site out/output",
        ),
        (lambda plan: plan["crosses"]["c.0"]["candidates"].update({"c.1.u/output": "fast"}), "no candidate"),
        (lambda plan: plan["crosses"]["c.0"].update(reason=None), "lacks its recipe"),
        (lambda plan: plan["chains"]["out"]["chain"].update(members=["c.1"]), "a module is in two"),
    ],
)
def test_what_is_no_decision(spoil: Callable[[dict[str, Any]], Any], message: str) -> None:
    content = copy.deepcopy(a_plan().to_json())
    spoil(content)
    with pytest.raises(ValueError, match=message):
        Plan.from_json(content)
