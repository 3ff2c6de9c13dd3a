"""Cross layers of any model, found in a forward pass and run as a whole, against the plain model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from loka.core.error import sqnr_db
from loka.core.exceptions import LokaError, NoKernelFits, NotConverted
from loka.kernels.launches import launches, reset_launches
from loka.kernels.run import kernel_runs, reset_kernel_runs
from loka.nn import signature
from loka.nn.chain import dissolve_chains, form_chains, runs_fused
from loka.nn.chain_state import ChainState
from loka.nn.cross import running_crosses
from loka.nn.dataflow import find_chains
from loka.zoo.dcn import CrossLayer

ROWS, FEATURES, RANK, LAYERS = 37, 100, 20, 3  # no multiple of 16 among the sides
# Rounding to e4m3 leaves an operand with 31.5 dB. A layer's u has four such sources (x, V, v, U) at a share
# of 0.45 / 1.45 in the power of x_{l+1} (Xavier's u has 0.67 of the std of x), so that three layers leave 3.7
# sources; a weight's gradient has four of its own. 31.5 - 10 log10(7.7) = 22.6, less 1.6 for sums of 37 rows.
LEAST_DB = 21.0


class Swapped(nn.Module):
    """A stranger's cross layer: other names, another order of arguments, linear layers deeper inside."""

    def __init__(self, features: int, rank: int) -> None:
        super().__init__()
        self.map = nn.Sequential(nn.Linear(features, rank, bias=False), nn.Linear(rank, features, bias=False))

    def forward(self, current: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return current + self.map(current) * first

    def called(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self(first=x0, current=x)


class Net(nn.Module):
    """x_0 -> cross layers -> a linear layer; `between` may do anything with x after the first of them."""

    def __init__(self, kind: str = "low", joint: bool = True, layers: int = LAYERS) -> None:
        super().__init__()
        make: dict[str, Callable[[], nn.Module]] = {
            "low": lambda: CrossLayer(FEATURES, rank=RANK),
            "full": lambda: CrossLayer(FEATURES, rank=None),
            "swapped": lambda: Swapped(FEATURES, RANK),
        }
        self.cross = nn.ModuleList(make[kind]() for _ in range(layers))
        for parameter in self.cross.parameters():
            if parameter.dim() == 2:
                nn.init.xavier_normal_(parameter)
        self.joint = joint
        self.out = nn.Linear(FEATURES, 24)
        self.between: Callable[[torch.Tensor], Any] = _nothing

    def forward(self, x0: torch.Tensor) -> torch.Tensor:
        x = x0 if self.joint else torch.tanh(x0)
        for place, layer in enumerate(self.cross):
            if place == 1:
                other = self.between(x)
                x0 = x0 if other is None else other
            x = layer.called(x0, x) if isinstance(layer, Swapped) else layer(x0, x)
        return self.out(x)


def _nothing(x: torch.Tensor) -> None:
    """What a module of the tests does between cross layers unless told otherwise; pickle finds it."""


def fused(model: nn.Module, x: torch.Tensor) -> ChainState:
    found = find_chains(model, x)
    return form_chains(model, [], [(stack, "e4m3_row", {}) for stack in found.crosses])


def inputs(shape: tuple[int, ...] = (ROWS, FEATURES)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def uneven(shape: torch.Size) -> torch.Tensor:
    """Gradients whose rows differ by a million, as recommendation models have them."""
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    rows = shape[:-1]
    return grad * torch.logspace(-6, 0, rows.numel()).view(*rows, 1)


def gradients(
    model: nn.Module, x: torch.Tensor, *, steps: int = 1, autocast: bool = False
) -> dict[str, torch.Tensor]:
    """Output and all gradients of the last of `steps` equal steps."""
    for _ in range(steps):
        x = x.detach().clone().requires_grad_()
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(x)
        out.backward(uneven(out.shape).to(out.dtype))
    assert x.grad is not None
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"output": out.detach(), "input": x.grad, **found}


def assert_near(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(wanted)
    decibels = {name: sqnr_db(got[name].float(), wanted[name]) for name in wanted}
    assert min(decibels.values()) >= LEAST_DB, decibels


@pytest.mark.parametrize("joint", [True, False], ids=["x is x0", "x is another"])
@pytest.mark.parametrize("kind", ["low", "full", "swapped"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_a_stack_computes_what_the_plain_model_does(autocast: bool, kind: str, joint: bool) -> None:
    torch.manual_seed(0)
    model, x = Net(kind, joint), inputs()
    plain = copy.deepcopy(model)
    wanted = gradients(plain, x)
    (stack,) = find_chains(model, x).crosses
    assert stack.paths == ("cross.0", "cross.1", "cross.2")
    assert stack.joint == joint
    state = fused(model, x)
    reset_kernel_runs()
    assert_near(gradients(model, x, steps=3, autocast=autocast), wanted)
    # One rounding of each operand and nothing saturated: what is lost is e4m3's own.
    assert all(slot["saturated"] == 0 for slot in state.book.snapshot().values())
    linears = LAYERS * (1 if kind == "full" else 2)
    for gemm in ("output", "grad_input", "grad_weight"):
        assert kernel_runs()["emulated:tensorwise_e4m3", gemm] == 3 * linears


def test_leading_dimensions_and_inference() -> None:
    torch.manual_seed(0)
    model, x = Net(), inputs((5, 7, FEATURES))
    plain = copy.deepcopy(model)
    fused(model, x)
    assert_near(gradients(model, x, steps=2), gradients(plain, x))
    trained = model(x)
    with torch.no_grad():
        assert torch.equal(model(x), trained)
    with torch.inference_mode():
        assert torch.equal(model(x), trained)


def test_dissolving_restores_every_bit() -> None:
    torch.manual_seed(0)
    model, x = Net(), inputs()
    plain, keys, classes = copy.deepcopy(model), list(model.state_dict()), [type(m) for m in model.modules()]
    fused(model, x)
    assert list(model.state_dict()) == keys
    assert signature(model) == signature(plain)
    assert runs_fused(model)
    assert "runs 3 cross layers, fused:e4m3_row" in repr(model)
    assert not torch.equal(model(x), plain(x)), "FP8 shows"
    dissolve_chains(model)
    assert not runs_fused(model)
    assert [type(module) for module in model.modules()] == classes
    assert not [name for module in model.modules() for name in vars(module) if name.startswith("loka")]
    for name, value in gradients(model, x).items():
        assert torch.equal(value, gradients(plain, x)[name]), name


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_independent(copied: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = Net(), inputs()
    fused(model, x)
    gradients(model, x, steps=2)
    other = copied(model)
    assert torch.equal(other(x), model(x))
    with torch.no_grad():
        for parameter in other.cross.parameters():
            parameter.zero_()
        before = model(x)
        assert torch.equal(other(x), nn.functional.linear(x, model.out.weight, model.out.bias))
        assert torch.equal(model(x), before)
    dissolve_chains(other)
    assert runs_fused(model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_bits(reentrant: bool) -> None:
    torch.manual_seed(0)
    model, x = Net(), inputs()
    fused(model, x)
    gradients(model, x, steps=2)
    again = copy.deepcopy(model)
    run = again.forward
    again.forward = lambda x: checkpoint(run, x, use_reentrant=reentrant)
    wanted = gradients(model, x)
    for name, value in gradients(again, x).items():
        assert torch.equal(value, wanted[name]), name


def test_gradients_accumulate() -> None:
    """Both forwards before the first backward. The second batch is smaller: one that is larger has a
    larger share of the products x_0 * u in x, and so more noise than LEAST_DB is for."""
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    batches = [inputs(), inputs().flip(0) / 4]
    fused(model, batches[0])
    gradients(model, batches[0])
    for net in (plain, model):
        net.zero_grad()
        outs = [net(x) for x in batches]
        for out in outs:
            out.backward(uneven(out.shape))
    got, wanted = ({name: p.grad for name, p in net.named_parameters()} for net in (model, plain))
    assert_near(got, wanted)


def test_scales_may_move_between_forward_and_backward() -> None:
    torch.manual_seed(0)
    model, x = Net(), inputs()
    state = fused(model, x)
    wanted = gradients(model, x, steps=2)
    later = x.clone().requires_grad_()
    model.zero_grad()
    out = model(later)
    inner = state.crosses[0].slots[1]
    for slot in (inner.x, inner.inner):
        state.book.prime(slot, torch.tensor(1e4))  # 2^12 times too coarse for what was kept
    out.backward(uneven(out.shape))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, wanted[name]), name


def test_launches_of_a_step() -> None:
    torch.manual_seed(0)
    model, x = Net(), inputs()
    fused(model, x)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(3):
        reset_launches()
        gradients(model, x)
        optimizer.step()
    assert launches() == {
        "book": 1, "bank": 1, "keep": 1, "units": 1, "gemm": 6 * LAYERS, "cross_produce": LAYERS,
        "cross_derive": LAYERS, "cross_gather": 1, "derive": 1 + 2 * LAYERS,
    }  # fmt: skip


def test_weights_that_change_are_seen() -> None:
    torch.manual_seed(0)
    model, x = Net(), inputs()
    fused(model, x)
    gradients(model, x, steps=2)
    with torch.no_grad():
        for layer in model.cross:
            layer.u.weight.mul_(0.5)
            layer.v.weight.mul_(0.5)
    plain = copy.deepcopy(model)
    dissolve_chains(plain)
    assert_near(gradients(model, x, steps=2), gradients(plain, x))


def test_an_empty_batch_and_frozen_weights() -> None:
    model, x = Net(), inputs()
    fused(model, x)
    found = gradients(model, x[:0])
    assert found["output"].shape == (0, 24)
    assert not found["cross.0.u.weight"].any()
    model.cross[1].u.requires_grad_(False)
    model.zero_grad()
    model(x).sum().backward()
    assert model.cross[1].u.weight.grad is None
    assert model.cross[1].v.weight.grad is not None


def test_wrong_arguments_are_refused() -> None:
    model, x = Net(), inputs()
    fused(model, x)
    with pytest.raises(ValueError, match="100 features"):
        model(x[:, :50])
    with pytest.raises(TypeError, match="autocast"):
        model(x.bfloat16())
    with pytest.raises(TypeError, match="x0 and x"):
        model.cross[0](x)


def test_torch_compile_runs_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Net(), inputs()
    fused(model, x)
    gradients(model, x, steps=2)
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend="aot_eager")
    wanted, got = gradients(model, x), gradients(compiled, x)
    for name, value in wanted.items():
        assert torch.equal(value, got.get(name, got.get(f"_orig_mod.{name}"))), name


def _keep(x: torch.Tensor, kept: list[torch.Tensor] = []) -> None:  # noqa: B006
    kept[:] = [x]


def _norm(x: torch.Tensor) -> None:
    x.sum()


def _other(x: torch.Tensor) -> torch.Tensor:
    return inputs()


@pytest.mark.parametrize("between", [_keep, _norm, _other], ids=["kept", "read", "another x0"])
def test_an_x_with_another_reader_ends_a_stack(between: Callable[[torch.Tensor], Any]) -> None:
    torch.manual_seed(0)
    model, x = Net(), inputs()
    model.between = between
    found = find_chains(model, x)
    assert [stack.paths for stack in found.crosses] == [("cross.0",), ("cross.1", "cross.2")]
    plain = copy.deepcopy(model)
    fused(model, x)
    assert sorted(running_crosses(model)) == ["cross.0", "cross.1"]
    assert_near(gradients(model, x, steps=3), gradients(plain, x))


def test_an_x0_that_changes_in_place_ends_a_stack() -> None:
    class Changing(Net):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            x0 = given * 1
            x = self.cross[0](x0, given)
            x0.mul_(2)
            return self.cross[1](x0, x)

    found = find_chains(Changing(layers=2), inputs())
    assert [stack.paths for stack in found.crosses] == [("cross.0",), ("cross.1",)]


def test_what_is_in_no_stack() -> None:
    """A shared module, one that is called twice, one that is not called, an x that is also x_0."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice, self.unused, self.shared, self.last = (
                CrossLayer(FEATURES, rank=RANK) for _ in range(4)
            )
            self.again = self.shared

        def forward(self, x0: torch.Tensor) -> torch.Tensor:
            x = self.twice(x0, self.twice(x0, x0))
            x = self.again(x0, self.shared(x0, x))
            return self.last(x, x)

    found = find_chains(Odd(), inputs())
    assert [stack.paths for stack in found.crosses] == [("last",)]
    assert found.crosses[0].joint
    assert found.alone["twice.u"] == "in cross layer twice: it is called 2 times"
    assert found.alone["unused.v"] == "in cross layer unused: it is not called in this pass"
    assert not {"last.u", "last.v"} & set(found.alone)
    inside = {link.path for chain in found.chains for link in chain.links}
    assert not inside & {f"{name}.{part}" for name in ("twice", "unused", "last") for part in "uv"}


def test_what_cannot_be_formed_leaves_the_model_alone() -> None:
    model, x = Net(), inputs()
    (stack,) = find_chains(model, x).crosses
    expected = model(x)

    def refused(error: type[LokaError], match: str, *how: Any) -> None:
        with pytest.raises(error, match=match):
            form_chains(model, [], [(stack, *how)])
        assert not runs_fused(model)
        assert torch.equal(model(x), expected)

    refused(NoKernelFits, "e4m3_row only", "e4m3_tensor", {})
    refused(NoKernelFits, "cross.0.u/output", "e4m3_row", {"cross.0.u/output": "emulated:rowwise_e4m3"})
    hook = model.cross[1].register_forward_hook(lambda module, args, out: out)
    refused(NotConverted, "no cross layer", "e4m3_row", {})
    hook.remove()
    fused(model, x)
    with pytest.raises(NotConverted, match="revert"):
        form_chains(model, [], [(stack, "e4m3_row", {})])
