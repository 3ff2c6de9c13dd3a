"""Chains that are found run as one without anybody noticing; those that could not are not found."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Encoder, odd_mlp
from sites import convert_layers
from torch import nn

from loka import mods
from loka.core.chain import Activation, Norm
from loka.nn import BlockNorm, sites_of, unwrap
from loka.nn.dataflow import Dataflow, Found, find_chains
from loka.zoo import build


def groups(found: Found) -> list[str]:
    """The modules of each chain in order, as one text."""
    return [" ".join(chain.paths) for chain in found.chains]


def assert_runs_as_one(model: nn.Module, *inputs: Any) -> Found:
    """Runs every chain as a whole at the call of its first module, and lets its others pass on.

    Inside, tensors go from module to module by hand. What the model returns must not change by a
    bit: the same operations run in the same order on the same values.
    """
    found = find_chains(model, *_copied(inputs))
    expected = model(*_copied(inputs))
    modules = dict(unwrap(model).named_modules())
    originals = {path: modules[path].forward for chain in found.chains for path in chain.paths}

    def whole(paths: tuple[str, ...], x: torch.Tensor) -> torch.Tensor:
        for path in paths:
            x = originals[path](x)
        return x

    for chain in found.chains:
        for path in chain.paths:
            modules[path].forward = lambda x: x
        modules[chain.paths[0]].forward = functools.partial(whole, chain.paths)
    try:
        actual = model(*_copied(inputs))
    finally:
        for path in originals:
            del modules[path].forward
    assert torch.equal(actual, expected)
    return found


def _copied(inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """A model may work in place on what it is given."""
    return [item.clone() for item in inputs]


class Net(nn.Module):
    """Two layers of 16, a norm and an activation, and a forward that the test gives."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], Any], act: nn.Module | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.act = nn.LayerNorm(16), act or nn.SiLU()
        self.run = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


