"""Activation checkpointing by the user, around and inside of what owns sites: nothing is lost in
recomputation.

A recomputed GEMM that is no site gives other saved tensors than forward did: gradients then differ, or torch
says that the recomputation does not match.
"""

import pytest
import torch
import torch.nn.functional as F
from forced import force, planned, probe, runs
from foreign.spec import call, train_step
from oracle import assert_close, assert_same_gradients, by_hand, gradients, multiply
from sweeps import sweep
from torch import nn
from torch.utils.checkpoint import checkpoint

import loka

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
KINDS = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


class Recomputed(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, *inputs):
        inputs = tuple(x.requires_grad_() if x.is_floating_point() else x for x in inputs)
        return checkpoint(self.inner, *inputs, use_reentrant=self.reentrant)


AROUND = (
    "functions", "slices", "chunks", "experts_bmm", "experts_einsum", "cross_attention", "shared_attention",
    "deepctr_xdeepfm", "lora_parameters",
)  # fmt: skip


@KINDS
@pytest.mark.parametrize("name", AROUND)
def test_around_a_converted_model(name, reentrant):
    """Gradients are those without a checkpoint, and the `output` GEMMs ran once more (but for those at the
    end, which a recomputation that stops early does not reach)."""
    known = planned(name)
    foreign = known.foreign
    plain, inner = known.converted(), known.converted()
    loss = train_step(foreign, plain)
    found = foreign.loss(call(Recomputed(inner, reentrant), foreign.inputs(32)))
    found.backward()
    assert_close(found, loss)
    assert_same_gradients(inner, gradients(plain))
    once, twice = runs(plain), runs(inner)
    for site, count in once.items():
        path, gemm = site.rsplit("/", 1)
        wanted = {count} if gemm != "output" else {count, 2 * count}
        assert twice[site] in (wanted if gemm != "grad_input" else {count, count + 1}), (path, gemm)
    outputs = [site for site in once if site.endswith("/output")]
    again = sum(twice[site] > once[site] for site in outputs)
    assert again == len(outputs) if reentrant else 2 * again >= len(outputs)


