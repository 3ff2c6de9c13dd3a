"""What looks at memory gets it as it was, whatever layout code between has (compiler/layout/strides.py).

Wrong layouts gave outputs and gradients that were off by 0.7 to 1.6 of their norm; roundings of bfloat16, and the
steps of e4m3 that follow from them, are below 0.05.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from converted import error
from joint import JointBackend
from sweeps import sweep
from test_tokens import COLUMNS, OUT, _Base, _input, _planned, _products_of

import loka
from loka.compiler import lower


class _Shown(_Base):
    """A model that gives away what `look` makes of a product over tokens [B, m, d], besides its logits."""

    def __init__(self, look):
        super().__init__()
        self.look = look

    def forward(self, x):
        y = self.over(x, self.first)
        mixed = F.silu(y) + self.over(x, self.second)
        return self.mlp(mixed.flatten(1)), *self.look(y)


def _of_what_follows(y):
    z = F.relu(y)
    return z[:, 0], z[:, 1:, 3:]


LOOKS = {
    "views": lambda y: (y[:, 0], y[:, 1]),
    "a slice and all": lambda y: (y, y.mT[:, 3:]),
    "views of what follows": _of_what_follows,
    "a cast and its transpose": lambda y: (y.float(), y.float().mT),
    "strided": lambda y: (y.as_strided((len(y), 4, 5), (y.stride(0), 3 * y.stride(1), 2 * y.stride(2)), 1) * 2.0,),
    "complex": lambda y: (torch.view_as_complex(y.float().mT.unflatten(2, (OUT // 2, 2))).abs(),),
}


WAYS = [(case, dynamic, grad) for case in LOOKS for dynamic in (True, False) for grad in (True, False)]
IN_EVERY_RUN = [("views", True, True), ("a cast and its transpose", False, False), ("complex", False, True)]


@pytest.mark.parametrize(("case", "dynamic", "grad"), sweep(WAYS, IN_EVERY_RUN))
def test_outputs_and_what_reads_by_strides(case, dynamic, grad, monkeypatch):
    """Sizes that are symbols have AOTAutograd take views of outputs by the strides that it is given."""
    plain = _Shown(LOOKS[case])
    plan = _planned_for(plain)
    found, dx = _run(loka.convert(copy.deepcopy(plain), plan), dynamic, grad)
    monkeypatch.setattr(lower, "keep_tokens", lambda emitter: None)
    expected, dx_expected = _run(loka.convert(copy.deepcopy(plain), plan), dynamic, grad)
    eager = loka.convert(copy.deepcopy(plain), plan)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        as_written = eager(_input(batch=8))
    for ours, theirs, written in zip(found, expected, as_written, strict=True):
        assert error(ours, theirs) < 0.05
        assert ours.stride() == written.stride()
    assert dx is None or error(dx, dx_expected) < 0.05


def _planned_for(plain):
    """Of the model without what it gives away: a plan knows of GEMMs."""
    without = _Base()
    without.load_state_dict(plain.state_dict())
    return _planned(without, _input())


def _run(model, dynamic, grad):
    torch._dynamo.reset()
    step = torch.compile(model, backend=JointBackend(), dynamic=dynamic, fullgraph=True)
    for batch in (5, 8) if dynamic else (8,):
        x = _input(batch=batch).requires_grad_(grad)
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
            y = step(x)
    if grad:
        sum(each.float().square().sum() for each in y).backward()
    return [each.detach() for each in y], x.grad


def test_memory_that_is_shared_stays_so():
    """Of a product and its transpose, where a caller writes to one of them."""
    plain = _Shown(lambda y: (y, y.mT))
    torch._dynamo.reset()
    step = torch.compile(loka.convert(copy.deepcopy(plain), _planned_for(plain)), backend=JointBackend())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        _, y, across = step(_input())
    y.add_(100.0)
    assert torch.equal(across.mT, y)


def test_a_product_that_is_looked_at_is_left_as_it_was():
    for look, products in (
        (lambda y: (y,), [[COLUMNS, OUT], [OUT, COLUMNS]]),
        (lambda y: (y + 1,), [[2 * OUT, COLUMNS]]),
    ):
        plain = _Shown(look)
        backend = JointBackend()
        torch._dynamo.reset()
        step = torch.compile(loka.convert(copy.deepcopy(plain), _planned_for(plain)), backend=backend)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            step(_input())
        assert _products_of(backend.graphs[-1]) == products


class _Heads(_Base):
    """Attention by heads over rows that are kept, and a layer over tokens of them."""

    def forward(self, x, keep):
        rows = x[keep]
        q = rows.mT.unflatten(2, (4, 6)).transpose(1, 2)  # [B', 4, d, 6]
        mixed = torch.matmul(q, q.mT).mean((1, 2))[:, None]  # [B', 1, d]
        return self.mlp((F.silu(self.over(rows, self.first)) + mixed).flatten(1))


class _Columns(_Base):
    """Of columns that are kept; sums of elements that are chosen, whose number nobody knows."""

    def forward(self, x, keep):
        y = F.relu(self.over(x[:, :, keep], self.first))
        return self.mlp(y.mean(2, keepdim=True).expand(-1, -1, COLUMNS).flatten(1)) + y[y > 0.5].sum()


@pytest.mark.slow
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("case", [_Heads, _Columns])
def test_sides_that_only_the_data_tells(case, grad):
    plain, x = case(), _input(batch=8)
    keep = torch.arange(8 if case is _Heads else COLUMNS) % 3 != 0
    without = _Base()
    without.load_state_dict(plain.state_dict())
    model = loka.convert(plain, _planned(without, _input()))
    expected = _answer(model, x, keep, grad)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = _answer(torch.compile(model, backend=JointBackend(), fullgraph=True), x, keep, grad)
    assert error(found, expected) < 0.08


def _answer(model, x, keep, grad):
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
        return model(x, keep).detach().float()


@pytest.mark.slow
def test_a_graph_inside_of_the_graph_reads_what_follows_a_product():
    plain = _Shown(lambda y: (torch.cond(y.sum() > 0, lambda z: z + 1, lambda z: z - 1, (F.relu(y),)),))
    model = loka.convert(copy.deepcopy(plain), _planned_for(plain))
    torch._dynamo.reset()
    step = torch.compile(model, backend=JointBackend(), fullgraph=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        _, found = step(_input())
        _, expected = model(_input())
    assert error(found, expected) < 0.02


@pytest.mark.parametrize("sides", [(24, 1), (1, OUT)])
def test_a_weight_that_is_spread_over_more_than_the_batch(sides):
    class Spread(_Base):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(sides))

        def forward(self, x):
            y = torch.bmm(x.mT, self.weight.expand(len(x), 24, OUT)).mT
            return self.mlp((F.relu(y) + self.over(x, self.second)).flatten(1))

    plain, x = Spread().bfloat16(), _input().bfloat16()
    plan = _planned(copy.deepcopy(plain), x)
    torch._dynamo.reset()
    step = torch.compile(loka.convert(copy.deepcopy(plain), plan), backend=JointBackend(), fullgraph=True)
    with torch.no_grad():
        assert error(step(x).float(), loka.convert(copy.deepcopy(plain), plan)(x).float()) < 0.05