def simple(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net.b(net.act(net.norm(net.a(x))))


X = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("seed", range(40))
def test_random_models(seed: int) -> None:
    """Any order of parts, some of them in place, some read twice or kept: outputs stay as they are."""
    pick = random.Random(seed)
    torch.manual_seed(seed)

    class Random(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList()
            self.kinds: list[str] = []
            width = 16
            for _ in range(pick.randint(3, 14)):
                out = pick.choice([8, 16, 24, 32])
                self.parts.append(
                    pick.choice(
                        [
                            nn.Linear(width, out, bias=pick.random() < 0.5),
                            nn.Linear(width, out),
                            BlockNorm(width, pick.choice([5, 8, 256])),
                            nn.LayerNorm(width),
                            nn.RMSNorm(width),
                            nn.ReLU(inplace=pick.random() < 0.5),
                            nn.Hardswish(inplace=pick.random() < 0.5),
                            nn.SiLU(),
                            nn.GELU(),
                            nn.GELU(approximate="tanh"),
                            nn.Identity(),
                            nn.Dropout(0.0),
                        ]
                    )
                )
                width = getattr(self.parts[-1], "out_features", width)
                self.kinds.append(pick.choice(["plain"] * 5 + ["add", "residual", "stash", "view"]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total, kept = x.new_zeros(()), []
            for part, kind in zip(self.parts, self.kinds, strict=True):
                before, x = x, part(x)
                if kind == "add":
                    total = total + x.square().sum()
                elif kind == "residual" and before.shape == x.shape:
                    x = x + before
                elif kind == "stash":
                    kept.append(x)
                elif kind == "view":
                    x = x.unflatten(-1, (2, -1)).flatten(-2)
            return x + total + sum(item.sum() for item in kept)

    model = Random()
    with torch.no_grad():
        found = assert_runs_as_one(model, torch.randn(6, 16))
    # Nothing is lost either: every linear layer above the limit is in one chain.
    wide = {p for p, m in model.named_modules() if isinstance(m, nn.Linear) and m.out_features > 8}
    links = [link.path for chain in found.chains for link in chain.links]
    assert sorted(links) == sorted(wide)


def test_the_order_of_parts() -> None:
    model = nn.Sequential(
        nn.Identity(), BlockNorm(16, 8), nn.Hardswish(),  # 0..2, a prologue
        nn.Linear(16, 24, bias=False), nn.Linear(24, 32), nn.Dropout(0.0), nn.RMSNorm(32, eps=1e-3),  # ..6
        nn.ReLU(inplace=True), nn.Identity(), nn.LayerNorm(32, bias=False), nn.Linear(32, 16),  # ..10
        nn.GELU(), nn.SiLU(), nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 8),
    )  # fmt: skip
    found = assert_runs_as_one(model.eval(), torch.randn(2, 3, 16))
    assert groups(found) == ["1 2 3 4 5 6 7", "9 10 11", "12 13"]
    first, second, third = found.chains
    assert (first.name, first.prologue.norm, first.prologue.block) == ("3", Norm.BLOCK, 8)
    assert first.prologue.activation is Activation.HARD_SWISH
    assert [(link.out_features, link.bias, link.members) for link in first.links] == [
        (24, False, ()),
        (32, True, ("5", "6", "7")),
    ]
    assert first.links[0].epilogue.identity
    last = first.links[1].epilogue
    assert (last.norm, last.eps, last.gamma, last.beta) == (Norm.RMS, 1e-3, True, False)
    assert last.activation is Activation.RELU
    assert (second.prologue.norm, second.prologue.gamma, second.prologue.beta) == (Norm.LAYER, True, False)
    assert second.links[0].epilogue.activation is Activation.GELU
    assert third.prologue.activation is Activation.SWISH
    assert set(found.alone) == {"10", "13", "15"}
    assert "prediction" in found.alone["15"]


def test_a_forward_of_the_users_own() -> None:
    found = assert_runs_as_one(Net(simple), X)
    assert groups(found) == ["a norm act b"]
    assert not found.alone
    keyword = Net(lambda net, x: net.b(input=net.act(net.norm(net.a(input=x)))))
    assert groups(find_chains(keyword, X)) == ["a norm act b"]


def outside(x: torch.Tensor) -> torch.Tensor:
    return x * 2


scripted = torch.jit.script(outside)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


SPLITS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "residual": lambda net, h: net.b(net.act(h)) + h,
    "cat": lambda net, h: torch.cat([net.b(net.act(h)), h]),
    "method": lambda net, h: net.b(net.act(h)).mul(h),
    "view": lambda net, h: net.b(net.act(h)) + h.view(-1).sum(),
    "shape": lambda net, h: net.b(net.act(h)).view(h.shape),
    "slice": lambda net, h: net.b(net.act(h)) + h[:, :1],
    "index": lambda net, h: net.b(net.act(h))[h[:, 0] > 0],
    "length": lambda net, h: net.b(net.act(h)) * len(h),
    "in place": lambda net, h: net.b(net.act(h.add_(1))),
    "function": lambda net, h: net.b(nn.functional.silu(h)),
    "module": lambda net, h: net.b(net.act(h)) + net.norm(h),
    "unwatched module": lambda net, h: net.b(net.act(h)) + nn.Softmax(-1)(h),
    "returned": lambda net, h: (net.b(net.act(h)), {"h": [h]}),
    "kept": lambda net, h: (net.kept.append(h), net.b(net.act(h)))[1],
    "attribute": lambda net, h: (setattr(net, "last", h), net.b(net.act(h)))[1],
    "script": lambda net, h: net.b(net.act(h)) + scripted(h),
    "autograd function": lambda net, h: net.b(net.act(h)) + Double.apply(h),
    "operator": lambda net, h: net.b(net.act(h)) + torch.ops.aten.neg(h),
    "detach": lambda net, h: (h.detach(), net.b(net.act(h)))[1],
    "numpy": lambda net, h: net.b(net.act(h)) * float(h.detach().numpy()[0, 0]),
    "weight product": lambda net, h: net.b(net.act(h)) + h @ net.a.weight,
}


@pytest.mark.parametrize("kind", SPLITS)
def test_an_inner_tensor_read_elsewhere_splits(kind: str) -> None:
    net = Net(lambda net, x: SPLITS[kind](net, net.a(x)))
    net.kept = []
    found = find_chains(net, X)
    chains = [set(chain.paths) for chain in found.chains]
    assert not any({"a", "act"} <= chain for chain in chains)
    assert {"a", "b"} <= {link.path for chain in found.chains for link in chain.links}
    assert "read by" in found.alone["a"]


def test_readers_of_the_chains_ends_do_not_split() -> None:
    def both(net: Any, x: torch.Tensor) -> torch.Tensor:
        y = simple(net, x)
        return torch.cat([x + y, y * x.mean()])

    assert groups(assert_runs_as_one(Net(both), X)) == ["a norm act b"]


def test_asking_for_a_dtype_or_a_contiguous_tensor_does_not_split() -> None:
    def asks(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.a(x)
        assert h.dtype is torch.float32
        assert h.device.type == "cpu"
        return net.b(net.act(h.contiguous().flatten(1)))

    assert groups(assert_runs_as_one(Net(asks), X)) == ["a act b"]


def test_in_place_activations() -> None:
    relu = nn.ReLU(inplace=True)
    assert groups(assert_runs_as_one(Net(simple, relu), X)) == ["a norm act b"]

    def reads_after(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.a(x)
        net.act(h)
        return net.b(h) + h

    assert groups(assert_runs_as_one(Net(reads_after, relu), X)) == ["a act", "b"]

    def changes_a_view(net: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        y = net.b(net.act(x[:, :16]))
        return x + y

    found = assert_runs_as_one(Net(changes_a_view, relu), X)
    assert groups(found) == ["b"]


def test_modules_with_more_than_one_life() -> None:
    twice = find_chains(Net(lambda net, x: net.b(net.a(net.a(x)))), X)
    assert groups(twice) == ["b"]
    assert twice.alone["a"] == "it is called 2 times"
    net = Net(simple)
    net.other = net.b
    shared = find_chains(net, X)
    assert groups(shared) == ["a norm act"]
    assert "shared" in shared.alone["b"]
    assert find_chains(Net(lambda net, x: net.a(x)), X).alone["b"] == "it is not called in this pass"


def test_hooks_of_others() -> None:
    net = Net(simple)
    net.act.register_forward_hook(lambda module, args, output: None)
    assert groups(find_chains(net, X)) == ["a norm", "b"]
    net = Net(simple)
    net.b.register_full_backward_hook(lambda module, given, got: None)
    found = find_chains(net, X)
    assert groups(found) == ["a norm act"]
    assert "hooks" in found.alone["b"]
    seen: list[torch.Tensor] = []
    block = nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 16))
    block[0].register_forward_hook(lambda module, args, output: seen.append(output))
    assert groups(find_chains(block, X)) == ["0.0 0.1", "1"]
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        assert not find_chains(Net(simple), X).chains
    finally:
        handle.remove()


def test_modules_under_different_circumstances() -> None:
    def frozen(net: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            h = net.a(x)
        return net.b(h)

    def precise(net: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            h = net.a(x.float())
        return net.b(h)

    assert groups(find_chains(Net(frozen), X)) == ["a", "b"]
    with torch.autocast("cpu", torch.bfloat16):
        assert groups(find_chains(Net(precise), X)) == ["a", "b"]
        assert groups(find_chains(Net(simple), X)) == ["a norm act b"]
    mixed = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16).bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert groups(find_chains(mixed, X)) == ["0", "1"]


def test_functionals_of_a_transformer_are_readers() -> None:
    for model in (Encoder(), Encoder().eval()):
        found = find_chains(model, torch.randn(4, 7, 48))
        assert len(found.chains) == 4
        assert all(len(chain.links) == 1 for chain in found.chains)
        assert "relu" in found.alone["encoder.layers.0.linear1"]


def test_the_zoo() -> None:
    inputs = (torch.randn(8, 13), torch.zeros(8, 6, dtype=torch.int64))
    many, stacks = {}, {}
    for name in ("dlrm", "dcnv2", "wukong"):
        torch.manual_seed(0)
        model = build(name, dense_features=13, vocab_sizes=[10] * 6)
        mods.apply(model, [mods.NoBias(), mods.BlockNorm(256), mods.HardSwish()])
        found = assert_runs_as_one(model, *inputs)
        many[name] = {c.name: [link.path for link in c.links] for c in found.chains if len(c.links) > 1}
        stacks[name] = [stack.paths for stack in found.crosses]
        prologues = {chain.members for chain in found.chains if chain.members}
        assert prologues == ({("layers.0.fmb.norm",), ("layers.1.fmb.norm",)} if name == "wukong" else set())
    assert many["dlrm"]["top.0"] == ["top.0", "top.3", "top.6"]
    assert stacks == {"dlrm": [], "dcnv2": [("cross.0", "cross.1")], "wukong": []}
    assert many["dcnv2"]["deep.0"] == ["deep.0", "deep.3", "deep.6"]
    assert many["wukong"]["layers.1.fmb.mlp.0"] == ["layers.1.fmb.mlp.0", "layers.1.fmb.mlp.3"]


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 16))
    convert_layers(model, {"3": ("emulated:rowwise_e4m3", "hp", "hp")})
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert groups(find_chains(model, X)) == ["0", "3"]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not sites_of(model)["3"].health.any()
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model] == [0, 0, 0, 0]
    with pytest.raises(RuntimeError):
        find_chains(model, X[:, :3])
    assert torch.overrides._get_current_function_mode_stack() == []
    assert not any(m._forward_hooks for m in model.modules())


def test_converted_and_compiled_models() -> None:
    model = odd_mlp()
    convert_layers(model, dict.fromkeys(("0", "3"), ("emulated:rowwise_e4m3", "hp", "hp")))
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(5, 13)
    assert groups(find_chains(model, x)) == groups(find_chains(compiled, x)) == ["0 1 2 3 4"]
    inside = Net(lambda net, x: net.b(net.c(x)))
    inside.c = torch.compile(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), backend="eager")
    assert groups(find_chains(inside, X)) == ["c.0 c.1 b"]


def test_two_watchers_end_in_any_order() -> None:
    net = Net(simple)
    first, second = Dataflow(net), Dataflow(net)
    first.start()
    second.start()
    output = net(X)
    assert groups(first.finish(output)) == groups(second.finish(output)) == ["a norm act b"]
    assert torch.overrides._get_current_function_mode_stack() == []
    assert torch._C.ScriptFunction.__call__.__name__ == "__call__"


def test_checkpointed_layers() -> None:
    def saves(net: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(lambda x: simple(net, x), x, use_reentrant=False)

    net = Net(saves)
    flow = Dataflow(net)
    flow.start()
    output = net(X)
    found = flow.finish(output)
    output.sum().backward()
    assert groups(found) == ["a norm act b"]
