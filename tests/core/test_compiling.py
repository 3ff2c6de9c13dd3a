import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from loka.core.compiling import compile_in_place, compiled_by_rows, new_frame, run_as_written
from loka.nn.block_norm import BlockNorm


def tower():
    return nn.Sequential(nn.Linear(32, 32), BlockNorm(32, 16), nn.Hardswish(), nn.Linear(32, 16))


@pytest.fixture
def graphs(monkeypatch):
    found = []

    def keep(graph, inputs):
        found.append(graph)
        return graph

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **how: compile(call, backend=keep, **how))
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


def test_a_sequential_is_one_graph(graphs):
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


def test_however_many_came_before(graphs):
    """Dynamo compiles eight different modules in one frame, and runs the others as written."""
    for width in range(12):
        compile_in_place(nn.Linear(8, 8 + width))(torch.randn(2, 8))
        assert len(graphs) == width + 1


def test_alike_modules_share_a_frame_that_they_are_given(graphs):
    frame, x = new_frame(), torch.randn(4, 32)
    for _ in range(3):
        model = tower()
        plain = model(x)
        assert torch.equal(compile_in_place(model, frame)(x), plain), "with its own weights"
    assert len(graphs) == 1


class Branching(nn.Module):
    def forward(self, x, y):
        return x.neg() * y if x.shape[0] > 8 else x.abs() * y


@torch.no_grad()
def test_a_trace_is_compiled_for_each_number_of_rows(monkeypatch):
    found = []

    def keep(graph, inputs):
        found.append((str(graph.code), inputs))
        return graph

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", keep)
    torch._dynamo.reset()
    model = Branching()
    call = compiled_by_rows(model)
    for rows in (1, 12, 4, 9, 7, 12):
        x, y = torch.randn(rows, 32), torch.randn(rows, 1)
        assert torch.equal(call(x, y=y), model(x, y))
    assert ["neg" in code for code, _ in found] == [False, True, False, True, False]
    assert all(type(side) is int for _, inputs in found for value in inputs for side in value.shape)


@torch.no_grad()
@pytest.mark.parametrize("several", [True, False])
def test_of_one_number_of_rows_the_trace_holds_it(several, monkeypatch):
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, inputs: graph)
    torch._dynamo.reset(), counters.clear()
    model = Branching()
    call = compiled_by_rows(model, several=several)
    for rows in (12, 9, 12, 4):
        x, y = torch.randn(rows, 32), torch.randn(rows, 1)
        assert torch.equal(call(x, y=y), model(x, y))
    assert counters["stats"]["unique_graphs"] == (2 if several else 3)


@torch.no_grad()
def test_numbers_of_rows_come_from_the_cache():
    """Of a linear layer alone, for which no kernel is compiled."""
    model, x = nn.Linear(32, 32), torch.randn(7, 32)
    with fresh_cache():
        for hits in (0, 2):
            torch._dynamo.reset(), counters.clear()
            call = compiled_by_rows(model)
            assert all(torch.allclose(call(x[:n]), model(x[:n]), atol=1e-5) for n in (4, 7))  # 32 terms of 0.1
            assert counters["aot_autograd"]["autograd_cache_hit"] == hits
