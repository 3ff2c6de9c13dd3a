import pytest
import torch
import torch.nn.functional as F
from forced import force, probe, runs
from oracle import ROW
from small_towers import EAGER_FIRST
from torch import nn

import loka
from loka.nn.site import site_forwards


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return F.linear(torch.tanh(self.lin(x)), self.lin.weight)


class Tied(nn.Module):
    """The other's weight by another name."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 64)
        self.lin = nn.Linear(64, 64, bias=False)
        self.lin.weight = self.table.weight

    def forward(self, x):
        return self.lin(torch.tanh(F.linear(x, self.table.weight)))


class Inner(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = w

    def forward(self, x):
        return x @ self.w


class Raw(nn.Module):
    """The one inside has no module of torch's either."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(64, 64) / 8)
        self.lin = Inner(self.w)

    def forward(self, x):
        return torch.tanh(self.lin(x)) @ self.w


@EAGER_FIRST
@pytest.mark.parametrize("build", [Twice, Tied, Raw])
def test_what_a_plan_keeps_in_hp_inside_of_a_site_stays_there(build, compiled):
    torch.manual_seed(0)
    model, x = build(), torch.randn(128, 64, requires_grad=True)
    stats = probe(model, lambda: model(x).square().mean().backward())
    sites = stats.model.layers
    assert len(sites) == 2
    (inner,) = [path for path, shape in sites.items() if (shape.use.caller if shape.use else path) == "lin"]
    (outer,) = set(sites) - {inner}
    seen = []
    model.lin.register_forward_hook(lambda module, args, y: seen.append((args[0].detach(), y.detach())))
    loka.convert(model, force(stats, ROW, **{f"{inner}/*": "hp"}))
    if compiled:
        model.compile()
    model(x).square().mean().backward()
    assert runs(model) == {f"{outer}/{gemm}": 1 for gemm in ("output", "grad_input", "grad_weight")}
    if not compiled:
        ((given, y),) = seen
        assert torch.equal(y, given @ (model.lin.w if build is Raw else model.lin.weight.t()))
    assert not site_forwards(loka.revert(model))


class Product(Twice):
    def forward(self, x):
        return torch.tanh(self.lin(x)) @ self.lin.weight.t()


def test_a_site_in_hp_by_one_gemm_is_not_taken_for_the_one_around_it():
    """What computes it is `a @ b.t()` too."""
    torch.manual_seed(0)
    model, x = Product(), torch.randn(128, 64)
    stats = probe(model, lambda: model(x).square().mean().backward())
    loka.convert(model, force(stats, ROW, **{"lin/output": "hp"}))
    model(x).square().mean().backward()
    whole = {f"lin#2/{gemm}": 1 for gemm in ("output", "grad_input", "grad_weight")}
    assert runs(model) == {**whole, "lin/grad_weight": 1}


class ByHooks(nn.Module):
    """Adapters as hooks: of a layer, on its input and its output, and of the whole model."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(64, 64)
        self.down, self.up, self.last = (nn.Parameter(torch.randn(64, 64) / 8) for _ in range(3))
        self.lin.register_forward_hook(lambda module, args, out: out + args[0] @ self.down @ self.up)
        self.register_forward_hook(lambda module, args, out: out @ self.last)

    def forward(self, x):
        return torch.tanh(self.lin(x))


@EAGER_FIRST
def test_what_a_hook_multiplies_runs_in_its_callers_forward(compiled):
    """It was named a site of the hooked layer, whose forward is over: planned in FP8, and run in high precision."""
    torch.manual_seed(0)
    model, x = ByHooks(), torch.randn(32, 64)
    stats = probe(model, lambda: model(x).square().mean().backward())
    assert set(stats.layers) == {"lin", "down", "up"}
    assert "a hook of the whole model" in stats.skipped["last"]
    loka.convert(model, force(stats))
    (torch.compile(model, backend="aot_eager") if compiled else model)(x).square().mean().backward()
    assert set(runs(model).values()) == {1}


def test_what_a_hook_of_the_whole_model_multiplies_is_skipped_inside_of_a_wrapper_too():
    """It was a site of the model, planned in FP8, and never run. So was what a hook multiplies ahead of the forward."""
    torch.manual_seed(0)
    model, x = ByHooks(), torch.randn(32, 64)
    model.first = nn.Parameter(torch.randn(64, 64) / 8)
    model.register_forward_pre_hook(lambda module, args: (args[0] @ model.first,))
    wrapped = torch.compile(model, backend="eager")
    stats = probe(wrapped, lambda: wrapped(x).square().mean().backward())
    assert set(stats.layers) == {"lin", "down", "up"}
    for name in ("first", "last"):
        assert "a hook of the whole model" in stats.skipped[name]
    loka.convert(model, force(stats))
    wrapped(x).square().mean().backward()
    assert set(runs(model).values()) == {1}
