"""Edges read the inputs of a concatenation where these lie, and compute what they compute from it written."""

import copy
from unittest import mock

import pytest
import torch
from converted import converted, plan_for
from joint import JointBackend
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from loka.compiler.edges.parts import read_in_parts
from loka.compiler.emit import SIZE, Emitter
from loka.kernels.edge.op import edge
from loka.kernels.edge.program import Kind, Program, Step, in_parts, program_of

aten = torch.ops.aten


class Crossed(nn.Module):
    """Cross layers over what `joined` makes of dense features and of fields."""

    def __init__(self, joined, features=64, bottom=16):
        super().__init__()
        self.joined = joined
        self.bottom = nn.Linear(8, bottom)
        self.first, self.second = nn.Linear(features, features), nn.Linear(features, features)
        self.top = nn.Linear(features, 16)

    def forward(self, dense, fields):
        x_0 = self.joined(self.bottom(dense).relu(), fields)
        x = x_0 * self.first(x_0) + x_0
        return self.top(x_0 * self.second(x) + x)


class Once(Crossed):
    """A cast alone reads it."""

    def forward(self, dense, fields):
        return self.top(self.first(self.joined(self.bottom(dense).relu(), fields)).relu())


def as_torchrec(bottom, fields):
    return torch.cat([bottom.unsqueeze(1), fields], dim=1).flatten(1)


def flat(bottom, fields):
    return torch.cat([fields.flatten(1), bottom], dim=-1)


def in_three(bottom, fields):
    return torch.cat([fields[:, 0], bottom, fields[:, 1:].flatten(1)], dim=1)


class Changing(Crossed):
    """Changes in place what it has concatenated."""

    def __init__(self, changed):
        super().__init__(in_three)
        self.changed = changed
        self.register_buffer("state", inputs_of()[1])

    def forward(self, dense, fields):
        fields = self.state if self.changed == "buffer" else fields
        y = super().forward(dense, fields)
        with torch.no_grad():
            if self.changed == "another buffer":
                self.state.copy_(fields)
            else:
                (fields[:, 1] if self.changed == "part of an input" else fields).mul_(-1)
        return y


WIDTHS = {as_torchrec: (16, 48), flat: (48, 16), in_three: (16, 16, 32)}


def ran(model, inputs, *, trained):
    """What a compiled model answers and its gradients, and the backend."""
    inputs = [x.detach().clone().requires_grad_(trained) for x in inputs]
    backend = JointBackend()
    model = copy.deepcopy(model)
    with torch.set_grad_enabled(trained), torch.autocast("cpu", torch.bfloat16):
        y = torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    if trained:
        y.float().square().sum().backward()
    grads = [x.grad for x in (*inputs, *model.parameters()) if x.grad is not None]
    return [y, *grads], backend


def inputs_of(rows=24):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 3, 16, generator=generator).bfloat16()


def parts_read(backend):
    """Of each edge that reads parts, how wide they are."""
    edges = [node for graph in backend.graphs for node in graph.nodes if node.target is edge]
    found = [program_of(node.args[-1]).widths for node in edges]
    return [widths for widths in found if widths]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("joined", WIDTHS, ids=lambda joined: joined.__name__)
def test_a_concatenation_is_not_written(joined, trained):
    inputs, plain = inputs_of(), Crossed(joined)
    model = converted(plain, plan_for(plain, *inputs))
    found, backend = ran(model, inputs, trained=trained)
    assert backend.count(aten.cat.default) == 0
    assert set(parts_read(backend)) == {WIDTHS[joined]}
    assert len(parts_read(backend)) >= (5 if trained else 3)
    with mock.patch("loka.compiler.lower.read_in_parts"):
        expected, written = ran(model, inputs, trained=trained)
    assert written.count(aten.cat.default) == 1
    assert not parts_read(written)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_what_something_else_reads_is_written():
    inputs, plain = inputs_of(), Crossed(lambda *both: as_torchrec(*both))
    plain.top = nn.Linear(64, 1, bias=False)
    read_besides = lambda m, given, y: y + as_torchrec(m.bottom(given[0]).relu(), given[1]).cumsum(1)  # noqa: E731
    plain.register_forward_hook(read_besides)
    model = converted(plain, plan_for(plain, *inputs))
    _, backend = ran(model, inputs, trained=False)
    assert backend.count(aten.cat.default) >= 1
    assert not parts_read(backend)


