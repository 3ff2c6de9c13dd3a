"""FP8 GEMMs by site: in converted layers, chains and cross layers, eager and in a graph."""

from __future__ import annotations

import copy

import pytest
import torch
from sites import convert_layers
from torch import nn

from loka.core.cross import Crossed
from loka.nn import fp8_runs, reset_health
from loka.nn.carried import carried, carry_over, restore_carried
from loka.nn.chain import form_chains
from loka.nn.cross_state import RunningCross
from loka.nn.dataflow import find_chains
from loka.nn.runs import calls_in_a_graph
from loka.zoo.dcn import CrossLayer

CROSSED, CHAINED = ("cross.0.v", "cross.0.u"), ("mlp.0", "mlp.2")


class Net(nn.Module):
    """A stack of cross layers, a chain behind it, and a layer that is converted by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.cross = nn.ModuleList([CrossLayer(32, rank=16)])
        self.mlp = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.side = nn.Linear(16, 16)

    def forward(self, x0: torch.Tensor) -> torch.Tensor:
        x = x0
        for layer in self.cross:
            x = layer(x0, x)
        return self.side(self.mlp(x).sin())


X = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    made = Net()
    found = find_chains(made, X)
    chains = [chain for chain in found.chains if chain.linears == CHAINED]
    form_chains(
        made, [(chain, "e4m3_row", {}) for chain in chains], [(s, "e4m3_row", {}) for s in found.crosses]
    )
    e4m3 = "emulated:tensorwise_e4m3"
    convert_layers(made, {"side": (e4m3, "hp", e4m3)})
    return made


def step(model: nn.Module) -> None:
    model(X).square().mean().backward()


def expected(forward: int, backward: int) -> dict[str, int]:
    found = {"side/output": forward, "side/grad_weight": backward}
    for path in (*CHAINED, *CROSSED):
        found |= {
            f"{path}/output": forward,
            f"{path}/grad_input": backward,
            f"{path}/grad_weight": backward,
        }
    return found


def test_every_gemm_that_ran_is_counted_by_its_site(model: Net) -> None:
    assert fp8_runs(model) == expected(0, 0)
    for _ in range(3):
        step(model)
    with torch.no_grad():
        model(X)
    assert fp8_runs(model) == expected(4, 3)
    copied = copy.deepcopy(model)
    step(copied)
    assert (fp8_runs(copied), fp8_runs(model)) == (expected(5, 4), expected(4, 3))
    reset_health(model)
    assert fp8_runs(model) == expected(0, 0)


def test_served_cross_layers_are_counted(model: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels of a GPU, which are replaced here: what is counted is the call."""
    monkeypatch.setattr(RunningCross, "served", lambda *arguments: ())
    monkeypatch.setattr("loka.nn.cross_ops.cross_serve", lambda x0, *rest, **options: Crossed(hp=x0.clone()))
    with torch.no_grad():
        model(X)
    assert {fp8_runs(model)[f"{path}/output"] for path in CROSSED} == {1}


def test_a_capture_is_counted_with_its_replays(model: Net) -> None:
    step(model)
    with calls_in_a_graph(model) as calls:
        step(model)
    inside = (*CHAINED, *CROSSED)
    assert {fp8_runs(model)[f"{path}/output"] for path in inside} == {1}
    for _ in range(2):
        calls.note_replay()
    for gemm in ("output", "grad_input", "grad_weight"):
        assert {fp8_runs(model)[f"{path}/{gemm}"] for path in inside} == {3}


def test_counts_go_on_where_a_checkpoint_left_them(model: Net) -> None:
    fresh = copy.deepcopy(model)
    for _ in range(2):
        step(model)
    saved = copy.deepcopy(carried(model))
    step(fresh)
    restore_carried(fresh, saved)
    assert fp8_runs(fresh) == expected(2, 2)
    reset_health(fresh)
    carry_over(saved, fresh)
    assert fp8_runs(fresh) == expected(2, 2)
    for state in saved["scales"]:
        del state["runs"]  # as in a checkpoint of before
    reset_health(fresh)
    restore_carried(fresh, saved)
    assert fp8_runs(fresh)["mlp.0/output"] == 0
