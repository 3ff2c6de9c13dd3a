"""Gradients that are cut out of a larger matrix leave a graph without gaps (compiler/layout/gradients.py)."""

import copy

import pytest
import torch
from converted import converted, plan_for
from joint import JointBackend
from sweeps import sweep
from torch import nn

from loka.compiler import lower
from loka.compiler.emit import COPY

WIDTH, FIELDS = 16, 3


class _Ranker(nn.Module):
    """Pooled embeddings beside dense features, crossed or not."""

    def __init__(self, *, crossed):
        super().__init__()
        wide = WIDTH * (FIELDS + 1)
        self.bottom = nn.Linear(WIDTH, WIDTH)
        self.cross = nn.Sequential(nn.Linear(wide, WIDTH), nn.Linear(WIDTH, wide)) if crossed else None
        self.top = nn.Linear(wide, 32)

    def forward(self, embeddings, dense):
        x = torch.cat((self.bottom(dense).relu().unsqueeze(1), embeddings), dim=1).flatten(1)
        if self.cross is not None:
            x = x * self.cross(x) + x
        return self.top(x).relu()


def _inputs(rows=8):
    """Embeddings as autocast has them: a cast of a gradient would be a kernel that can lay it as it likes."""
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(rows, FIELDS, WIDTH, generator=generator).bfloat16()
    return embeddings, torch.randn(rows, WIDTH, generator=generator)


def _gradients(model, plan, *, dynamic=False, rows=8):
    """Those of the inputs and all weights as the graph returns them, and its copies of pieces."""
    torch._dynamo.reset()
    backend = JointBackend()
    step = torch.compile(converted(model, plan), backend=backend, dynamic=dynamic)
    for many in (8, 6) if dynamic else (rows,):
        embeddings, dense = _inputs(many)
        embeddings.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = step(embeddings, dense)
        found = torch.autograd.grad(y.float().square().sum(), [embeddings, *step.parameters()])
    return found, backend.count(COPY)


@pytest.mark.parametrize("dynamic", sweep([False, True], [True]))
def test_pieces_of_what_one_kernel_computes_have_no_gaps(dynamic, monkeypatch):
    model = _Ranker(crossed=True)
    plan = plan_for(copy.deepcopy(model), *_inputs())
    found, copies = _gradients(model, plan, dynamic=dynamic)
    monkeypatch.setattr(lower, "close_gaps", lambda emitter: None)
    expected, before = _gradients(model, plan, dynamic=dynamic)
    assert (found[0].is_contiguous(), expected[0].is_contiguous()) == (True, False)
    assert copies == before + 1
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_pieces_of_a_product_are_not_copied(monkeypatch):
    """That would be a kernel more, which nobody may need."""
    model = _Ranker(crossed=False)
    plan = plan_for(copy.deepcopy(model), *_inputs())
    found, copies = _gradients(model, plan)
    monkeypatch.setattr(lower, "close_gaps", lambda emitter: None)
    assert copies == _gradients(model, plan)[1]
    assert not found[0].is_contiguous()


@pytest.mark.slow
def test_one_row_has_no_gaps(monkeypatch):
    """Whatever its strides are."""
    model = _Ranker(crossed=True)
    plan = plan_for(copy.deepcopy(model), *_inputs())
    found, copies = _gradients(model, plan, rows=1)
    monkeypatch.setattr(lower, "close_gaps", lambda emitter: None)
    assert copies == _gradients(model, plan, rows=1)[1]
    assert found[0].is_contiguous()