@pytest.mark.parametrize("changed", ["input", "part of an input", "buffer", "another buffer"])
def test_what_the_model_changes_afterwards_is_written(changed):
    """Backward would read what has been written there since."""
    inputs, plain = inputs_of(), Changing(changed)
    model = converted(plain, plan_for(plain, *inputs))
    found, backend = ran(model, inputs, trained=True)
    assert bool(parts_read(backend)) is (changed == "another buffer")
    with mock.patch("loka.compiler.lower.read_in_parts"):
        expected, _ = ran(model, inputs, trained=True)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_what_is_computed_anyway_is_written_where_it_is_computed():
    """The kernel that computes the parts writes them into the concatenation, for nothing."""
    inputs, plain = inputs_of(), Crossed(lambda bottom, fields: flat(bottom, fields.sin()))
    model = converted(plain, plan_for(plain, *inputs))
    _, backend = ran(model, inputs, trained=False)
    assert backend.count(aten.cat.default) == 1
    assert not parts_read(backend)


def test_parts_are_read_as_they_were_before_a_cast():
    """Autocast casts fields in bfloat16 to float32 where it joins them with what is in float32."""
    for joined, count in (
        (lambda bottom, fields: as_torchrec(bottom.float(), fields), 5),
        (lambda bottom, fields: torch.cat([bottom.float(), *[fields[:, 0]] * 3], dim=1), 0),
    ):
        inputs, plain = inputs_of(), Crossed(joined)
        model = converted(plain, plan_for(plain, *inputs))
        found, backend = ran(model, inputs, trained=True)
        assert len(parts_read(backend)) == count
        with mock.patch("loka.compiler.lower.read_in_parts"):
            expected, _ = ran(model, inputs, trained=True)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)


