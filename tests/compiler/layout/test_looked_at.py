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
from test_tokens import COLUMNS, OUT, _Base, _input, _planned

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


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("case", LOOKS)
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


def test_an_output_with_a_symbolic_stride_lies_as_written():
    """Of sequences of any length, without gradients."""

    class Lengths(_Base):
        def __init__(self):
            super().__init__()
            self.mlp = torch.nn.Sequential(torch.nn.Linear(OUT, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))

        def forward(self, x):
            y = F.relu(self.over(x, self.first))
            logits = self.mlp(y.mean(2))
            return logits if self.training else (logits, y)

    plain = Lengths()
    torch._dynamo.reset()
    model = loka.convert(copy.deepcopy(plain), _planned(copy.deepcopy(plain), _input())).eval()
    step = torch.compile(model, backend=JointBackend(), dynamic=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for length in (COLUMNS, COLUMNS + 2):
            _, y = step(_input(columns=length))
    assert y.stride() == ((COLUMNS + 2) * OUT, 1, OUT)


@pytest.mark.parametrize("sides", [(24, 1), (1, OUT), (1, 1)])
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
