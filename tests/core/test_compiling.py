"""A module is compiled whole where it is compiled in its place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loka.core.compiling import compile_in_place, run_as_written
from loka.nn.block_norm import BlockNorm


def tower() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 32), BlockNorm(32, 16), nn.Hardswish(), nn.Linear(32, 16))


def test_a_sequential_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all its operations, forward and backward; `module.compile()` makes one of the norm alone."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **how: compile(call, backend=keep, **how))
    torch._dynamo.reset()
    model, x = tower(), torch.randn(4, 32)
    plain = model(x)
    same = compile_in_place(model)
    assert same is model
    assert torch.equal(model(x), plain)
    assert len(graphs) == 1
    assert str(graphs[0].code).count("linear(") == 2, "both linear layers are in it"
    run_as_written(model)
    assert torch.equal(model(x), plain)
    assert list(model.state_dict()) == list(tower().state_dict())
