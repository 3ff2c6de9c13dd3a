"""Graphs as text (serve/model/written.py), and servers that are loaded by them."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from served import Cross, Tower
from sweeps import sweep
from test_serve_graphs import Wide, backend, frozen, inputs, wide  # noqa: F401
from torch import nn

from loka.core.exceptions import FileRefused
from loka.core.storage.files import sha256_of_file
from loka.serve import load
from loka.serve.card import Folder
from loka.serve.model import programs
from loka.serve.model.programs import Programs
from loka.serve.model.written import WrittenGraphs, read, written
from loka.serve.rows import form_of, leaves
from loka.serve.run import Runner
from loka.serve.saving import CARD, GRAPHS

CPU = torch.device("cpu")


class Options(nn.Module):
    """Ops with lists, dtypes, infinite numbers, devices, None and options; outputs in a dict, one of them twice."""

    def forward(self, x):
        mask = torch.arange(x.shape[1], device=x.device, dtype=torch.int64) % 2 == 0
        y = torch.where(mask, x, float("-inf")).softmax(dim=-1)
        z = torch.cat([y, x.clamp(max=0.5), torch.full_like(x, float("nan"))], dim=1)[:, :-1]
        first, second = torch.var_mean(z.double(), dim=1, correction=0)
        return {"one": [first, nn.functional.gelu(second, approximate="tanh")], "two": first, "x": x.to(torch.bfloat16)}


@pytest.fixture
def compiled(monkeypatch):
    """Graphs as Inductor would get them; they run op by op."""
    found = []
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, _: found.append(graph) or graph)
    return found


def called(model, columns, graphs=None):
    made = Programs(model.eval(), Runner(form=form_of(columns), autocast=torch.bfloat16), graphs or {})
    with torch.no_grad():
        return made, made.call(columns)()


MODELS = [
    (Options(), [torch.randn(5, 6)]),
    (Tower(), [torch.randn(5, 13), torch.randint(0, 50, (5,))]),
    (Cross(), [torch.randn(5, 24)]),
]


@pytest.mark.parametrize(("model", "columns"), MODELS, ids=["options", "tower", "cross"])
def test_a_graph_is_what_was_traced(compiled, monkeypatch, tmp_path, model, columns):
    """From its file it has the same ops, arguments and names, answers with the same bits, and nothing is traced."""
    made, expected = called(model, columns)
    graphs = made.written()
    assert list(graphs) == [5]
    WrittenGraphs(code="", graphs={"5": graphs[5]}).save(tmp_path / GRAPHS)
    loaded = WrittenGraphs.load(tmp_path / GRAPHS).graphs["5"]
    monkeypatch.setattr(programs, "traced", None)
    again, found = called(model, columns, {5: loaded})
    assert str(compiled[1].graph) == str(compiled[0].graph)
    for one, other in zip(leaves(found), leaves(expected), strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
    assert again.written() == {5: loaded}


def test_devices_are_the_servers(compiled):
    made, _ = called(*MODELS[0])
    graph = made.written()[5]
    assert '["device", ""]' in json.dumps(graph.nodes)
    devices = {
        node.kwargs["device"] for node in read(graph, torch.device("meta")).graph.nodes if "device" in node.kwargs
    }
    assert devices == {torch.device("meta")}


def other_op(graph):
    text = json.dumps(graph.nodes)
    assert "aten.clamp.default" in text
    return replace(graph, nodes=json.loads(text.replace('"aten.clamp.default"', '"aten.clamp_min.default"')))


def unknown_op(graph):
    return replace(
        graph, nodes=json.loads(json.dumps(graph.nodes).replace('"aten.clamp.default"', '"mine.op.default"'))
    )


def other_tensor(graph):
    return replace(graph, reads=(("parameter .gone",),))


def no_graph(graph):
    return replace(graph, nodes=(["x"],))


class Tied(nn.Module):
    def __init__(self, *, tied):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.load_state_dict(self.first.state_dict())
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_are_one_in_a_graph_are_one_in_the_model(compiled, monkeypatch, tied):
    """With equal values the answers tell nothing, and new weights need not be equal."""
    torch.manual_seed(0)
    model, other, columns = Tied(tied=tied), Tied(tied=not tied), [torch.randn(5, 4)]
    other.load_state_dict(model.state_dict())
    made, _ = called(model, columns)
    traced = []
    monkeypatch.setattr(programs, "traced", lambda *a, _made=programs.traced, **k: traced.append(1) or _made(*a, **k))
    assert called(model, columns, made.written())[0].written() == made.written()
    assert not traced
    assert called(other, columns, made.written())[0].written() != made.written()
    assert traced


class Sharing(Wide):
    def __init__(self):
        super().__init__()
        self.tied = Tied(tied=True)

    def forward(self, x):
        return super().forward(x) + self.tied(x[:, :4]).sum(1)


@pytest.mark.slow
def test_a_model_that_shares_weights_is_loaded_and_refreshed_without_tracing(backend, monkeypatch, tmp_path):  # noqa: F811
    frozen(Sharing().eval()).save(tmp_path)
    traced = []
    monkeypatch.setattr(programs, "traced", lambda *a, _made=programs.traced, **k: traced.append(1) or _made(*a, **k))
    model = Sharing().eval()
    loaded, compiled = load(tmp_path, model), len(backend.graphs)
    loaded.refresh(model.state_dict())
    assert not traced
    assert len(backend.graphs) == compiled


@pytest.mark.parametrize("change", [other_op, unknown_op, other_tensor, no_graph])
def test_one_that_does_not_fit_is_traced_anew(compiled, change, caplog):
    """By other code, or written by another version: the answer is the model's own."""
    model, columns = MODELS[0]
    made, expected = called(model, columns)
    with caplog.at_level("INFO", logger="loka.serve"):
        again, found = called(model, columns, {5: change(made.written()[5])})
    assert "traced for 5 rows, as its graph does not fit" in caplog.text
    for one, other in zip(leaves(found), leaves(expected), strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
    assert again.written() == made.written()


def test_what_has_no_text_is_traced_at_each_load(compiled):
    class Literal(nn.Module):
        def forward(self, x):
            return x * torch.tensor([1.0, 2.0, 3.0])

    made, found = called(Literal(), [torch.ones(5, 3)])
    assert torch.equal(found, torch.tensor([[1.0, 2.0, 3.0]]).expand(5, 3))
    assert made.written() == {}


def test_no_op_reads_a_file(compiled, tmp_path):
    made, _ = called(*MODELS[0])
    reading = ["made", "aten.from_file.default", ["tuple", str(tmp_path / "x"), False, 3], ["dict"]]
    graph = made.written()[5]
    with pytest.raises(ValueError, match="reads from elsewhere"):
        read(replace(graph, nodes=(*graph.nodes[:1], reading, graph.nodes[-1])), CPU)
    assert written(torch.fx.symbolic_trace(nn.Linear(2, 2)), (), CPU) is None


def test_ops_that_read_by_a_name_are_traced_at_each_load(compiled):
    """As an op of a user's library that looks a table up."""
    with torch.library._scoped_library("loka_test_written", "FRAGMENT") as library:
        library.define("table(str name, *, Device device) -> Tensor")
        library.impl("table", lambda name, *, device: torch.ones(3, device=device), "BackendSelect")
        library.impl("table", lambda name, *, device: torch.ones(3, device=device), "Meta")

        class Looking(nn.Module):
            def forward(self, x):
                return x + torch.ops.loka_test_written.table("users", device=x.device)

        made, found = called(Looking(), [torch.ones(5, 3)])
    assert torch.equal(found, torch.full((5, 3), 2.0))
    assert len(compiled) == 1
    assert made.written() == {}


def test_a_server_is_loaded_without_tracing(backend, monkeypatch, tmp_path):  # noqa: F811
    """Bit for bit; a folder from before, without graphs, is traced, and a damaged file is refused."""
    server = frozen(wide())
    expected = [server(inputs(count)).output for count in (2, 16)]
    server.save(tmp_path)
    assert list(WrittenGraphs.load(tmp_path / GRAPHS).graphs) == ["2", "16"]
    traced = programs.traced
    monkeypatch.setattr(programs, "traced", None)
    loaded = load(tmp_path, wide(seed=3))
    assert all(torch.equal(loaded(inputs(count)).output, one) for count, one in zip((2, 16), expected, strict=True))
    loaded.refresh(wide(seed=1).state_dict())
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again" / GRAPHS).read_bytes() == (tmp_path / GRAPHS).read_bytes()
    monkeypatch.setattr(programs, "traced", traced)
    WrittenGraphs(code="", graphs={}).save(tmp_path / GRAPHS)
    with pytest.raises(FileRefused, match=r"graphs\.json\.xz is not the file that was saved"):
        load(tmp_path, wide(seed=3))
    folder = Folder.load(tmp_path / CARD)
    files = {name: digest for name, digest in folder.files.items() if name != GRAPHS}
    replace(folder, files=files).save(tmp_path / CARD)
    assert torch.equal(load(tmp_path, wide(seed=3))(inputs(16)).output, expected[1])


@pytest.mark.slow
def test_graphs_of_no_bucket_are_passed_over(backend, tmp_path):  # noqa: F811
    server = frozen(wide())
    server.save(tmp_path)
    found = WrittenGraphs.load(tmp_path / GRAPHS)
    replace(found, graphs={"x": found.graphs["2"]} | found.graphs).save(tmp_path / GRAPHS)
    folder = Folder.load(tmp_path / CARD)
    replace(folder, files={**folder.files, GRAPHS: sha256_of_file(tmp_path / GRAPHS)}).save(tmp_path / CARD)
    assert torch.equal(load(tmp_path, wide())(inputs(16)).output, server(inputs(16)).output)


class Bounded(Wide):
    """A number that no row of a check reaches, and that the state dict brings."""

    bound = 1000.0

    def get_extra_state(self):
        return self.bound

    def set_extra_state(self, state):
        self.bound = state

    def forward(self, x):
        return super().forward(x).clamp(max=self.bound)


@pytest.mark.slow
def test_graphs_are_those_of_the_version_that_is_saved(backend, monkeypatch, tmp_path):  # noqa: F811
    """What the answers of a check do not show is in them: a version's own numbers, also after a rollback. A model
    of other numbers gets none of them."""
    model, other = Bounded().eval(), Bounded().eval()
    other.bound = 2000.0
    server = frozen(model)
    for folder in ("one", "two", "three"):
        if folder == "two":
            server.refresh(other.state_dict())
        elif folder == "three":
            server.rollback()
        server.save(tmp_path / folder)
    one, two, three = (
        json.dumps(WrittenGraphs.load(tmp_path / folder / GRAPHS).to_json()) for folder in ("one", "two", "three")
    )
    traced = []
    monkeypatch.setattr(programs, "traced", lambda *a, _made=programs.traced, **k: traced.append(1) or _made(*a, **k))
    load(tmp_path / "one", Bounded().eval())
    assert not traced
    load(tmp_path / "one", other)  # its own number holds, as in all that runs it eagerly
    assert len(traced) == 2
    assert "1000.0" in one
    assert "2000.0" in two
    assert "1000.0" not in two
    assert one == three


LIMIT = 1000.0


class Limited(Wide):
    """Numbers that no row of a check reaches: of a global, of a tensor that is no buffer, in a tuple."""

    def __init__(self):
        super().__init__()
        self.most, self.bounds = torch.tensor(1000.0), (-1000.0, 1000.0)
        self.least = {"bound": [None, -1000.0]}
        self.options = SimpleNamespace(most=1000.0)
        self.edges, self.edge = [torch.tensor([1000.0])], torch.tensor([1000.0])

    def get_extra_state(self):
        return self.bounds, self.least, self.options, self.edges, self.edge

    def set_extra_state(self, state):
        self.bounds, self.least, self.options, self.edges, self.edge = state

    def forward(self, x):
        first = (
            x[:, 0].clamp(max=LIMIT).clamp(max=self.most.item()).clamp(*self.bounds).clamp(min=self.least["bound"][1])
        )
        first = torch.minimum(torch.minimum(first.clamp(max=self.options.most), self.edges[0]), self.edge)
        return super().forward(x) + first


def limited():
    torch.manual_seed(0)
    return Limited().eval()


@pytest.mark.parametrize("change", sweep(["global", "tensor", "tuple"], ["global"]))
def test_numbers_that_no_check_reaches_are_the_models(backend, monkeypatch, tmp_path, change):  # noqa: F811
    """Also where a global was another one when the server was saved than when it was frozen."""
    server, other = frozen(limited()), limited()
    if change == "global":
        monkeypatch.setattr(sys.modules[__name__], "LIMIT", 500.0)
    elif change == "tensor":
        other.most = torch.tensor(500.0)
    else:
        other.bounds = (-1000.0, 500.0)
    server.save(tmp_path)
    rows = inputs(16).abs().index_fill(1, torch.tensor(0), 1e4)
    assert server(rows).output.max() > 900.0
    assert load(tmp_path, other)(rows).output.max() < 600.0


@pytest.mark.parametrize(
    ("name", "value", "sign"),
    [
        ("bounds", (-1000.0, 500.0), 1.0),
        pytest.param("least", {"bound": [None, -500.0]}, -1.0, marks=pytest.mark.slow),
        pytest.param("options", SimpleNamespace(most=500.0), 1.0, marks=pytest.mark.slow),
        ("edges", [torch.tensor([500.0])], 1.0),
        pytest.param("edge", torch.tensor([500.0]), 1.0, marks=pytest.mark.slow),
    ],
)
def test_numbers_that_a_state_dict_brings_are_those_of_the_version(backend, name, value, sign):  # noqa: F811
    """In containers, objects and tensors, too, where no row of a check reaches them."""
    server, other = frozen(limited()), limited()
    setattr(other, name, value)
    server.refresh(other.state_dict())
    rows = inputs(16).index_fill(1, torch.tensor(0), sign * 1e4)
    assert server(rows).output.abs().max() < 600.0


class Raising:
    """As proxies of what is not there any more."""

    @property
    def __dict__(self):
        raise ReferenceError("gone")

    def __deepcopy__(self, memory):
        return self


@pytest.mark.slow
def test_an_object_that_raises_when_it_is_read_keeps_no_traces(backend, tmp_path):  # noqa: F811
    """Nobody can tell what its code is: the model is traced at each load."""
    model, same = wide(), wide(seed=3)
    model.held = same.held = Raising()
    server = frozen(model)
    server.save(tmp_path)
    assert WrittenGraphs.load(tmp_path / GRAPHS) == WrittenGraphs(code="", graphs={})
    assert torch.equal(load(tmp_path, same)(inputs(16)).output, server(inputs(16)).output)
