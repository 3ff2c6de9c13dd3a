"""Layers over tokens in high precision run as batched GEMMs of what lies there (compiler/layout/tokens.py).

Both ways add the same products in float32. A weight's gradient rounds every row of the batch to bfloat16
before the rows are added, so that it may be off by 2^-9 of the root of the sum of their squares.
"""

import copy
from operator import attrgetter

import pytest
import torch
import torch.nn.functional as F
from converted import JOINED, converted, error, gradients, run
from joint import JointBackend
from models import forced_plan
from sweeps import sweep
from torch import nn
from torch._inductor.decomposition import select_decomp_table

import loka
from loka.compiler import lower

aten = torch.ops.aten
TOKENS, OUT, COLUMNS = 24, 16, 48


class _Base(nn.Module):
    """[B, n, d] -> tokens over the middle side -> an MLP that is planned in FP8."""

    def __init__(self, tokens=TOKENS, columns=COLUMNS, bias=False):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(tokens, OUT, bias=bias)
        self.second = nn.Linear(tokens, OUT, bias=bias)
        self.mlp = nn.Sequential(nn.Linear(OUT * columns, 64), nn.ReLU(), nn.Linear(64, 32))

    def over(self, x, layer):
        return layer(x.transpose(1, 2)).transpose(1, 2)

    def forward(self, x):
        mixed = F.silu(self.over(x, self.first)) + 0.5 * self.over(x, self.second)
        return self.mlp(mixed.flatten(1))


