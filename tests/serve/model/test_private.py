"""The copy that a server owns: what reads the original, what refresh does not reach, what calls leave behind."""

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from served import ROW, plan_for
from torch import nn

from loka.core.exceptions import LokaError, ServeRefused
from loka.serve import freeze, load
from loka.serve.rows import form_of

X = [torch.randn(64, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.tail(torch.relu(self.a(x)))

    def tail(self, y):
        return self.b(y)


def served(model, rows=X, **options):
    return freeze(model, plan_for(model, {"a": ROW}), calibration=rows, buckets=(16, 64), **options)


def lambdas():
    model = Net()
    model.tail = lambda y: model.b(y)
    return model


def hooks():
    model = Net()
    model.b.register_forward_hook(lambda module, given, answer: answer * model.a.bias.sum())
    return model


def compiled():
    model = Net()
    model.tail = torch.compile(model.tail, fullgraph=True)  # by Inductor, whose kernels nothing sees
    return model


def globals_():
    class Global(Net):
        def tail(self, y):
            return super().tail(y) + WHOLE.a.bias.sum()

    model = WHOLE = Global()
    return model


@pytest.mark.parametrize(
    ("make", "weight"), [(lambdas, "b.weight"), (hooks, "a.bias"), (globals_, "a.bias"), (compiled, "b.weight")]
)
def test_functions_that_read_the_original_are_refused(make, weight):
    with pytest.raises(ServeRefused, match=rf"(?s)reads the original's weights.*{weight}"):
        served(make())


def test_a_hook_that_reads_its_own_module_is_served():
    model = Net()
    model.b.register_forward_hook(lambda module, given, answer: answer * module.bias.sum())
    server = served(model)
    state = {key: value * 2 for key, value in model.state_dict().items()}
    server.refresh(state)
    model.load_state_dict(state)
    assert torch.allclose(server(X[0]).output, model(X[0]), rtol=0.1, atol=0.1)


HELD = {
    "attribute": lambda model: model.b.weight.t(),
    "list": lambda model: [model.b.weight.detach().view(-1)],
    "dict": lambda model: {"w": model.b.weight.t()},
    "object": lambda model: SimpleNamespace(w=model.b.weight.data),
    "parameter": lambda model: [nn.Parameter(model.b.weight.data.t(), requires_grad=False)],
    "numpy": lambda model: torch.from_numpy(model.b.weight.detach().numpy().T),
}


@pytest.mark.parametrize("held", HELD)
def test_views_of_weights_are_refused_wherever_they_are(held):
    model = Net()
    model.view = HELD[held](model)
    with pytest.raises(ServeRefused, match=r"is a view of b\.weight"):
        served(model)


def test_buffers_that_are_views_are_refused_and_spectral_norms_are_not():
    model = Net()
    model.register_buffer("flat", model.a.weight.detach().view(-1), persistent=False)
    with pytest.raises(ServeRefused, match=r"flat is a view of a\.weight"):
        served(model)
    normed = Net()
    nn.utils.spectral_norm(normed.b)  # its weight lies in weight_orig's memory until a forward
    served(normed)


class OwnDict(Net):
    """Whose state dict, as of a module that packs it, gives other objects than it holds."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def tail(self, y):
        return self.norm(super().tail(y))

    def state_dict(self, *args, **kwargs):
        return {key: value.detach() for key, value in super().state_dict(*args, **kwargs).items()}


def test_a_state_dict_of_other_objects_is_no_view(tmp_path):
    server = served(OwnDict().eval())
    assert server.card.dropped
    server.save(tmp_path)
    assert torch.equal(load(tmp_path, OwnDict())(X[0]).output, server(X[0]).output)


class Branches(Net):
    """Operators that take functions, and compiled pieces."""

    def __init__(self):
        super().__init__()
        self.piece = torch.compile(torch.sin, backend="eager", fullgraph=True)

    def tail(self, y):
        return torch.cond(y.shape[1] > 3, torch.sin, torch.cos, (self.piece(super().tail(y)),))


def test_operators_that_take_functions_and_compiled_pieces_are_served():
    torch._dynamo.reset()
    model = Branches().eval()
    server = served(model)
    with torch.no_grad():
        assert torch.allclose(server(X[0]).output, model(X[0]), atol=0.1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_part_is_served_as_it_is():
    model = Net().eval()
    model.b = torch.jit.script(nn.Sequential(model.b, nn.ReLU()))
    server = served(model)
    assert list(server.card.sites) == ["a"]
    assert torch.allclose(server(X[0]).output, model(X[0]), atol=0.1)


class Listed(Net):
    def __init__(self):
        super().__init__()
        self.weights = [self.b.weight]

    def tail(self, y):
        return y @ self.weights[0].t()


def test_weights_in_lists_are_refused_before_a_refresh_meets_them():
    with pytest.raises(ServeRefused, match=r"(?s)once other weights are put into.*keep them in no list"):
        served(Listed())


class Counts(Net):
    """Sets an attribute in each call, to a value that a single caller finds there again."""

    def forward(self, x):
        self.rows = x.shape[0]
        y = super().forward(x)
        time.sleep(0.002)
        return y * torch.ones(self.rows, 1)


def test_threads_do_not_share_what_a_call_leaves_in_attributes():
    server = served(Counts().eval())
    requests = [X[0][:12], X[1]] * 20
    expected = [server(request).output for request in requests]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda request: server(request).output, requests))
    assert all(map(torch.equal, found, expected))


def test_saving_runs_no_module_of_requests(tmp_path):
    """What `save` runs for the check changed sizes under requests, and they under it."""
    server = served(Counts().eval())
    expected = server(X[1]).output
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(server, X[1]) for _ in range(40)]
        saves = [pool.submit(server.save, tmp_path / str(number)) for number in range(4)]
    assert all(torch.equal(answer.result().output, expected) for answer in answers)
    assert all(save.exception() is None for save in saves)


def test_one_save_after_the_other(tmp_path, monkeypatch):
    """Two into one folder certified each other's files, or found none."""
    server, inside = served(Net()), []

    def slow(folder, *version):
        inside.append(folder)
        assert len(inside) == 1
        time.sleep(0.01)
        inside.pop()

    monkeypatch.setattr("loka.serve.server.save_version", slow)
    with ThreadPoolExecutor(4) as pool:
        for save in [pool.submit(server.save, tmp_path) for _ in range(8)]:
            save.result()


class Logs(Net):
    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return super().forward(torch.log(x)) * self.scale


def test_a_model_of_positive_numbers_is_compared_by_such(tmp_path, caplog):
    """By normal numbers every answer was NaN, and any model was served in its place."""
    rows = [x.abs() + 1e-3 for x in X]
    served(Logs(), rows).save(tmp_path)
    with pytest.raises(ServeRefused, match="computes something else"):
        load(tmp_path, Logs(2.0))
    load(tmp_path, Logs())
    assert not caplog.records


class Unknown(Net):
    """Answers with NaN but for what starts with 3, as no row that is drawn does."""

    def forward(self, x):
        return torch.where(x[:, :1] == 3, super().forward(x), math.nan)


def test_a_comparison_that_tells_nothing_says_so(tmp_path, caplog):
    rows = [torch.cat([x, 3 + torch.zeros(64, 1)], dim=1)[:, [16, *range(1, 16)]] for x in X]
    rows[0][0, 0] = 0
    server = served(Unknown(), rows)
    assert server(rows[0]).nonfinite_rows == 1
    server.save(tmp_path)
    load(tmp_path, Unknown())
    assert "outputs 0 are NaN or infinite for all rows" in caplog.text


class Empty(Net):
    def forward(self, x):
        return super().forward(x), x[:, :0]


def test_an_output_without_numbers_holds_no_nan(tmp_path, caplog):
    served(Empty()).save(tmp_path)
    load(tmp_path, Empty())
    assert not caplog.messages


class Ids(Net):
    """A number of each row names an entry of a table, as a float or as a hash."""

    def __init__(self, slots=50):
        super().__init__()
        self.slots, self.table = slots, nn.Embedding(50, 16)

    def forward(self, x, ids):
        return super().forward(self.table(x[:, 0].long()) + self.table((ids % self.slots).abs()))


def test_ids_in_columns_of_floats_and_hashes_of_63_bits():
    generator = torch.Generator().manual_seed(0)
    floats = torch.randint(50, (64, 1), generator=generator).float()
    hashes = torch.randint(-(2**63), 2**63 - 1, (64,), generator=generator)
    model = Ids()
    server = freeze(model, plan_for(model, {"a": ROW}), calibration=[(floats, hashes)], buckets=(16, 64))
    drawn, hashed = server.card.form.check_rows(torch.device("cpu"), 500)
    assert floats.min() <= drawn.min()
    assert drawn.max() <= floats.max()
    assert hashes.min() <= hashed.min()
    assert hashed.max() <= hashes.max()
    assert int(hashed.max()) - int(hashed.min()) > 2**61
    assert len(hashed.unique()) == 256, "as many as are drawn"


def drawn(rows):
    return form_of(rows).bounded([[rows]]).check_rows(torch.device("cpu"), 100)[0]


def test_rows_that_are_drawn_lie_between_and_differ():
    wide = torch.rand(64, 5000) + 1
    wide[:, 7] = 0  # padding
    wide[:, 9] = torch.nan
    found = drawn(wide)
    assert 1 <= found.min() < found.max() <= 2
    apart = torch.cat([torch.rand(64, 3000), 5 + torch.rand(64, 3000)], dim=1)
    assert drawn(apart).std() > 0.9, "no numbers between: normal ones"
    ids = 2.0**24 + torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    assert ids.min() <= drawn(ids).min() < drawn(ids).max() <= ids.max()
    assert drawn(torch.tensor([[0], [1]])).unique().tolist() == [0, 1]
    assert 1000 <= drawn(torch.tensor([[1000.0], [2000.0]])).max() <= 1001, "within 1 of the bound"
    assert (drawn(torch.full((4, 1), 1e300, dtype=torch.float64)) == 1e300).all()
    assert drawn(torch.full((4, 3), torch.nan)).std() > 0.9


class Ends(Net):
    def forward(self, x, begin, end):
        if bool((end <= begin).any()):
            raise IndexError("a slice without entries")
        return super().forward(x * (end - begin)[:, None])


def test_columns_that_depend_on_each_other_are_refused_by_name():
    begin, model = torch.arange(64), Ends()
    with pytest.raises(ServeRefused, match=r"(?s)numbers are drawn one by one.*a slice without entries"):
        freeze(model, plan_for(model, {"a": ROW}), calibration=[(X[0], begin, begin + 1)], buckets=(64,))


def test_a_model_that_cannot_be_copied_is_refused():
    model = Net()
    model.guard = threading.Lock()
    with pytest.raises(ServeRefused, match=r"(?s)cannot be copied.*lock"):
        served(model)


class Halving(Net):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "half"] = self.b.weight / 2


def test_a_state_dict_that_is_computed_is_refused():
    """It was frozen and saved, and no folder of it could be loaded."""
    with pytest.raises(ServeRefused, match=r"(?s)computes its state dict from weights.*Way out"):
        served(Halving())


def test_modules_without_shapes_are_named():
    model = Net()
    plan, model.b = plan_for(model, {"a": ROW}), nn.LazyLinear(16)
    with pytest.raises(LokaError, match=r"(?s)lazy modules.*b: LazyLinear"):
        freeze(model, plan, calibration=X)


class Drops(Net):
    def tail(self, y):
        return super().tail(nn.functional.dropout(y))


def test_a_model_that_draws_numbers_is_told_from_one_that_mixes_rows():
    with pytest.raises(ServeRefused, match="other numbers each time"):
        served(Drops())
