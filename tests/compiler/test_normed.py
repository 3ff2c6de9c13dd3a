import pytest
import torch
import torch.nn.functional as F
from converted import assert_as_good, converted, error, gradients, plan_for, run
from joint import JointBackend
from sweeps import sweep
from torch import nn

import loka
from loka.compiler import normed
from loka.compiler.edges.epilogues import matched
from loka.compiler.normed import normed_gemm
from loka.core.recipe import Gemm
from loka.core.records.report import HP
from loka.kernels.edge.op import edge
from loka.kernels.edge.program import Kind, Program, Step
from loka.kernels.gemm.epilogue import Activation
from loka.nn import BlockNorm

X = torch.randn(70, 64, generator=torch.Generator().manual_seed(1))
ACTIVATIONS = {
    Activation.NONE: nn.Identity,
    Activation.HARD_SWISH: nn.Hardswish,
    Activation.RELU: nn.ReLU,
    Activation.SWISH: nn.SiLU,
    Activation.GELU: nn.GELU,
}


def tower(activation=Activation.HARD_SWISH, block=64):
    torch.manual_seed(0)
    make = ACTIVATIONS[activation]
    return nn.Sequential(
        nn.Linear(64, 128, bias=False), BlockNorm(128, block), make(),
        nn.Linear(128, 256, bias=False), BlockNorm(256, block), make(),
        nn.Linear(256, 32),
    )  # fmt: skip


def compiled(model, x=X, **options):
    plan = plan_for(model, x, **options)
    by_site, joined = (converted(model, plan) for _ in range(2))
    return by_site, joined, JointBackend()


def check(model, epilogues, x=X, **options):
    """That joined it is as good as by sites, with so many GEMMs that have an epilogue."""
    by_site, joined, backend = compiled(model, x, **options)
    truth, theirs, ours = (run(m, x) for m in (model, by_site, torch.compile(joined, backend=backend)))
    assert not backend.apart
    assert backend.count(normed_gemm) == epilogues
    assert_as_good(joined, by_site, model, ours, theirs, truth)
    return backend


@pytest.mark.parametrize("activation", sweep(Activation, list(Activation)[:2]), ids=str)
def test_towers_have_no_edge_in_forward_but_the_first(activation):
    backend = check(tower(activation), 2)
    forward = next(graph for graph in backend.graphs if any(n.target is normed_gemm for n in graph.nodes))
    assert sum(node.target is edge for node in forward.nodes) == 1
    kept = [node.meta["val"] for node in forward.find_nodes(op="output")[0].all_input_nodes]
    # y is not among what is kept for backward: a byte an element is, and its input in FP8.
    assert not [v for v in kept if v.dim() == 2 and v.shape[1] >= 128 and v.dtype.itemsize > 1]
    assert len([v for v in kept if v.dtype == torch.uint8]) == 2


def test_one_block_is_a_whole_row():
    model = nn.Sequential(nn.Linear(64, 128, bias=False), BlockNorm(128, 128), nn.SiLU(), nn.Linear(128, 32))
    check(model, 1)


