import pytest
import torch
import torch.nn.functional as F
from converted import error, run
from normed_towers import X, check, compiled, tower
from sweeps import sweep
from torch import nn

import loka
from loka.compiler import normed
from loka.compiler.edges.epilogues import matched
from loka.compiler.normed import normed_gemm
from loka.kernels.edge.op import edge
from loka.kernels.edge.program import Kind, Program, Step
from loka.kernels.gemm.epilogue import Activation
from loka.nn import BlockNorm


@pytest.mark.parametrize("activation", sweep(Activation, list(Activation)[1:2]), ids=str)
def test_towers_have_no_edge_in_forward_but_the_first(activation):
    backend = check(tower(activation), 2)
    forward = next(graph for graph in backend.graphs if any(n.target is normed_gemm for n in graph.nodes))
    assert sum(node.target is edge for node in forward.nodes) == 1
    kept = [node.meta["val"] for node in forward.find_nodes(op="output")[0].all_input_nodes]
    # y is not among what is kept for backward: a byte an element is, and its input in FP8.
    assert not [v for v in kept if v.dim() == 2 and v.shape[1] >= 128 and v.dtype.itemsize > 1]
    assert len([v for v in kept if v.dtype == torch.uint8]) == 2


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "how", sweep(("gamma", "added", "its GEMM's output", "by a layer", "returned", "written outside"), ("by a layer",))
)
def test_what_is_read_elsewhere_in_forward_is_not_taken_away(how):
    check(Kept(how), 0)


@pytest.mark.parametrize(
    ("features", "block", "bias"),
    sweep([(96, 32, False), (192, 96, False), (128, 64, True), (160, 64, False)], [(192, 96, False), (160, 64, False)]),
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


@pytest.mark.parametrize("bad", sweep([torch.nan, torch.inf], [torch.nan]))
def test_what_is_not_finite_shows_and_is_flagged(bad):
    _, joined, backend = compiled(tower())
    x = X.clone()
    x[7, 3] = bad
    y, (grad,) = run(torch.compile(joined, backend=backend), x)
    assert y.isnan().any(dim=1).nonzero().tolist() == [[7]]
    assert grad.isnan().any(dim=1).nonzero().tolist() == [[7]]
    health = loka.health_of(joined)
    assert all(health[f"{layer}/output"]["bad_a"] for layer in "036")


@pytest.mark.slow
def test_weights_that_are_not_finite_are_seen_behind_them():
    model = tower()
    _, joined, backend = compiled(model)
    with torch.no_grad():
        joined[0].weight[70, 5] = torch.inf  # in the second block of two
    y, _ = run(torch.compile(joined, backend=backend), X)
    assert y.isnan().all()
    assert loka.health_of(joined)["3/output"]["bad_a"]


@pytest.mark.slow
def test_dynamic_rows_and_none():
    model = tower()
    _, joined, backend = compiled(model)
    step = torch.compile(joined, backend=backend, dynamic=True, fullgraph=True)
    for rows in (48, 70, 33):
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
        assert error(run(step, x)[0], run(model, x)[0]) < 0.15
    assert backend.count(normed_gemm) == 2
    assert run(step, X[:0])[0].shape == (0, 32)


@pytest.mark.slow
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


@pytest.mark.parametrize(("rows", "epilogues"), sweep([(70, 2), (6400, 3)], [(6400, 3)]))
def test_few_tiles_with_long_sums_have_no_epilogue(rows, epilogues):
    torch.manual_seed(0)
    sides = ((64, 64), (64, 1024), (1024, 64), (64, 64))
    blocks = [nn.Sequential(nn.Linear(*s, bias=False), BlockNorm(s[1], 64), nn.ReLU()) for s in sides]
    _, joined, backend = compiled(nn.Sequential(*blocks).eval())
    with torch.no_grad():
        torch.compile(joined, backend=backend)(X[:1].expand(rows, 64).contiguous())
    assert backend.count(normed_gemm) == epilogues
