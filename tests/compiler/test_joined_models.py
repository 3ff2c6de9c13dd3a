"""Joined, a model computes what its sites compute one by one, within the rounding of FP8.

Both quantize activations and gradients by the same rule, weights under a scale of each row or of the tensor,
so neither is nearer to high precision than the other. What differs most is where values are rounded to
bfloat16, which flips roundings to e4m3: two results with errors of size e of their own are up to sqrt(2) e
apart.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from converted import INT8, assert_as_good, converted, error, fp8_sites, gradients, plan_for, run
from joint import JointBackend
from small_models import MODELS, made
from sweeps import sweep
from torch import nn
from torch.utils.checkpoint import checkpoint

import loka
from loka.compiler.gemms import region_gemm
from loka.compiler.normed import normed_gemm
from loka.kernels.edge.op import edge
from loka.nn.site_ops import site_backward, site_forward

ROWS = (100,)  # no multiple of 16


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", sweep(MODELS, ("relu", "tokens")))
def test_joined_is_as_good_as_site_by_site(name, rows):
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))
    plain = made(name)
    plan = plan_for(plain, x)
    eager, joined = (converted(plain, plan) for _ in range(2))
    backend = JointBackend()
    expected = run(plain, x)
    by_site = run(eager, x)
    found = run(torch.compile(joined, backend=backend, fullgraph=True), x)
    assert not backend.apart
    assert backend.count(site_forward) == backend.count(site_backward) == 0
    assert backend.count(region_gemm) + backend.count(normed_gemm) == 3 * len(fp8_sites(plan))
    assert backend.count(edge)
    assert_as_good(joined, eager, plain, found, by_site, expected)


@pytest.mark.parametrize("name", sweep(("relu", "layer_norm_silu", "cross"), ("cross",)))
def test_dynamic_rows(name):
    """One graph for every batch; ragged ones too."""
    sizes = (48, 100, 33)
    plain = made(name)
    plan = plan_for(plain, torch.randn(64, 64))
    joined = converted(plain, plan)
    backend = JointBackend()
    step = torch.compile(joined, backend=backend, fullgraph=True, dynamic=True)
    for rows in sizes:
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
        expected, found = run(plain, x), run(step, x)
        assert error(found[0], expected[0]) < 0.15
        truth, ours = gradients(plain), gradients(joined)
        for parameter in (*plain.parameters(), *joined.parameters()):
            parameter.grad = None
        assert all(error(ours[n], truth[n]) < 0.4 for n in truth)
    assert len(backend.graphs) == 2  # forward and backward, once


class Fields(nn.Module):
    """Fields beside dense features. Where their number is a symbol, so is that of the features in a row: a guard knows
    it, and nothing that is computed from it."""

    def __init__(self):
        super().__init__()
        self.cross, self.top = nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 64)), nn.Linear(64, 32)

    def forward(self, dense, fields):
        x = torch.cat((dense.unsqueeze(1), fields), dim=1).flatten(1)
        return self.top(x * self.cross(x) + x).relu()


@pytest.mark.slow
def test_features_that_are_a_product_of_symbols():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 16, generator=generator), torch.randn(64, 3, 16, generator=generator)
    plain = Fields()
    plan = plan_for(plain, *inputs)
    eager, joined = (converted(plain, plan) for _ in range(2))
    backend = JointBackend()
    step = torch.compile(joined, backend=backend, fullgraph=True, dynamic=True)
    expected, by_site, found = run(plain, *inputs), run(eager, *inputs), run(step, *inputs)
    assert "cross.1" not in backend.apart  # whose gradient has such rows
    assert backend.count(region_gemm)
    assert_as_good(joined, eager, plain, found, by_site, expected)


def test_rows_that_are_a_quotient_of_symbols():
    """[B, 64] seen as tokens [B // 4, 4, 64]: a site has 4 (B // 4) rows, and no input has such a side."""
    plain = made("tokens")
    plan = plan_for(plain, torch.randn(64, 64))
    eager, joined = (converted(plain, plan) for _ in range(2))
    backend = JointBackend()
    step = torch.compile(joined, backend=backend, fullgraph=True, dynamic=True)
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    expected, by_site, found = run(plain, x), run(eager, x), run(step, x)
    assert not backend.apart
    assert_as_good(joined, eager, plain, found, by_site, expected)


@pytest.mark.slow
def test_without_autocast_and_in_bfloat16():
    for dtype in (torch.float32, torch.bfloat16):
        plain = made("relu").to(dtype)
        x = torch.randn(64, 64).to(dtype)
        plan = plan_for(plain, x, autocast=False)
        joined = converted(plain, plan)
        backend = JointBackend()
        expected = run(plain, x, autocast=False)
        found = run(torch.compile(joined, backend=backend), x, autocast=False)
        assert backend.count(region_gemm)
        assert error(found[0], expected[0]) < 0.1
        assert {p.grad.dtype for p in joined.parameters() if p.grad is not None} == {dtype}


def test_inference_in_three_ways():
    plain = made("gated").eval()
    x = torch.randn(64, 64)
    plan = plan_for(plain, x)
    joined = converted(plain, plan).eval()
    expected = plain(x)
    for mode in (torch.no_grad, torch.inference_mode):
        backend = JointBackend()
        with mode(), torch.autocast("cpu", torch.bfloat16):
            found = torch.compile(joined, backend=backend)(x)
        assert backend.count(region_gemm) == 3
        assert error(found.float(), expected) < 0.1
    joined.requires_grad_(False)
    backend = JointBackend()
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(joined, backend=backend)(x)
    assert backend.count(region_gemm) == 3


def test_a_frozen_layer_gets_no_gradient_and_passes_one_on():
    plain = made("relu")
    x = torch.randn(64, 64)
    plan = plan_for(plain, x)
    plain[2].weight.requires_grad_(False)
    joined = converted(plain, plan)
    backend = JointBackend()
    expected, found = run(plain, x), run(torch.compile(joined, backend=backend), x)
    assert joined[2].weight.grad is None
    assert backend.count(region_gemm) == 8  # three layers of three, but for one grad_weight
    assert error(found[1][0], expected[1][0]) < 0.4


@pytest.mark.parametrize("bad", sweep([torch.nan, torch.inf, -torch.inf], [-torch.inf]))
def test_what_is_not_finite_is_neither_hidden_nor_spread(bad):
    plain = made("relu")
    x = torch.randn(64, 64)
    plan = plan_for(plain, x)
    joined = converted(plain, plan)
    x[5, 3] = bad
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.compile(joined, backend=JointBackend())(x)
    assert y[5].isnan().all()
    assert y[:5].isfinite().all()
    assert y[6:].isfinite().all()
    assert loka.health_of(joined)["0/output"]["bad_a"]
    y.float().sum().backward()
    assert joined[0].weight.grad.isnan().any()


@pytest.mark.parametrize("force", [None, pytest.param({"*/output": INT8}, marks=pytest.mark.slow)], ids=["fp8", "int8"])
@pytest.mark.parametrize("spoilt", ["input", "weight", "gradient"])
def test_flags_are_those_of_sites_by_themselves(spoilt, force):
    plain = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 32, bias=False))
    x, dy = torch.randn(48, 64), torch.randn(48, 32).bfloat16()
    plan = plan_for(plain, x, force=force)
    {"input": x, "weight": plain[2].weight.data, "gradient": dy}[spoilt][1, 2] = torch.nan
    eager, joined = (converted(plain, plan) for _ in range(2))
    for step in (eager, torch.compile(joined, backend=JointBackend())):
        with torch.autocast("cpu", torch.bfloat16):
            y = step(x.clone().requires_grad_())
        y.backward(dy)
    assert loka.regions(joined).complete
    assert loka.health_of(joined) == loka.health_of(eager)