class RmsNorm(nn.Module):
    """Written by hand, as users do."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 256, bias=False), nn.Linear(256, 32)

    def forward(self, x):
        y = self.first(x).unflatten(-1, (4, 64)).float()
        y = y / torch.sqrt(y.square().mean(dim=-1, keepdim=True) + 1e-5)
        return self.second(F.relu(y.flatten(-2)).to(x.dtype))


class TwoReaders(RmsNorm):
    def __init__(self):
        super().__init__()
        self.norm, self.third = BlockNorm(256, 64), nn.Linear(256, 32)

    def forward(self, x):
        h = F.silu(self.norm(self.first(x)))
        return self.second(h) * self.third(h)


def test_a_norm_written_in_other_words_stays_an_edge():
    check(RmsNorm(), 0)


def test_two_sites_may_read_it():
    check(TwoReaders(), 1)


class Kept(TwoReaders):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.gamma = nn.Parameter(torch.rand(256))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        y = self.first(x)
        h = F.silu(self.norm(y) * self.gamma if self.how == "gamma" else self.norm(y))
        out = self.second(h)
        if self.how == "added":
            out = out + h[:, :32]
        if self.how == "its GEMM's output":
            out = out + y[:, :32]
        if self.how == "by a layer":
            out = out + self.third(y)
        if self.how == "returned":
            out = torch.cat([out, h], dim=1)
        if self.how == "written outside":
            self.seen.copy_(h.detach().float().mean())
        return out


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


@pytest.mark.parametrize("how", sweep(ENDINGS, ("head", "added", "tokens")))
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


@pytest.mark.parametrize("how", ["its GEMM's output", "the norm's output"])
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


def _deep():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64, bias=False), BlockNorm(64, 64), nn.SiLU()) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(64, 32))


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


@pytest.mark.parametrize(("size", "all_of_them"), [(1e-20, True), (1e-9, True), (1e-8, True), (1e-7, False)])
def test_rows_that_vanish_in_forward_vanish_in_backward(size, all_of_them):
    """Their x8 is zero, so that each norm behind divides by the root of eps: by gradients that did not know it, rows
    of 1e-8 had weights' gradients wrong by 20 times their size. The rest is what two of 70 rows contribute.
    """
    model, x = _deep(), _with_rows(X, size)
    _, joined, backend = compiled(model, x)
    _, (expected,) = run(model, x)
    _, (found,) = run(torch.compile(joined, backend=backend), x)
    true, ours = gradients(model), gradients(joined)
    assert max(error(ours[name], true[name]) for name in true) < 0.3
    others = [row for row in range(70) if row not in (5, 69)]
    assert error(found[others], expected[others]) < 0.2
    assert (found[[5, 69]] == 0).all() == all_of_them


def test_without_autocast_a_tower_ends_in_float32_outside_of_its_gemm():
    model = tower()[:6]
    by_site, joined = (converted(model, plan_for(model, X, autocast=False)) for _ in range(2))
    backend = JointBackend()
    truth, theirs = (run(m, X, autocast=False) for m in (model, by_site))
    ours = run(torch.compile(joined, backend=backend), X, autocast=False)
    assert backend.count(normed_gemm) == 1
    assert_as_good(joined, by_site, model, ours, theirs, truth)


@pytest.mark.parametrize(
    "how",
    sweep(
        ("gamma", "added", "its GEMM's output", "by a layer", "returned", "written outside"),
        ("added", "by a layer", "returned"),
    ),
)
def test_what_is_read_elsewhere_in_forward_is_not_taken_away(how):
    check(Kept(how), 0)


@pytest.mark.parametrize(
    ("features", "block", "bias"), [(96, 32, False), (192, 96, False), (128, 64, True), (160, 64, False)]
)
def test_what_no_kernel_does_stays_an_edge(features, block, bias):
    """Blocks that are none of a tile's, a last one that is shorter, a bias before the norm."""
    model = nn.Sequential(
        nn.Linear(64, features, bias=bias), BlockNorm(features, block), nn.ReLU(), nn.Linear(features, 32)
    )
    check(model, 0)


def test_sums_that_a_plan_has_exact_stay_exact(monkeypatch):
    taken, run_it = [], normed.gemm_normed
    monkeypatch.setattr(normed, "gemm_normed", lambda *given, fast, **o: taken.append(fast) or run_it(*given, **o))
    low, one = torch.ones(64, 64).to(torch.float8_e4m3fn), torch.ones(1)
    for kernel in ("torch", "torch_fast"):
        normed_gemm(low, one, low, one, None, "it", kernel, 64, 1e-6, "relu", torch.bfloat16, False)
    assert taken == [False, True]


