"""Hooks that a forward pass puts on tensors keep state: an extra backward would advance it twice."""

import contextlib
import functools
import re

import pytest
import torch
from effect_models import sample
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn import functional
from torch.nn.modules.module import register_module_full_backward_hook
from torch.utils.checkpoint import checkpoint

import loka
from loka.distributed.fp8_all_gather import Exchange
from loka.probe import renew_effects
from loka.probe.tensor_hooks import _READS_NODE, TensorHooks

STEPS = 6


class Scaled:
    """A hook that scales a gradient by a running mean of its norms."""

    def __init__(self):
        self.mean = 1.0

    def scale(self, grad):
        self.mean = 0.9 * self.mean + 0.1 * float(grad.norm())
        return grad / self.mean

    def of_tensor(self, z):
        z.register_hook(self.scale)

    def of_several(self, z):
        def note(grads):
            self.mean += float(grads[0].norm())

        register_multi_grad_hook((z, z), note)

    def of_node(self, z):
        z.grad_fn.register_hook(lambda given, got: (self.scale(given[0]),))

    def before_node(self, z):
        z.grad_fn.register_prehook(lambda got: (self.scale(got[0]),))

    def of_node_behind(self, z):
        z.grad_fn.next_functions[0][0].register_prehook(lambda got: (self.scale(got[0]),))


class Body(nn.Module):
    def __init__(self, put):
        super().__init__()
        self.first, self.put = nn.Linear(13, 24), put

    def forward(self, x):
        z = torch.relu(self.first(x))
        if z.requires_grad:
            self.put(z)
        return z * 2


class Model(nn.Module):
    """`run` calls the body, which does `put` to a tensor between its layer and the head."""

    def __init__(self, put=lambda z: None, run=lambda body, x: body(x)):
        super().__init__()
        torch.manual_seed(5)
        self.body, self.head, self.run = Body(put), nn.Linear(24, 1), run

    def forward(self, x):
        return self.head(self.run(self.body, x))[:, 0]