OTHERS = {
    "rows": lambda bottom, fields: torch.cat([flat(bottom, fields)[:12], flat(bottom, fields)[12:]]),
    "pairs of rows": lambda _, fields: torch.cat([x.flatten(1) for x in (fields[:, :2], fields[:, 1:])]).view(-1, 64),
    "quarters of rows": lambda bottom, fields: flat(bottom, fields).view(-1, 16),
    "many": lambda bottom, fields: torch.cat([bottom, *fields.flatten(1).split(4, dim=1)], dim=1),
    "twice": lambda bottom, fields: torch.cat([fields[:, :2].flatten(1)] * 2, dim=1),
    "a piece of what is computed": lambda bottom, fields: torch.cat(
        [bottom[:, :8], bottom[:, 8:], fields.flatten(1)], 1
    ),
    "pieces of it": lambda bottom, fields: torch.cat([*bottom.split(8, dim=1), fields.flatten(1)], dim=1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_concatenations_stay(name):
    inputs, plain = inputs_of(), Crossed(OTHERS[name], features=16 if name == "quarters of rows" else 64)
    model = converted(plain, plan_for(plain, *inputs))
    _, backend = ran(model, inputs, trained=False)
    assert not parts_read(backend)


@pytest.mark.parametrize(("joined", "features"), [(flat, 64), (OTHERS["quarters of rows"], 16)])
def test_a_cast_alone_reads_parts_of_its_own_rows(joined, features):
    inputs, plain = inputs_of(), Once(joined, features=features)
    model = converted(plain, plan_for(plain, *inputs))
    _, backend = ran(model, inputs, trained=False)
    assert parts_read(backend) == [(48, 16)] * (features == 64)


def test_integers_among_floats_are_rounded_as_a_concatenation_rounds_them():
    dense, _ = inputs_of()
    inputs, plain = (dense, torch.randint(1000, (24, 3, 16), dtype=torch.int32)), Crossed(flat)
    model = converted(plain, plan_for(plain, *inputs))
    _, backend = ran(model, inputs, trained=False)
    assert backend.count(aten.cat.default) == 1
    assert not parts_read(backend)


@pytest.mark.parametrize("trained", [False, True])
def test_rows_that_are_padded_in_parts(trained):
    """Of 56 features a copy in FP8 has 64 columns."""
    inputs, plain = inputs_of(), Crossed(flat, features=56, bottom=8)
    model = converted(plain, plan_for(plain, *inputs))
    found, _ = ran(model, inputs, trained=trained)
    with mock.patch("loka.compiler.lower.read_in_parts"):
        expected, _ = ran(model, inputs, trained=trained)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("joined", "kind"),
    [
        (lambda a, b, _: torch.cat([a[0], b[0]]), Kind.ROW),  # a bias
        (lambda a, b, c: torch.cat([a, b, c], dim=1).view(8, 8), Kind.FULL),  # two rows in each
        (lambda a, b, _: torch.cat([a.view(2, 6), b[:2], b[2:]], dim=1).view(4, 8), Kind.FULL),
        (lambda _, __, c: torch.cat([c, c], dim=1).view(8, 8), Kind.FULL),
        (lambda a, b, _: torch.cat([a, b], dim=1).expand(2, 4, 8), Kind.FULL),
        (lambda a, b, _: torch.cat([a, b], dim=1).bfloat16(), Kind.FULL),  # rounded
    ],
)
def test_what_is_read_as_another_matrix_is_written(joined, kind):
    program = Program(
        features=8, block=8, leaves=(Kind.FULL, kind), steps=(Step("add", (0, 1)),),
        values=(2,), value_dtypes=("float32",),
    )  # fmt: skip

    def read(a, b, c):
        given = joined(a, b, c)
        rows = given.numel() // 8 if kind is Kind.FULL else 4
        return edge([torch.ones(rows, 8), given], rows, None, None, None, program.to_text())[0]

    module = make_fx(read, tracing_mode="fake")(torch.randn(4, 3), torch.randn(4, 5), torch.randn(4, 8))
    read_in_parts(Emitter(module.graph))
    (reader,) = module.graph.find_nodes(op="call_function", target=edge)
    assert program_of(reader.args[-1]) == program


def test_an_edge_reads_parts_in_place_of_several_leaves():
    """A concatenation, and a view of it."""
    program = Program(
        features=8, block=8, leaves=(Kind.FULL, Kind.FULL), steps=(Step("mul", (0, 0)), Step("sub", (2, 1))),
        values=(3,), value_dtypes=("float32",),
    )  # fmt: skip

    def read(a, b):
        x = torch.cat([a, b], dim=1)
        return edge([x, x.view(4, 8)], 4, None, None, None, program.to_text())[0]

    parts = torch.randn(4, 3), torch.randn(4, 5)
    module = make_fx(read, tracing_mode="fake")(*parts)
    (written,) = module.graph.find_nodes(op="call_function", target=aten.cat.default)
    with module.graph.inserting_after(written):
        module.graph.call_function(SIZE, (written, 0))  # which asks for no value
    read_in_parts(Emitter(module.graph))
    module.graph.eliminate_dead_code()
    module.recompile()
    (reader,) = module.graph.find_nodes(op="call_function", target=edge)
    assert program_of(reader.args[-1]).widths == (3, 5, 3, 5)
    assert torch.equal(module(*parts), read(*parts))


def test_dynamic_rows_in_parts():
    plain = Crossed(as_torchrec)
    model = converted(plain, plan_for(plain, *inputs_of()))
    backend = JointBackend()
    step = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for rows in (24, 7, 33):
        dense, fields = inputs_of(rows)
        for x in (dense, fields):
            torch._dynamo.mark_static(x, 1)
        torch._dynamo.mark_static(fields, 2)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            found = step(dense, fields)
        expected, _ = ran(model, (dense, fields), trained=False)
        assert torch.equal(found, expected[0])
    assert parts_read(backend)


def test_a_program_reads_parts_in_place_of_a_leaf():
    program = Program(
        features=8,
        block=4,
        leaves=(Kind.COLUMN, Kind.FULL, Kind.ROW),
        steps=(Step("mul", (1, 0)), Step("add", (3, 2)), Step("add", (4, 2.0))),
        gradient=1,
        sums=(0, 5),
        values=(4,),
        value_dtypes=("float32",),
    )
    found = in_parts(program, 1, [3, 5])
    assert found == Program(
        features=8,
        block=4,
        leaves=(Kind.COLUMN, Kind.PART, Kind.PART, Kind.ROW),
        steps=(Step("concat", (1, 2)), Step("mul", (4, 0)), Step("add", (5, 3)), Step("add", (6, 2.0))),
        gradient=4,
        sums=(0, 7),
        values=(6,),
        value_dtypes=("float32",),
        widths=(3, 5),
    )