def test_zero_rows_huge_and_tiny_values():
    joined = made("relu")
    x = torch.randn(64, 64)
    plan = plan_for(joined, x)
    plain = copy.deepcopy(joined)
    loka.convert(joined, plan)
    step = torch.compile(joined, backend=JointBackend())
    x[7] = 0
    x[8] *= 1e15
    x[9] *= 1e-15
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        found, expected = step(x).float(), plain(x).float()
    for row in range(64):  # each row has a scale of its own, so none suffers from another
        assert error(found[row], expected[row]) < 0.15


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 32)

    def forward(self, x, ids):
        x = F.dropout(torch.relu(self.first(x)), 0.5)
        return self.second(torch.where(ids == 0, 0.0, x))


def test_masks_are_read_as_masks():
    """Programs read neither random numbers nor integers; what is masked gets no gradient."""
    torch.manual_seed(0)
    model = Masked()
    x, ids = torch.randn(64, 64), torch.randint(0, 2, (64, 64))
    plan = plan_for(model, x, ids)
    loka.convert(model, plan)
    backend = JointBackend()
    y, (grad, _) = run(torch.compile(model, backend=backend), x, ids)
    assert loka.regions(model).complete
    edges = [node for graph in backend.graphs for node in graph.nodes if node.target is edge]
    dtypes = {leaf.meta["val"].dtype for node in edges for leaf in node.args[0]}
    assert torch.bool in dtypes
    assert not dtypes & {torch.int64, torch.float64}
    assert y.isfinite().all()
    assert grad.isfinite().all()
    model.zero_grad()
    everything_masked, _ = run(torch.compile(model, backend=JointBackend()), x, torch.zeros_like(ids))
    assert torch.equal(everything_masked, model.second.bias.to(torch.bfloat16).float().expand(64, 32))
    assert not gradients(model)["first.weight"].any()


