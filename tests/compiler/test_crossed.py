"""Cross layers of a frozen model, in their GEMM's own epilogue."""

import pytest
import torch
from converted import converted, error, plan_for, run
from joint import JointBackend
from small_models import Cross
from torch import nn
from torch.utils._pytree import tree_leaves

from loka.compiler.crossed import bound_of_rows, crossed_gemm
from loka.compiler.gemms import region_gemm
from loka.kernels.gemm.cross import longest_row
from loka.serve.sites import FrozenSite, freeze_weight

JOINED = "emulated:rowwise_e4m3_pow2"
ROWS, WIDTH, RANK = 70, 64, 32


def site(name, n, k):
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(len(name) + n)) / k**0.5
    return FrozenSite(name, JOINED, freeze_weight(JOINED, weight.bfloat16(), torch.bfloat16, joined=True), None)


class Crosses(nn.Module):
    """x [B, 64] -> [B, 32]: `layers` cross layers of low rank, whose formula is given, and a layer behind them."""

    def __init__(self, formula, layers=2, rank=RANK, dtype=torch.bfloat16):
        super().__init__()
        self.formula, self.layers = formula, layers
        self.v = [site(f"v{'.' * i}", rank, WIDTH) for i in range(layers)]
        self.w = [site(f"w{'.' * i}", WIDTH, rank) for i in range(layers)]
        self.bias = nn.ParameterList(0.3 * torch.randn(WIDTH).to(dtype) for _ in range(layers))
        self.top = site("top", 32, WIDTH)

    def forward(self, x):
        x0 = x
        for i in range(self.layers):
            x = self.formula(x0, self.w[i](self.v[i](x)), self.bias[i], x)
        return self.top(x)


FORMULAS = {
    "as written in the paper": lambda x0, y, b, x: x0 * (y + b) + x,
    "turned round": lambda x0, y, b, x: x + (b + y) * x0,
    "no bias": lambda x0, y, b, x: x0 * y + x,
    "nothing added": lambda x0, y, b, x: x0 * (y + b),
    "its own input": lambda x0, y, b, x: x * (y + b) + x,
    "views of the same shape": lambda x0, y, b, x: (x0 * (y.view(y.shape) + b)).view(x.shape) + x.view(x.shape),
}
OTHERS = {
    "y is read besides": lambda x0, y, b, x: x0 * (y + b) + x + y.mean(),
    "another activation": lambda x0, y, b, x: x0 * torch.tanh(y + b) + x,
    "twice the sum": lambda x0, y, b, x: torch.add(x0 * (y + b), x, alpha=2),
    "a matrix that is not quantized": lambda x0, y, b, x: torch.sigmoid(x0) * (y + b) + x,
    "a bias of each row": lambda x0, y, b, x: x0 * (y + b[: y.shape[0], None].sum(0) + x.sum(1, keepdim=True)) + x,
    "a number of the host": lambda x0, y, b, x: x0 * (y + 1.0) + x,
}


def answered(model, x):
    backend = JointBackend()
    torch._dynamo.reset()
    with torch.no_grad():
        eagerly, compiled = model(x), torch.compile(model, backend=backend)(x)
    return backend, eagerly, compiled


def exact(model, x):
    """In float32 throughout, by the weights in eight bits."""
    for each in (*model.v, *model.w, model.top):
        low, _ = each.weight.low, each.weight.sides
        each.plain = low.data.float() * low.scale[0]
    x0 = x = x.float()
    for i in range(model.layers):
        y = x @ model.v[i].plain.t() @ model.w[i].plain.t()
        x = model.formula(x0, y, model.bias[i].float(), x)
    return x @ model.top.plain.t()


def rows(seed=0, count=ROWS):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("name", FORMULAS)
def test_a_cross_layer_is_one_kernel(name):
    model, x = Crosses(FORMULAS[name]), rows()
    backend, eagerly, compiled = answered(model, x)
    assert backend.count(crossed_gemm) == backend.count(bound_of_rows) == 2
    assert backend.count(region_gemm) == 3
    assert not backend.apart
    truth = exact(model, x)
    # Both round the same operands to eight bits, at other scales; the eager one rounds to bfloat16 more often.
    assert error(compiled.float(), truth) <= 1.1 * error(eagerly.float(), truth)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_none_is_left(name):
    model, x = Crosses(OTHERS[name]), rows()
    backend, eagerly, compiled = answered(model, x)
    assert not backend.count(crossed_gemm)
    assert error(compiled.float(), eagerly.float()) < 0.05


def test_only_what_others_read_is_written():
    class Returned(Crosses):
        def forward(self, x):
            x0 = x
            for i in range(self.layers):
                x = self.formula(x0, self.w[i](self.v[i](x)), self.bias[i], x)
            return self.top(x), x

    formula = FORMULAS["as written in the paper"]
    for model, kept in ((Crosses(formula), [True, False]), (Returned(formula), [True, True])):
        backend, eagerly, compiled = answered(model, rows())
        (graph,) = backend.graphs
        assert [node.args[-1] for node in graph.nodes if node.target is crossed_gemm] == kept
        for one, other in zip(*map(tree_leaves, (eagerly, compiled)), strict=True):
            assert error(other.float(), one.float()) < 0.05


@pytest.mark.parametrize("count", [1, 3, 130])
def test_a_row_is_answered_alike_whatever_is_beside_it(count):
    """Its scale is of the row alone: nothing saturates where another row is 10^6 times larger."""
    model, x = Crosses(FORMULAS["as written in the paper"]), rows(count=count)
    _, _, compiled = answered(model, torch.cat([x, 1e6 * rows(1, 5), torch.zeros(2, WIDTH).bfloat16()]))
    _, _, alone = answered(model, torch.cat([x, rows(1, 7)]))
    assert torch.equal(compiled[:count], alone[:count])
    assert bool(compiled.isfinite().all())
    _, _, compiled = answered(
        model, torch.cat([x, torch.full((1, WIDTH), torch.nan).bfloat16(), torch.zeros(6, WIDTH).bfloat16()])
    )
    assert torch.equal(compiled[:count], alone[:count])
    assert bool(compiled[count].isnan().all())


def test_long_sums_and_other_dtypes_are_left(monkeypatch):
    monkeypatch.setattr("loka.compiler.crossed._LONG", RANK - 1)
    backend, *_ = answered(Crosses(FORMULAS["no bias"]), rows())
    assert not backend.count(crossed_gemm)


def test_training_is_left():

    model, x = Cross(), torch.randn(ROWS, 64)
    backend = JointBackend()
    run(torch.compile(converted(model, plan_for(model, x)), backend=backend), x)
    assert backend.count(region_gemm)
    assert not backend.count(crossed_gemm)


def test_the_longest_row():
    held = site("w", WIDTH, RANK).weight
    wide = held.low.data.float() * held.low.scale[0]
    assert torch.allclose(held.longest, wide.norm(dim=1).amax().reshape(1), rtol=1e-6)
    assert float(longest_row(held.low.data[:0], held.low.scale)) == 0
