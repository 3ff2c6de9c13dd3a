"""Timing a stack of cross layers: what is built from its record, and what races."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch
from timers import FakeTimer, install

import loka
from loka.core.cross_record import CrossLink, CrossStack
from loka.core.error import sqnr_db
from loka.core.stats import LinearStats
from loka.nn.chain import form_chains
from loka.nn.dataflow import find_chains
from loka.probe import Settings, chain_times, cross_times
from loka.probe.cross_times import build_stack, stack_key, time_stack
from loka.zoo import build

pytestmark = pytest.mark.usefixtures("forced_fusion")

STACK = CrossStack(
    joint=True,
    layers=(
        CrossLink(path="net.a", u="net.a.up", v="net.a.down", features=48, rank=16, bias=True),
        CrossLink(path="net.b", u="net.b.up", v=None, features=48, rank=None, bias=False),
    ),
)
LINEAR = LinearStats(
    rows=32, calls=1, order=0, dtype="float32", weight_dtype="float32", needs_input_grad=True,
    needs_weight_grad=True, operands={},
)  # fmt: skip
LAYERS = dict.fromkeys(STACK.linears, LINEAR)


@pytest.fixture(autouse=True)
def _traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """hp is traced, forward and backward, as inductor has it, whose C++ would be compiled for seconds."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


@pytest.mark.parametrize("joint", [True, False])
def test_what_is_built_is_the_stack_and_can_be_formed(joint: bool) -> None:
    stack = replace(STACK, joint=joint)
    model, renamed, sites = build_stack(stack, torch.device("cpu"), torch.float32)
    xs = [torch.randn(32, 48) for _ in range(1 if joint else 2)]
    assert find_chains(model, *xs).crosses == (renamed,)
    assert sites["net.b.up/grad_input"] == "cross.1.u/grad_input"
    plain = copy.deepcopy(model)
    form_chains(model, [], [(renamed, "e4m3_row", {})])
    # Four FP8 operands and two, of 31.5 dB each, a part of what they make: 31.5 - 10 log10(6) = 23.7.
    assert sqnr_db(model(*xs).detach(), plain(*xs).detach()) >= 23


def test_hp_races_the_fused_path(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = FakeTimer({"fused:e4m3_row": 50.0})
    monkeypatch.setattr(chain_times, "time_interleaved", timer)
    kernels = {"fused:e4m3_row": {"net.a.up/output": "emulated:tensorwise_e4m3"}}
    times = time_stack(STACK, LAYERS, kernels, device=torch.device("cpu"), settings=Settings())
    assert timer.races == [["hp", "fused:e4m3_row"]]
    assert times["fused:e4m3_row"].speedup.value == pytest.approx(2.0, rel=0.05)
    assert "e4m3_row only" in times["fused:e5m2_tensor"].unsupported


def test_a_kernel_that_cannot_run_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_times, "time_interleaved", FakeTimer())
    kernels = {"fused:e4m3_row": {"net.a.up/output": "emulated:rowwise_e4m3"}}
    times = time_stack(STACK, LAYERS, kernels, device=torch.device("cpu"), settings=Settings())
    assert "cannot run cross.0.u/output" in times["fused:e4m3_row"].unsupported


def test_equal_shapes_share_their_times() -> None:
    renamed = [
        replace(layer, path=f"x.{place}", u=f"x.{place}.u", v=layer.v and f"x.{place}.v")
        for place, layer in enumerate(STACK.layers)
    ]
    other = replace(STACK, layers=tuple(renamed))
    layers = dict.fromkeys(other.linears, LINEAR)
    assert stack_key(STACK, LAYERS, {}) == stack_key(other, layers, {})
    assert stack_key(STACK, LAYERS, {}) != stack_key(replace(STACK, joint=False), LAYERS, {})
    kernels = {"fused:e4m3_row": {"net.a.up/output": "emulated:tensorwise_e4m3"}}
    assert stack_key(STACK, LAYERS, {}) != stack_key(STACK, LAYERS, kernels)


def test_measuring_times_stacks_beside_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = build("dcnv2", dense_features=13, vocab_sizes=[9] * 3, size="small")
    with loka.Probe(model) as probe:
        model(torch.randn(32, 13), torch.zeros(32, 3, dtype=torch.int64)).sum().backward()
    install(monkeypatch, FakeTimer({"fused:e4m3_row": 50.0}), wholes=True)
    whole: list[torch.nn.Module] = []
    for module in (chain_times, cross_times):
        monkeypatch.setattr(module, "compile_in_place", lambda part: whole.append(part) or part)
    names = ["emulated:tensorwise_e4m3", "emulated:rowwise_e4m3"]
    report = loka.measure(probe.stats(), device="cpu", candidates=names, settings=Settings(max_draws=4))
    assert report.complete, report.notes
    assert whole, "what is in high precision is compiled"
    times = report.chain_times["cross.0"]
    assert times["fused:e4m3_row"].microseconds.value == pytest.approx(50.0, rel=0.01)
    assert times["hp"].microseconds.value == pytest.approx(100.0, rel=0.01)
    # Formed with what was fastest of the measured kernels that take scales of tensors.
    plan = loka.plan(report, loka.Budget(chains="always"))
    inside = plan.crosses["cross.0"].candidates
    assert len(inside) == 12
    assert set(inside.values()) == {"emulated:tensorwise_e4m3"}
