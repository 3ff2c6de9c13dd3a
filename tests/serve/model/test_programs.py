"""A frozen model's call as one graph (serve/model/traced.py), and which calls share what is compiled (programs.py)."""

import logging

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from loka.core.exceptions import ServeRefused
from loka.serve.model.programs import Programs
from loka.serve.rows import form_of
from loka.serve.run import Runner

COMPILE = torch.compile
ROWS = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def graphs(monkeypatch):
    """What Inductor would compile; it runs op by op."""
    found = []

    def keep(graph, inputs):
        found.append(graph)
        return graph

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", keep)
    monkeypatch.setattr("torch.compile", lambda function, **_: found.append("dynamo") or function)
    return found


def programs(model, autocast=None, rows=ROWS):
    return Programs(model.eval(), Runner(form=form_of(rows), autocast=autocast), {})


def answers(program, model, rows=ROWS):
    return program.call([rows])(), programs(model)._run(model, [rows])


class Mixed(nn.Module):
    """Numbers, tables and buffers made and held in every way, one of them under two names."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.randn(8), persistent=False)
        self.table = torch.randn(4, 8)

    def forward(self, x):
        y = self.second(torch.relu(self.first(x * torch.tensor(2.0)) + self.shift)) + self.table[1]
        return {"all": (y, x), "weight": self.first.weight[:2], "one": [y.sum(dim=1) if len(x) > 4 else y[:, 0]]}


def same(found, wanted):
    assert torch.equal(found["all"][0], wanted["all"][0])
    assert torch.equal(found["all"][1], wanted["all"][1])
    assert torch.equal(found["weight"], wanted["weight"])
    assert torch.equal(found["one"][0], wanted["one"][0])


@torch.no_grad()
def test_each_number_of_rows_is_traced_once_and_reads_the_tensors_of_its_call(graphs):
    model = Mixed()
    program = programs(model)
    for _ in range(2):
        for count in (6, 3):
            same(*answers(program, model, ROWS[:count]))
        model.first.weight = model.second.weight = nn.Parameter(torch.randn(8, 8))
        model.shift = torch.randn(8)
        model.second.load_state_dict(model.second.state_dict() | {"bias": torch.randn(8)})
    assert len(graphs) == 2


@torch.no_grad()
@pytest.mark.parametrize("change", ["parted", "turned", "wider"])
def test_tensors_of_another_kind_are_traced_anew(graphs, change):
    """A weight of two names that are two weights now would be read by one of them for both."""
    model = Mixed()
    program = programs(model)
    same(*answers(program, model))
    if change == "parted":
        model.second.weight = nn.Parameter(torch.randn(8, 8))
    elif change == "turned":
        model.first.weight = model.second.weight = nn.Parameter(torch.randn(8, 8).t())
    else:
        model.double()
        program._run = programs(model, rows=ROWS.double())._run
    rows = ROWS.double() if change == "wider" else ROWS
    model.table = model.table.to(rows.dtype)
    same(*answers(program, model, rows))
    assert len(graphs) == 2


@torch.no_grad()
def test_autocast_is_in_the_graph_once(graphs):
    """`pow` runs in float32 under autocast: compiled under it again, the cast back to bfloat16 would be lost."""

    class Powers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            y = self.layer(x)
            return y, y.pow(2), y.pow(2).to(y.dtype) * y

    model = Powers()
    program = programs(model, autocast=torch.bfloat16)
    for found, wanted in zip(program.call([ROWS])(), program._run(model, [ROWS]), strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


class Warm(nn.Module):
    """Divides by its temperature."""

    def __init__(self, way):
        super().__init__()
        self.way, self.temperature = way, nn.Parameter(torch.tensor([2.0]))

    def forward(self, x):
        if self.way == "number":
            return x / float(self.temperature)
        if self.way == "parameter":
            return x / nn.Parameter(self.temperature, requires_grad=False)
        return x / (self.temperature if type(x) is torch.Tensor else 3.0)


@torch.no_grad()
@pytest.mark.parametrize(("way", "compiled_by"), [("number", "dynamo"), ("parameter", "trace"), ("type", "dynamo")])
def test_no_weight_is_a_constant_and_code_that_sees_the_trace_is_not_traced(graphs, way, compiled_by):
    model = Warm(way)
    program = programs(model)
    assert torch.equal(*answers(program, model))
    model.temperature.copy_(20.0)
    assert torch.equal(*answers(program, model))
    assert (graphs == ["dynamo"]) == (compiled_by == "dynamo")


@torch.no_grad()
def test_what_modules_keep_for_later_calls_has_values(graphs):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.masks = {}

        def forward(self, x):
            if len(x) not in self.masks:
                self.masks[len(x)] = torch.ones(len(x), 1)
            return x * self.masks[len(x)]

    model = Masked()
    program = programs(model)
    for _ in range(2):
        assert torch.equal(*answers(program, model))
    assert type(model.masks[6]) is torch.Tensor
    assert len(graphs) == 1


@torch.no_grad()
def test_a_callers_autocast_changes_nothing(graphs):
    model = nn.LSTM(8, 8, batch_first=True)
    program = programs(model, rows=ROWS[:, None])
    with torch.autocast("cpu", torch.bfloat16):
        found = program.call([ROWS[:, None]])()[0]
    assert found.dtype == torch.float32
    assert torch.equal(found, model(ROWS[:, None])[0])


@torch.no_grad()
def test_a_weight_that_forward_renews_is_one_argument(graphs):
    model = nn.Embedding(16, 8, max_norm=0.5)
    ids = torch.arange(6)
    program = programs(model, rows=ids)
    assert torch.equal(*answers(program, model, ids))
    assert len(graphs[0].graph.find_nodes(op="placeholder")) == 2


class Written(nn.Module):
    def forward(self, x):
        return x * float(x[0, 0].numpy())


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = COMPILE(nn.Linear(8, 8), backend="eager")

    def forward(self, x):
        return self.inner(x).relu()


@torch.no_grad()
def test_what_needs_values_is_compiled_by_dynamo(graphs, caplog):
    model = Written()
    program = programs(model)
    with caplog.at_level(logging.INFO, "loka.serve"):
        for count in (6, 3):
            found, wanted = answers(program, model, ROWS[:count])
            assert torch.equal(found, wanted)
    assert graphs == ["dynamo"]
    assert len(caplog.messages) == 1
    assert "Dynamo compiles the model" in caplog.text


@torch.no_grad()
def test_a_compiled_child_answers_as_it_does_by_itself(graphs):
    model = Nested()
    program = programs(model)
    for count in (6, 3):
        assert torch.equal(*answers(program, model, ROWS[:count]))


@torch.no_grad()
def test_refusals_of_loka_are_not_tried_again(graphs):
    class Refusing(nn.Module):
        def forward(self, x):
            raise ServeRefused("never reached", way_out="none")

    with pytest.raises(ServeRefused, match="never reached"):
        programs(Refusing()).call([ROWS])
    assert not graphs


@torch.no_grad()
def test_programs_come_from_the_cache():
    """Of a linear layer alone, for which no kernel is compiled."""
    model = nn.Linear(32, 32)
    x = torch.randn(7, 32)
    with fresh_cache():
        for hits in (0, 2):
            counters.clear()
            program = programs(model, rows=x)
            for count in (4, 7):  # 32 terms of 0.1
                torch.testing.assert_close(program.call([x[:count]])(), model(x[:count]), atol=1e-5, rtol=0.0)
            assert counters["aot_autograd"]["autograd_cache_hit"] == hits
            assert not counters["stats"]["unique_graphs"]
