from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from models import forced_plan, stats_of
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

import loka
from loka.core.exceptions import PlanMismatch
from loka.measurement import Settings

FP8 = "emulated:rowwise_e4m3"


class OwnAttention(nn.MultiheadAttention):
    """Calls torch's function by itself, as models that change what goes around it do."""

    def forward(self, x):
        x = x.transpose(0, 1)
        out, _ = F.multi_head_attention_forward(
            x, x, x, self.embed_dim, self.num_heads, self.in_proj_weight, self.in_proj_bias, None, None,
            False, 0.0, self.out_proj.weight, self.out_proj.bias, training=self.training, need_weights=False,
        )  # fmt: skip
        return out.transpose(0, 1)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(64, 32)
        self.attention = OwnAttention(32, 4)
        self.lazy = nn.LazyLinear(32)

    def forward(self, x):
        return self.lazy(self.attention(x)) @ self.items.weight.T  # whose owner is never called


@pytest.mark.slow
def test_each_runs_as_a_site_at_every_step_and_in_compiled_graphs():
    """Fails where parameters are noted in their owner's call alone, at the first sampled step alone, or where
    a function of torch that multiplies inside is run with the mode off."""
    torch.manual_seed(0)
    model, x = Heads(), torch.randn(8, 6, 32)
    model(x)
    with loka.Probe(model, every=1, effect_samples=0) as probe:
        for _ in range(3):
            model(x).square().mean().backward()
    stats = probe.stats()
    assert {path: layer.calls for path, layer in stats.layers.items()} == {
        "attention.in_proj_weight": 3,
        "attention.out_proj": 3,
        "lazy": 3,
        "items": 3,
    }
    reference = model(x)
    loka.convert(model, forced_plan(stats, FP8))
    compiled = torch.compile(model, backend="aot_eager")
    for call in (model, compiled):
        before = {site: counts["runs"] for site, counts in loka.health_of(model).items()}
        out = call(x)
        out.square().mean().backward()
        ran = {site: c["runs"] - before[site] for site, c in loka.health_of(model).items()}
        assert set(ran.values()) == {1}, ran
        assert (out - reference).norm() < 0.1 * reference.norm()
    loka.revert(model)
    assert torch.equal(model(x), reference)


def test_a_site_is_forced_and_kept_by_its_very_name():
    """Fails where brackets in names are read as patterns alone: `w[:16]` would match nothing."""

    class Slices(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(32, 32) * 0.1)

        def forward(self, x):
            return F.linear(F.linear(x, self.w), self.w[:16])

    model = Slices()
    stats = stats_of(model, torch.randn(64, 32), effect_samples=0)
    settings = Settings(rows=32, min_draws=2, max_draws=2)
    report = loka.measure(stats, device="cpu", candidates=[FP8], settings=settings)
    plan = loka.plan(report, loka.Budget(keep=("w[:16]",)), force={"w/output": "hp", "w[[]:16]/output": FP8})
    runs = {site: decision.candidate for site, decision in plan.decisions.items()}
    assert runs["w[:16]/output"] == FP8
    assert runs["w/output"] == "hp"
    assert runs["w[:16]/grad_input"] == runs["w[:16]/grad_weight"] == "hp"


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.rows = nn.Parameter(torch.randn(3, 32, 32)), nn.Parameter(torch.randn(2, 32))
        self.deep = nn.Parameter(torch.randn(2, 2, 32, 32))

    def forward(self, x):
        gates = (x @ self.rows[0]).unsqueeze(1)
        y = gates * sum(x @ v + F.gelu(x @ v.T) for v in self.w) + sum(x @ v for v in self.w[1:])
        y += sum(x @ v for w in self.deep for v in w)
        return y + torch.einsum("bi,io->bo", gates, self.rows)  # broadcasts, so is no site


@pytest.mark.slow
def test_experts_of_an_iteration_are_sites_in_compiled_graphs():
    """Dynamo tells no mode of items: they ran in high precision, a row beside them raised."""
    model, x = Mixture(), torch.randn(8, 32)
    loka.convert(model, forced_plan(stats_of(model, x, torch.sum, effect_samples=0), FP8))
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))
    assert [counts["runs"] for site, counts in loka.health_of(model).items() if site.endswith("/output")] == [2] * 13


class Experts(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, inputs, 48) * 0.1)

    def forward(self, x):
        return torch.bmm(x, self.w)


def experts(inputs=32):
    torch.manual_seed(0)
    model, x = Experts(inputs), torch.randn(4, 64, inputs)
    return model, x, stats_of(model, x, effect_samples=0)


def test_a_stack_of_one_input_is_measured():
    assert len(forced_plan(experts(1)[2], FP8).decisions) == 8, "output and grad_weight of four; x needs no gradient"