class Views(nn.Module):
    """Views of a parameter are made before the checkpointed function that multiplies by them, and inside."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.stem = nn.Linear(32, 32)
        self.w = nn.Parameter(torch.randn(128, 32) / 32**0.5)
        self.v = nn.Parameter(torch.randn(64, 32) / 64**0.5)
        self.out = nn.Linear(32, 1)

    def multiply(self, x, weight):
        return F.linear(x, weight)

    def forward(self, x):
        value, gate = self.w.chunk(2)

        def inner(x):
            hidden = self.multiply(x, value) * torch.sigmoid(self.multiply(x, gate))
            return x + self.multiply(torch.relu(hidden), self.v.t())

        x = self.stem(x)
        x = inner(x) if self.kind is None else checkpoint(inner, x, use_reentrant=self.kind)
        return self.out(x)


class ViewsByHand(Views):
    def multiply(self, x, weight):
        return multiply(x, weight)

    def forward(self, x):
        by_hand(self)
        return super().forward(x)


@pytest.mark.parametrize("compiled", sweep([False, True], [True]), ids=["eager", "compiled"])
@KINDS
def test_views_made_before_the_checkpoint(reentrant, compiled):
    """They are no attributes of anything, and known by the mode alone that saw them made."""
    x = torch.randn(48, 32, generator=torch.Generator().manual_seed(1))
    bare = Views(reentrant)
    plan = force(probe(bare, lambda: bare(x.clone().requires_grad_()).square().mean().backward()))
    expected, found = ViewsByHand(None), loka.convert(Views(reentrant), plan)
    model = torch.compile(found, fullgraph=True, backend="aot_eager") if compiled else found
    loss, wanted = (m(x.clone().requires_grad_()).square().mean() for m in (model, expected))
    loss.backward()
    wanted.backward()
    assert_close(loss, wanted)
    assert_same_gradients(found, gradients(expected))
    assert all(runs(found).values())
    assert len({site.rpartition("/")[0] for site in runs(found)}) == 5


@KINDS
def test_a_probe_plans_gradients_inside_checkpoints(reentrant):
    """The plan of a checkpointed model is that of the same model without, and probing changes no bit."""
    x = torch.randn(48, 32, generator=torch.Generator().manual_seed(1))
    stats, grads = {}, {}
    for kind in (None, reentrant):
        model = Views(kind)
        stats[kind] = probe(model, lambda m=model: m(x.clone().requires_grad_()).square().mean().backward())
        grads[kind] = gradients(model)
    bare = Views(reentrant)
    bare(x.clone().requires_grad_()).square().mean().backward()
    for name, gradient in gradients(bare).items():
        assert torch.equal(gradient, grads[reentrant][name])
    assert stats[None].layers.keys() == stats[reentrant].layers.keys()
    assert stats[None].coverage == stats[reentrant].coverage
    assert force(stats[None]).decisions == force(stats[reentrant]).decisions


class Nested(nn.Module):
    def __init__(self, outer, inner):
        super().__init__()
        torch.manual_seed(0)
        self.kinds = (outer, inner)
        self.stem, self.mid = nn.Linear(32, 32), nn.Linear(32, 32)
        self.w = nn.Parameter(torch.randn(32, 32) / 32**0.5)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        def inside(x):
            return torch.tanh(F.linear(x, self.w))

        def outside(x):
            return torch.tanh(checkpoint(inside, torch.tanh(self.mid(x)), use_reentrant=self.kinds[1]))

        return self.out(checkpoint(outside, self.stem(x), use_reentrant=self.kinds[0]))


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("outer", [False, True])
def test_checkpoints_inside_checkpoints(outer, inner):
    x = torch.randn(48, 32, generator=torch.Generator().manual_seed(1))
    plain, bare = Nested(outer, inner), Nested(outer, inner)
    stats = probe(bare, lambda: bare(x.clone().requires_grad_()).square().mean().backward())
    plain(x.clone().requires_grad_()).square().mean().backward()
    for name, gradient in gradients(plain).items():
        assert torch.equal(gradient, gradients(bare)[name])
    assert set(stats.layers) == {"stem", "mid", "w", "out"}
    found, flat = (loka.convert(Nested(*kinds), force(stats)) for kinds in ((outer, inner), (False, False)))
    for model in (found, flat):
        model(x.clone().requires_grad_()).square().mean().backward()
    assert_same_gradients(found, gradients(flat))
    assert all(runs(found).values())


class Given(nn.Module):
    """Raw parameters that are arguments of the checkpointed function, one of them twice."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.kind = reentrant
        self.v, self.w = (nn.Parameter(torch.randn(32, 32) / 32**0.5) for _ in range(2))

    def forward(self, x):
        def inside(x, v, w, again):
            return torch.relu(torch.relu(x @ v) @ w.t()) @ again

        given = x, self.v, self.w, self.v
        inner = inside(*given) if self.kind is None else checkpoint(inside, *given, use_reentrant=self.kind)
        return x @ self.w + inner


@KINDS
def test_parameters_that_are_handed_to_a_checkpoint_are_sites_in_recomputation(reentrant):
    """A reentrant one recomputes with its arguments detached: other tensors than those of forward."""
    x = torch.randn(48, 32, generator=torch.Generator().manual_seed(1))
    plain, found = Given(None), Given(reentrant)
    plan = force(probe(plain, lambda: plain(x.clone().requires_grad_()).square().mean().backward()))
    for model in (plain, found):
        model.zero_grad()
        loka.convert(model, plan)
        model(x.clone().requires_grad_()).square().mean().backward()
    assert_same_gradients(found, gradients(plain))
    backward = {site: count for site, count in runs(plain).items() if not site.endswith("output")}
    assert all(backward.values())
    assert {site: runs(found)[site] for site in backward} == backward