class _Mixer(_Base):
    """Two layers with biases over tokens, an activation between them, and what was there."""

    def __init__(self):
        super().__init__(bias=True)
        self.second = nn.Linear(OUT, TOKENS)
        self.mlp = nn.Sequential(nn.Linear(TOKENS * COLUMNS, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x):
        mixed = self.second(F.gelu(self.first(x.transpose(1, 2))))
        return self.mlp((x + mixed.transpose(1, 2)).flatten(1))


class _Pairs(_Base):
    """As a factorization machine: what the layer gives is read as it lies, by a GEMM, and not across."""

    def forward(self, x):
        pairs = torch.bmm(x, self.first(x.transpose(1, 2)))[:, :OUT]
        return self.mlp((self.over(x, self.second) + pairs.repeat(1, 1, COLUMNS // OUT)).flatten(1))


class _Twice(_Base):
    def forward(self, x):
        again = nn.functional.pad(self.over(x, self.first), (0, 0, 0, TOKENS - OUT))
        return self.mlp(self.over(self.over(again, self.second)[:, :1] + x, self.second).flatten(1))


class _Matmul(_Base):
    """The weight in front, as a user may write it who never heard of transposed linear layers."""

    def over(self, x, layer):
        return torch.matmul(layer.weight, x)


class _Shifted(_Base):
    """A bias that is added several times."""

    def over(self, x, layer):
        y = F.linear(x.transpose(1, 2), layer.weight)
        return torch.add(y, layer.bias.to(y.dtype), alpha=4).transpose(1, 2)


class _Keys(_Base):
    """One head of attention: keys are read across by a GEMM, which costs nothing as it is."""

    def forward(self, x):
        rows = x[:, :OUT].transpose(1, 2).contiguous()  # [B, d, 16]
        q, k = (F.linear(rows, layer.weight[:, :OUT]) for layer in (self.first, self.second))
        return self.mlp((torch.bmm(q, k.transpose(1, 2))[:, :OUT]).flatten(1))


def _planned(model, x):
    """The MLP in FP8, what lies over tokens in high precision."""
    with loka.Probe(model, every=1, effect_samples=0) as probe:
        run(model, x)
    for parameter in model.parameters():
        parameter.grad = None
    return forced_plan(
        probe.stats(), JOINED, force={path: "hp" for path in probe.stats().layers if not path.startswith("mlp.")}
    )


def _input(tokens=TOKENS, batch=6, columns=COLUMNS):
    return torch.randn(batch, tokens, columns, generator=torch.Generator().manual_seed(1))


def _compiled(model, plan, **options):
    torch._dynamo.reset()
    backend = JointBackend()
    return torch.compile(loka.convert(model, plan, **options), backend=backend, fullgraph=True), backend


CASES = {
    "linear": (_Base, 1),  # both layers over one X in forward, as one
    "bias": (lambda: _Base(bias=True), 1),
    "mixer": (_Mixer, 2),
    "odd": (lambda: _Base(tokens=27), 1),
    "pairs": (_Pairs, 2),
    "twice": (_Twice, 3),
    "matmul": (_Matmul, 2),  # autocast casts X twice
    "shifted": (lambda: _Shifted(bias=True), 1),
}


@pytest.mark.parametrize("case", sweep(CASES, ("odd",)))
def test_nothing_is_copied_and_nothing_changes(case, monkeypatch):
    make, in_forward = CASES[case]
    plain = make()
    x = _input(plain.first.in_features)
    plan = _planned(copy.deepcopy(plain), x)
    rewritten, before = copy.deepcopy(plain), copy.deepcopy(plain)
    step, backend = _compiled(rewritten, plan)
    y, (dx,) = run(step, x)
    forward = backend.graphs[0]
    assert sum(node.target is aten.bmm.default for node in forward.nodes) == in_forward
    assert not backend.count(aten.mm.default)
    monkeypatch.setattr(lower, "keep_tokens", lambda emitter: None)
    step, backend = _compiled(before, plan)
    expected, (dx_expected,) = run(step, x)
    assert backend.count(aten.mm.default) >= 5
    exact, dx_exact = _in_float64(plain, x)
    truth = gradients(exact)
    # What was rounded otherwise by a bit of bfloat16 may take another step of e4m3 in the MLP.
    assert error(y, expected) < 0.02
    # And another side of a ReLU, by which one row's gradient is another.
    assert error(dx, dx_exact) < 1.1 * error(dx_expected, dx_exact) + 2**-8
    ours, theirs = gradients(rewritten), gradients(before)
    for name in ours:
        assert error(ours[name], truth[name]) < 1.1 * error(theirs[name], truth[name]) + 2**-8


def _in_float64(model, x):
    model, x = copy.deepcopy(model).double(), x.double().requires_grad_()
    y = model(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    (y * dy).sum().backward()
    return model, x.grad.float()


def _products(model, plan, x, **options):
    """Products of matrices that are left, in forward and in backward."""
    step, backend = _compiled(model, plan, **options)
    run(step, x)
    return [sum(node.target is aten.mm.default for node in graph.nodes) for graph in backend.graphs]


@pytest.mark.slow
def test_stays_as_it_is_where_that_is_no_loss():
    """Keys that only a GEMM reads across; few columns; what is not LoKA's to compile."""
    x, few = _input(), _input(columns=16)
    keys, narrow, base = _Keys(), _Base(columns=16), _Base()
    assert _products(keys, _planned(copy.deepcopy(keys), x), x)[0] == 2
    assert _products(narrow, _planned(copy.deepcopy(narrow), few), few) == [2, 4]
    assert _products(base, _planned(copy.deepcopy(base), x), x, regions=False) == [2, 4]


ANSWERED = {  # products of [B, m, d], and the pairs, by m
    "linear": (_Base, [2 * OUT]),
    "bias": (lambda: _Base(bias=True), [2 * OUT]),
    "mixer": (_Mixer, [COLUMNS, TOKENS]),  # the activation reads the first as it is
    "odd": (lambda: _Base(tokens=27), [2 * OUT]),
    "pairs": (_Pairs, [2 * OUT, TOKENS]),  # the one that a GEMM reads goes with the other
    "twice": (_Twice, [OUT, OUT, OUT]),
}


WAYS = [(case, dynamic) for case in ANSWERED for dynamic in (False, True)]
IN_EVERY_RUN = [("bias", False), ("mixer", False)]


@pytest.mark.parametrize(("case", "dynamic"), sweep(WAYS, IN_EVERY_RUN))
def test_without_gradients_nothing_is_written_across(case, dynamic, monkeypatch):
    """Nothing is copied there either way; the products of one X are one, [B, m, d], as readers take them."""
    make, rows = ANSWERED[case]
    plain = make().eval()
    x = _input(plain.first.in_features)
    x[1, 2, 3] = float("nan")
    plan = _planned(copy.deepcopy(plain), _input(plain.first.in_features))
    found, products, across = _answered(plain, plan, x, dynamic=dynamic)
    assert [shape[0] for shape in products] == rows
    assert not across
    monkeypatch.setattr(lower, "keep_tokens", lambda emitter: None)
    expected, products, across = _answered(plain, plan, x, dynamic=dynamic)
    assert [COLUMNS, OUT] in products
    assert across
    assert found.isnan().any(dim=1).tolist() == expected.isnan().any(dim=1).tolist() == [row == 1 for row in range(6)]
    # Sums in float32 in another order, and by that another step of e4m3 in the MLP.
    others = ~expected.isnan()
    assert error(found[others], expected[others]) < 0.02


@pytest.mark.slow
def test_without_gradients_what_is_no_loss_stays():
    """A product that GEMMs alone read, either way; few columns."""
    for plain, given, shapes in (
        (_PairsAlone(), _input(), [[COLUMNS, OUT], [TOKENS, OUT]]),
        (_Base(columns=16), _input(columns=16), [[16, OUT], [16, OUT]]),
    ):
        _, products, _ = _answered(plain.eval(), _planned(copy.deepcopy(plain), given), given)
        assert products == shapes


class _PairsAlone(_Base):
    def forward(self, x):
        pairs = torch.bmm(x, self.first(x.transpose(1, 2)))[:, :OUT]
        return self.mlp(pairs.repeat(1, 1, COLUMNS // OUT).flatten(1))


def _answered(plain, plan, x, dynamic=False):
    """The answer, the last two sides of what batched GEMMs give, and how many nodes but these read across."""
    torch._dynamo.reset()
    backend = JointBackend()
    step = torch.compile(loka.convert(copy.deepcopy(plain), plan), backend=backend, fullgraph=True, dynamic=dynamic)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        if dynamic:
            step(x[:5])
        y = step(x).float()
    graph = backend.graphs[-1]
    across = [n for n in graph.find_nodes(op="call_function", target=aten.permute.default) if n.args[1] == [0, 2, 1]]
    readers = {user for node in across for user in _past_casts(node)}
    return y, _products_of(graph), sum(node.target is not aten.bmm.default for node in readers)


def _products_of(graph):
    return [list(node.meta["val"].shape[1:]) for node in graph.nodes if node.target is aten.bmm.default]


def _past_casts(node):
    for user in node.users:
        if user.target in (aten.expand.default, aten.view.default, torch.ops.prims.convert_element_type.default):
            yield from _past_casts(user)
        else:
            yield user


@pytest.mark.slow
def test_weights_that_a_file_holds_are_there_from_the_start():
    """In a package's graph they are attributes, not inputs; layers of one X are one there too."""
    plain, x = _Pairs().eval(), _input()
    model = loka.convert(copy.deepcopy(plain), _planned(copy.deepcopy(plain), x))
    rows = torch.export.Dim("rows", min=1, max=64)
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=({0: rows},), strict=False)
    graph = program.run_decompositions(select_decomp_table()).module(check_guards=False).graph
    mode = next(n.meta["val"].fake_mode for n in graph.nodes if n.op == "placeholder")
    for node in graph.find_nodes(op="get_attr"):
        node.meta["val"] = mode.from_tensor(attrgetter(node.target)(graph.owning_module), static_shapes=True)
    lower.join_sites(graph)
    assert [side for side, _ in _products_of(graph)] == [2 * OUT, TOKENS]


@pytest.mark.slow
def test_large_sides_leave_the_weight_gradient_as_it_is():
    """Products of 6 rows of [64, 64] would be more than the rows of [64, 48] that they are made of."""
    model = nn.Sequential(_Wide(), nn.Flatten(1), nn.Linear(64 * COLUMNS, 64), nn.ReLU(), nn.Linear(64, 32))
    x = _input(64)
    with loka.Probe(model, every=1, effect_samples=0) as probe:
        run(model, x)
    plan = forced_plan(probe.stats(), JOINED, force={"0.*": "hp"})
    assert _products(model, plan, x) == [0, 1]


class _Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return F.relu(self.linear(x.transpose(1, 2)).transpose(1, 2))


def test_batches_of_any_size_and_rows_that_are_not_finite():
    plain = _Base()
    plan = _planned(copy.deepcopy(plain), _input())
    torch._dynamo.reset()
    backend = JointBackend()
    model = converted(plain, plan)
    step = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    for batch in (6, 9, 5):
        x = _input(batch=batch)
        x[1, 2, 3] = float("nan")
        (y, (dx,)), (expected, (dx_expected,)) = run(step, x), run(plain, x)
        bad = expected.isnan().any(dim=1)
        assert bad.tolist() == [row == 1 for row in range(batch)]
        assert y.isnan().any(dim=1).tolist() == bad.tolist()
        assert error(y[~bad], expected[~bad]) < 0.15  # e4m3's noise
        assert dx_expected is not None
        assert dx[~bad].isfinite().all()
    assert not backend.count(aten.mm.default)


@pytest.mark.slow
def test_inductor_takes_it():
    """One weight for all of a batch, operands that lie transposed, a stack of two weights."""
    plain = _Base(tokens=27)
    x = _input(27)
    plan = _planned(copy.deepcopy(plain), x)
    torch._dynamo.reset()
    model = converted(plain, plan)
    step, _ = _compiled(copy.deepcopy(plain), plan)
    by_op = run(step, x)
    torch._dynamo.reset()
    found = run(torch.compile(model, fullgraph=True), x)
    assert loka.regions(model).applied
    assert error(found[0], by_op[0]) < 0.02
    for ours, theirs in zip(found[1], by_op[1], strict=True):
        assert error(ours, theirs) < 0.02