class Broadcast(Experts):
    def forward(self, x):
        return x @ self.w


@pytest.mark.parametrize("shape", [(0, 32), (1, 0, 32), (0, 4, 8, 32), (3, 4, 0, 32)], ids=str)
def test_stacks_take_no_rows(shape):
    model, x = Broadcast(32), torch.randn(shape, requires_grad=True)
    expected = model(x).shape
    loka.convert(model, forced_plan(stats_of(model, torch.randn(16, 32)), FP8))
    y = model(x)
    y.sum().backward()
    assert (y.shape, x.grad.shape) == (expected, x.shape)


@pytest.mark.parametrize("shape", [(3, 32, 9), (32, 32), (32, 7)])
def test_a_pointwise_convolution_takes_one_example_too(shape):
    """[channels, positions]: where both are as many, rows were multiplied for columns."""
    conv, x = nn.Conv1d(32, 32, 1), torch.randn(shape)
    expected = conv(x)
    found = loka.convert(conv, forced_plan(stats_of(conv, torch.randn(4, 32, 32)), FP8))(x)
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())
    assert (found - expected).norm() < 0.1 * expected.norm()  # e4m3's roundings are 2^-4 of a number at most


def test_gradients_of_stacked_weights_lie_as_the_parameter():
    """Fails where a stack is taken apart as it is multiplied by: autograd then copies the whole gradient."""
    model, x, stats = experts()
    loka.convert(model, forced_plan(stats, FP8))
    for call in (model, torch.compile(model, backend="aot_eager")):
        (gradient,) = torch.autograd.grad(call(x).square().mean(), model.w)
        assert gradient.is_contiguous()


@pytest.mark.slow
def test_a_compiled_weight_is_cast_once_for_both_gemms_in_hp():
    model, x, stats = experts()
    plan = forced_plan(stats, FP8)
    only = {name: replace(d, candidate=FP8 if name.endswith("weight") else "hp") for name, d in plan.decisions.items()}
    loka.convert(model, replace(plan, decisions=only))
    seen = []

    def look(graph, _):
        seen.extend(graph.graph.nodes)
        return graph

    backend = aot_autograd(fw_compiler=look, bw_compiler=look)
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(model, backend=backend)(x).float().square().mean().backward()
    sites = [node for node in seen if "loka.site" in str(node.target)]
    assert len(sites) == 8
    weights = [node.args[1 if "backward" not in str(node.target) else 3].meta["val"].dtype for node in sites]
    assert set(weights) == {torch.bfloat16}
    assert model.w.grad.dtype == torch.float32


class Raw(nn.Module):
    """x V W: V at a site in FP8, W in high precision, and a layer behind them."""

    def __init__(self):
        super().__init__()
        self.v, self.w = nn.Parameter(torch.randn(32, 32)), nn.Parameter(torch.randn(32, 32))
        self.top = nn.Linear(32, 8)

    def forward(self, x):
        return self.top(torch.relu(x @ self.v) @ self.w)


_OLD = pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo of torch 2.11 raises an error of its own there")
COMPILED = pytest.param(lambda model: torch.compile(model, backend="aot_eager"), marks=_OLD)


@pytest.mark.slow
@pytest.mark.parametrize("call", [lambda model: model, COMPILED])
def test_a_parametrization_behind_convert_is_refused_at_the_next_call(call):
    """The site read one tensor, and forward another: its GEMMs ran in high precision, without a word."""
    torch.manual_seed(0)
    model, x = Raw(), torch.randn(16, 32)
    stats = stats_of(model, x, torch.sum, effect_samples=0)
    plan = forced_plan(stats, FP8)
    kept = {name: d for name, d in plan.decisions.items() if d.path != "w"}
    loka.convert(model, replace(plan, decisions=kept))
    run = call(model)

    def runs():
        before = loka.health_of(model)
        run(x).sum().backward()
        after = loka.health_of(model)
        return {site: after[site]["runs"] - before[site]["runs"] for site in after if site.endswith("/output")}

    expected = {"v/output": 1, "top/output": 1}
    assert runs() == expected
    for module, name in ((model.top, "weight"), (model, "w")):  # a layer's own, and one that the plan leaves alone
        weight_norm(module, name)
        assert runs() == expected
    weight_norm(model, "v")
    with pytest.raises(PlanMismatch, match="v is computed anew at each read"):
        run(x)
    with parametrize.cached():
        assert model(x).isfinite().all()
    parametrize.remove_parametrizations(model, "v")
    assert runs() == expected
    weight_norm(model, "v")
    loka.revert(model)
    assert run(x).isfinite().all()