def test_inference_keeps_nothing():
    model = tower()
    by_site, joined, backend = compiled(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected, theirs = model(X), by_site(X)
        ours = torch.compile(joined, backend=backend)(X)
    assert error(ours, expected) <= 1.3 * error(theirs, expected) + 0.005
    ops = [node for graph in backend.graphs for node in graph.nodes if node.target is normed_gemm]
    assert len(ops) == 2
    assert not any(node.meta["val"][2].numel() for node in ops)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_and_is_flagged(bad):
    _, joined, backend = compiled(tower())
    x = X.clone()
    x[7, 3] = bad
    y, (grad,) = run(torch.compile(joined, backend=backend), x)
    assert y.isnan().any(dim=1).nonzero().tolist() == [[7]]
    assert grad.isnan().any(dim=1).nonzero().tolist() == [[7]]
    health = loka.health_of(joined)
    assert all(health[f"{layer}/output"]["bad_a"] for layer in "036")


def test_weights_that_are_not_finite_are_seen_behind_them():
    model = tower()
    _, joined, backend = compiled(model)
    with torch.no_grad():
        joined[0].weight[70, 5] = torch.inf  # in the second block of two
    y, _ = run(torch.compile(joined, backend=backend), X)
    assert y.isnan().all()
    assert loka.health_of(joined)["3/output"]["bad_a"]


def test_dynamic_rows_and_none():
    model = tower()
    _, joined, backend = compiled(model)
    step = torch.compile(joined, backend=backend, dynamic=True, fullgraph=True)
    for rows in (48, 70, 33):
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
        assert error(run(step, x)[0], run(model, x)[0]) < 0.15
    assert backend.count(normed_gemm) == 2
    assert run(step, X[:0])[0].shape == (0, 32)


def test_training_follows_site_by_site():
    """Thirty steps from the same start: what backward keeps in eight bits does not add up."""
    model = tower()
    by_site, joined, backend = compiled(model)
    target = torch.randn(70, 32, generator=torch.Generator().manual_seed(5))
    losses = []
    for each in (model, by_site, joined):
        step = torch.compile(each, backend=backend) if each is joined else each
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        for _ in range(30):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(step(X).float(), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    start = F.mse_loss(torch.zeros_like(target), target).item()
    assert losses[0] < 0.9 * start
    assert abs(losses[2] - losses[0]) <= 2 * abs(losses[1] - losses[0]) + 0.01 * start


def _program(**changes):
    steps = (
        Step("square", (0,)), Step("block_sum", (1,)), Step("mul", (2, 1 / 64)), Step("add", (3, 1e-6)),
        Step("rsqrt", (4,)), Step("mul", (5, 0)), Step("relu", (6,)),
    )  # fmt: skip
    given = {"features": 128, "block": 64, "leaves": (Kind.FULL,), "steps": steps, "gradient": 7, "row": True}
    return Program(**{**given, **changes})


def test_a_formula_is_known_exactly_or_not_at_all():
    found = matched(_program())
    assert (found.epilogue.block, found.epilogue.eps, found.inverse_rms) == (64, 1e-6, 5)
    assert found.epilogue.activation is Activation.RELU
    steps = list(_program().steps)
    for place, other in (
        (2, Step("mul", (2, 1 / 65))),  # another mean
        (3, Step("add", (3, -1e-6))),
        (4, Step("sqrt", (4,))),
        (5, Step("div", (5, 0))),
        (6, Step("tanh", (6,))),
        (0, Step("mul", (0, 2.0))),
    ):
        changed = (*steps[:place], other, *steps[place + 1 :])
        assert matched(_program(steps=changed)) is None, other
    assert matched(_program(gradient=6)).epilogue.activation is Activation.NONE
    assert matched(_program(column=True)) is None
    assert matched(_program(sums=(7,))) is None
    assert matched(_program(values=(6,), value_dtypes=("float32",))) is None
    assert matched(_program(values=(5,), value_dtypes=("float32",))) is not None
    assert matched(_program(gradient=None, row=False)) is None


def test_norms_of_one_bound_share_its_scale():
    """A constant that a GEMM reads is a launch, one for each norm before."""
    torch.manual_seed(0)
    model = nn.Sequential(*[
        nn.Sequential(nn.Linear(64, 64, bias=False), BlockNorm(64, 64), nn.Hardswish()) for _ in range(4)
    ]).eval()  # fmt: skip
    _, joined, backend = compiled(model)
    with torch.no_grad():
        torch.compile(joined, backend=backend)(X)
    assert backend.count(normed_gemm) == 3
    fills = [n for n in backend.graphs[0].nodes if n.target is torch.ops.aten.full.default and n.args[0]]
    assert len(fills) == 1  # the norms' bound; the last result is in 16 bits


@pytest.mark.parametrize(("rows", "epilogues"), [(70, 2), (6400, 3)])
def test_few_tiles_with_long_sums_have_no_epilogue(rows, epilogues):
    torch.manual_seed(0)
    sides = ((64, 64), (64, 1024), (1024, 64), (64, 64))
    blocks = [nn.Sequential(nn.Linear(*s, bias=False), BlockNorm(s[1], 64), nn.ReLU()) for s in sides]
    _, joined, backend = compiled(nn.Sequential(*blocks).eval())
    with torch.no_grad():
        torch.compile(joined, backend=backend)(X[:1].expand(rows, 64).contiguous())
    assert backend.count(normed_gemm) == epilogues