def learn(state, model, probe=None):
    """Numbers that a probe is not to change: the hook's and the weights."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with probe or contextlib.nullcontext():
        for step in range(STEPS):
            x = sample(step, 32, 13).requires_grad_()
            functional.binary_cross_entropy_with_logits(model(x), (x[:, 0] > 0).float()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [torch.tensor(state.mean), *(weight.detach().clone() for weight in model.parameters())]


def without_and_with(make):
    """Trains what `make(hook)` makes twice, and returns the layers of the second time, which is probed."""
    hook = Scaled()
    plain = learn(hook, make(hook))
    assert hook.mean != 1.0
    model = make(hook := Scaled())
    probe = loka.Probe(model, every=2, effect_step=16)
    watched = learn(hook, model, probe)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    layers = probe.stats().layers
    assert {layer.operands["grad_output"].numbers["count"] for layer in layers.values()} == {STEPS // 2 * 32}
    return layers


def refused(layers, reason):
    assert layers.keys() == {"body.first", "head"}
    for layer in layers.values():
        assert not layer.effects
        assert re.search(reason, layer.no_effect), layer.no_effect


@pytest.mark.parametrize(
    ("put", "reason"),
    [
        (Scaled.of_tensor, r"body puts a hook on a tensor \(Scaled.scale\), which an extra backward would call"),
        (Scaled.of_several, r"body puts a hook on a tensor \(register_multi_grad_hook"),
        (Scaled.of_node, r"hook on a node of autograd \(Scaled.of_node.* on ReluBackward0\), which an extra backward"),
        (Scaled.before_node, r"hook on a node of autograd \(Scaled.before_node.* on ReluBackward0"),
        (Scaled.of_node_behind, r"hook on a node of autograd \(Scaled.of_node_behind.* on AddmmBackward0"),
    ],
)
def test_hooks_run_as_often_as_without_a_probe(put, reason):
    refused(without_and_with(lambda hook: Model(functools.partial(put, hook))), reason)


@pytest.mark.parametrize(
    "run",
    [
        functools.partial(checkpoint, use_reentrant=False),
        functools.partial(checkpoint, use_reentrant=True),
        torch.compile(lambda body, x: body(x), backend="eager"),
    ],
    ids=["checkpoint", "reentrant", "compiled"],
)
def test_hooks_in_what_runs_another_way(run):
    refused(without_and_with(lambda hook: Model(hook.of_tensor, run)), r"body puts a hook on a tensor \(Scaled.scale")


def test_hooks_that_a_forward_hook_puts():
    def make(hook):
        model = Model()
        model.body.register_forward_hook(lambda module, args, output: hook.of_tensor(output))
        return model

    refused(without_and_with(make), r"puts a hook on a tensor \(Scaled.scale")


def test_hooks_of_all_modules():
    def note(module, given, got):
        state.mean += 1

    state = Scaled()
    handle = register_module_full_backward_hook(note)
    try:
        model = Model()
        probe = loka.Probe(model, every=1)
        learn(state, model, probe)
    finally:
        handle.remove()
    assert state.mean == 1 + 4 * STEPS  # once for the model, its body and each of two layers
    refused(probe.stats().layers, "all modules have backward hooks")


def test_a_gradient_that_is_retained_is_training_s():
    """The second backward would add to what the first one left."""
    kept = []

    def put(z):
        z.retain_grad()
        kept.append(z)

    grads = []
    for probed in (False, True):
        model = Model(put)
        probe = loka.Probe(model, every=2) if probed else None
        learn(Scaled(), model, probe)
        grads.append([z.grad for z in kept])
        kept.clear()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    refused(probe.stats().layers, "body calls retain_grad")


def test_what_an_extra_backward_does_not_reach_is_no_hook():
    """Hooks on leaves, parameters among them, and nodes that are only looked at."""

    def make(hook):
        def put(z):
            assert z.grad_fn is not None
            z.detach().requires_grad_().register_hook(hook.scale)
            model.body.first.weight.register_hook(hook.scale)
            model.head.weight.register_post_accumulate_grad_hook(note)

        def note(weight):
            hook.scale(weight.grad)

        model = Model(put)
        return model

    for layer in without_and_with(make).values():
        assert not layer.no_effect
        assert layer.effects


def test_fresh_rows_call_no_hook():
    hook = Scaled()
    model = Model(hook.of_tensor)
    with loka.Probe(model, every=1, effect_samples=0) as probe:
        model(sample(0, 32, 13))
    renewed = renew_effects(model, probe.stats(), [sample(1, 32, 13)])
    assert hook.mean == 1.0
    refused(renewed.layers, r"body puts a hook on a tensor \(Scaled.scale")


def test_hooks_of_engines_are_none_of_the_programs():
    """FSDP2 puts some on what a unit returns, and expects them to run again; so do LoKA's gathers in FP8."""
    hooks = TensorHooks()
    z = torch.relu(torch.randn(4, requires_grad=True))
    hooks.see(torch.Tensor.register_hook, (z, functools.partial(FSDPState._pre_backward, None)), lambda: "unit")
    hooks.see(_READS_NODE, (z,), lambda: "unit")
    z.grad_fn.register_prehook(Exchange._asked)
    assert hooks.would_call(z) == ""
    hooks.see(torch.Tensor.register_hook, (z, print), lambda: "unit")
    assert hooks.would_call(z).startswith("unit puts a hook on a tensor (print)")


def test_a_hook_beside_the_way_of_the_logits_costs_nothing():
    class Aside(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.side, self.head = nn.Linear(13, 8), nn.Linear(13, 4), nn.Linear(8, 1)

        def forward(self, x):
            aside = torch.relu(self.side(x))
            aside.register_hook(lambda grad: grad)
            aside.retain_grad()
            return self.head(torch.relu(self.first(x)))[:, 0]

    model = Aside()
    with loka.Probe(model, every=1, effect_step=16) as probe:
        for step in range(2):
            x = sample(step, 32, 13)
            functional.binary_cross_entropy_with_logits(model(x), (x[:, 0] > 0).float()).backward()
    layers = probe.stats().layers
    assert all(layers[name].effects for name in ("first", "head"))
    assert "hook" not in layers["side"].no_effect


@pytest.mark.parametrize("samples", [0, 512])
def test_nodes_are_let_go_of_behind_each_pass(samples):
    """They keep the graph beside the way of the logits, which no backward frees, and the next look is far."""
    model = Model(lambda z: z.register_hook(lambda grad: grad))
    with loka.Probe(model, every=1, effect_samples=samples) as probe:
        model(sample(0, 32, 13))
        assert not probe._sensitivity.hooks._reasons
