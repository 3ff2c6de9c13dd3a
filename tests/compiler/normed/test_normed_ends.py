"""The last layer of a tower, whose result no FP8 GEMM reads, and rows of next to nothing."""

import pytest
import torch
from converted import assert_as_good, converted, error, gradients, plan_for, run
from joint import JointBackend
from normed_towers import X, check, compiled, tower
from sweeps import sweep
from torch import nn

import loka
from loka.compiler.normed import normed_gemm
from loka.core.recipe import Gemm
from loka.core.records.report import HP
from loka.kernels.edge.op import edge
from loka.kernels.gemm.epilogue import Activation
from loka.nn import BlockNorm


class Ending(nn.Module):
    """A tower whose last matrix a head in high precision reads, or which is returned."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.how, self.tower = how, tower()[:6]
        self.head = nn.Linear(256, 1)

    def forward(self, x):
        h = self.tower(x)
        if self.how == "returned":
            return h
        if self.how == "added":
            return h + h.mean(dim=1, keepdim=True)
        if self.how == "in a concatenation":
            return torch.cat([h, x], dim=1)
        if self.how == "added up":
            return h.sum(dim=1)
        if self.how == "tokens":
            return h.unflatten(1, (4, 64)).amax(dim=1)
        if self.how == "in float32":
            return h.float() * 1.5
        return self.head(h)


ENDINGS = ("head", "returned", "added", "in a concatenation", "tokens", "in float32")


@pytest.mark.parametrize("how", sweep(ENDINGS, ("tokens",)))
def test_a_tower_ends_in_the_epilogue_of_its_last_gemm(how):
    model = Ending(how)
    force = {f"head/{gemm}": HP for gemm in Gemm} if how == "head" else None
    backend = check(model, 2, X.bfloat16(), force=force)  # with nothing to compute above the first layer's input
    graph = next(graph for graph in backend.graphs if any(n.target is normed_gemm for n in graph.nodes))
    ops = [node for node in graph.nodes if node.target is normed_gemm]
    assert [node.args[10] for node in ops] == [torch.float8_e4m3fn, torch.bfloat16]
    assert [node.args[4] is not None for node in ops] == [False, True]  # the last holds what counts runs
    assert not any(node.target is edge for node in graph.nodes)  # x is cast by plain ops
    kept = [node.meta["val"] for node in graph.find_nodes(op="output")[0].all_input_nodes]
    assert not [v for v in kept if v.dim() == 2 and v.shape[1] == 128 and v.dtype.itemsize > 1]


def test_the_last_epilogue_counts_as_a_run_and_shows_what_is_not_finite():
    _, joined, backend = compiled(Ending("returned"))
    x = X.clone()
    x[7, 3] = torch.nan
    y, (grad,) = run(torch.compile(joined, backend=backend), x)
    assert y.isnan().any(dim=1).nonzero().tolist() == [[7]]
    assert grad.isnan().any(dim=1).nonzero().tolist() == [[7]]
    health = loka.health_of(joined)
    assert all(health[f"tower.{layer}/output"]["bad_a"] for layer in "03")


class Elsewhere(Ending):
    def forward(self, x):
        y = self.tower[:4](x)
        normed = self.tower[4](y)
        h = self.tower[5](normed)
        return h + y if self.how == "its GEMM's output" else torch.cat([h, normed * 2], dim=1)


@pytest.mark.parametrize("how", sweep(["its GEMM's output", "the norm's output"], ["its GEMM's output"]))
def test_what_else_is_read_of_a_last_layer_is_not_taken_away(how):
    """A norm whose output two read has no activation in its epilogue: it is the matrix then."""
    check(Elsewhere(how), 1 if how == "its GEMM's output" else 2)


def test_behind_relu_backward_keeps_bytes_alone():
    """They have the signs of what the epilogue wrote, which nothing else in backward reads here."""
    model = Ending("added up")
    model.tower = tower(Activation.RELU)[:6]
    graph = check(model, 2, X.bfloat16()).graphs[0]
    kept = [node.meta["val"] for node in graph.find_nodes(op="output")[0].all_input_nodes]
    assert [v.dtype for v in kept if v.dim() == 2 and v.shape == (70, 256)] == [torch.uint8]


class Onward(Ending):
    """What a tower ends in is read, together with other values, by a layer in FP8."""

    def __init__(self):
        super().__init__("in a concatenation")
        self.next = nn.Linear(320, 64)

    def forward(self, x):
        return self.next(super().forward(x))


@pytest.mark.parametrize("trained", [True, False])
def test_layers_on_both_sides_of_a_last_epilogue_are_one_region(trained):
    _, joined, backend = compiled(Onward(), X.bfloat16())
    step = torch.compile(joined, backend=backend)
    with torch.set_grad_enabled(trained), torch.autocast("cpu", torch.bfloat16):
        step(X.bfloat16())
    assert backend.count(normed_gemm) == 2
    assert loka.regions(joined).applied == (("tower.0", "tower.3", "next"),)


def _deep(kind=nn.Sequential):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64, bias=False), BlockNorm(64, 64), nn.SiLU()) for _ in range(4)]
    return kind(*blocks, nn.Linear(64, 32))


class Watched(nn.Sequential):
    """A layer without backward is the first to read what another trains on."""

    def forward(self, x):
        h = self[1](self[0](x))
        with torch.no_grad():
            seen = self[4](h)
        return self[4](self[3](self[2](h))) + seen


def _with_rows(x, size):
    x = x.clone()
    x[[5, -1]] *= size
    return x


@pytest.mark.parametrize(("x", "frozen"), [(X, False), (X.bfloat16(), True)], ids=["edge", "cast"])
def test_rows_of_zeros_leave_the_gradients_of_weights_to_others(x, frozen):
    """Behind each norm a gradient is 1,000 times as large there as elsewhere; e4m3 has 18 powers of two."""
    model = _deep()
    model[1].requires_grad_(not frozen)
    check(model, 4, _with_rows(x, 0.0))


def test_a_norm_of_constant_rows_weighs_in_gradients_by_what_forward_had():
    """Backward has softplus(0) rounded to 16 bits and its mean in float32: their difference made a row of it that
    forward had no scale for. A norm behind multiplies the gradient by 1,000."""
    torch.manual_seed(0)
    norm = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Softplus(), nn.LayerNorm(64))
    model, x = nn.Sequential(norm, tower()[:2], nn.SiLU(), nn.Linear(128, 32)), _with_rows(X, 0.0)
    by_site, joined, backend = compiled(model, x)
    run(model, x), run(by_site, x), run(torch.compile(joined, backend=backend), x)
    truth, theirs, ours = (gradients(each)["1.0.weight"] for each in (model, by_site, joined))
    assert error(ours, truth) <= 1.3 * error(theirs, truth) + 0.02


VANISHING = [(1e-20, True), (1e-9, True), (1e-8, True), (1e-7, False)]


@pytest.mark.parametrize("kind", sweep([nn.Sequential, Watched], [nn.Sequential]))
@pytest.mark.parametrize(("size", "all_of_them"), sweep(VANISHING, VANISHING[1:2]))
def test_rows_that_vanish_in_forward_vanish_in_backward(size, all_of_them, kind):
    """Their x8 is zero, so that each norm behind divides by the root of eps: by gradients that did not know it, rows
    of 1e-8 had weights' gradients wrong by 20 times their size. The rest is what two of 70 rows contribute.
    """
    model, x = _deep(kind), _with_rows(X, size)
    _, joined, backend = compiled(model, x)
    _, (expected,) = run(model, x)
    _, (found,) = run(torch.compile(joined, backend=backend), x)
    true, ours = gradients(model), gradients(joined)
    assert max(error(ours[name], true[name]) for name in true) < 0.3
    others = [row for row in range(70) if row not in (5, 69)]
    assert error(found[others], expected[others]) < 0.2
    assert (found[[5, 69]] == 0).all() == all_of_them


@pytest.mark.slow
def test_without_autocast_a_tower_ends_in_float32_outside_of_its_gemm():
    model = tower()[:6]
    by_site, joined = (converted(model, plan_for(model, X, autocast=False)) for _ in range(2))
    backend = JointBackend()
    truth, theirs = (run(m, X, autocast=False) for m in (model, by_site))
    ours = run(torch.compile(joined, backend=backend), X, autocast=False)
    assert backend.count(normed_gemm) == 1
    assert_as_good(joined, by_site, model, ours, theirs, truth)