def test_rows_whose_number_only_the_data_tells():
    """x[keep], captured in one graph: from some rows to none, forward waits for nothing of backward."""

    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 32)

        def forward(self, x, keep):
            return self.b(F.relu(self.a(x[keep])))

    torch.manual_seed(0)
    plain, x = Kept(), torch.randn(8, 64)
    keep = torch.tensor([True, False, True, True, False, True, True, True])
    plan = plan_for(plain, x, keep)
    eager, joined = (converted(plain, plan) for _ in range(2))
    backend = JointBackend()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        step = torch.compile(joined, backend=backend, fullgraph=True)
        for rows in (keep, ~keep, torch.zeros_like(keep)):
            for model in (plain, eager, joined):
                model.zero_grad()
            expected, by_site, found = run(plain, x, rows), run(eager, x, rows), run(step, x, rows)
            assert found[0].shape == (int(rows.sum()), 32)
            assert_as_good(joined, eager, plain, found, by_site, expected)
    assert not backend.apart
    assert backend.count(region_gemm)


class Shared(nn.Module):
    """Two layers behind a norm, which autocast leaves in float32: it casts for each. `apart`: by checkpoints."""

    def __init__(self, *, apart):
        super().__init__()
        self.norm, self.gate, self.up = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.down, self.apart = nn.Linear(64, 64), apart

    def part(self, layer, x):
        return checkpoint(layer, x, use_reentrant=False) if self.apart else layer(x)

    def forward(self, x):
        x = self.norm(x)
        return self.down(F.silu(self.part(self.gate, x)) * self.part(self.up, x))


@pytest.mark.parametrize("apart", sweep([False, True], [True]))
def test_what_autocast_casts_for_each_of_two_layers_is_quantized_once(apart):
    """But each checkpoint keeps what it recomputes to itself."""
    torch.manual_seed(0)
    plain, x = Shared(apart=apart), torch.randn(48, 64)
    plan = plan_for(plain, x)
    eager, joined = (converted(plain, plan) for _ in range(2))
    backend = JointBackend()
    expected, by_site = run(plain, x), run(eager, x)
    found = run(torch.compile(joined, backend=backend, fullgraph=True), x)
    assert_as_good(joined, eager, plain, found, by_site, expected)
    forward = [node for node in backend.graphs[0].nodes if node.target is edge]
    assert len(forward) == (3 if apart else 2)
