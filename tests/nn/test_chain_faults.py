"""What goes wrong around chains in real training loops, and must not go on from there."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import loka
from loka.core.exceptions import NotConverted
from loka.core.fusion import forced_fusion
from loka.nn import chain_snapshot, count_rounding, forget_weights
from loka.nn.chain import form_chains, runs_fused
from loka.nn.dataflow import find_chains
from loka.zoo.dcn import CrossLayer


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 64))


def formed(model: nn.Module, x: torch.Tensor) -> nn.Module:
    found = find_chains(model, x)
    chains = [(chain, "e4m3_row", {}) for chain in found.chains if len(chain.paths) > 1]
    form_chains(model, chains, [(stack, "e4m3_row", {}) for stack in found.crosses])
    return model


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(CrossLayer(64, rank=32) for _ in range(2))

    def forward(self, x0: torch.Tensor) -> torch.Tensor:
        x = x0
        for layer in self.layers:
            x = layer(x0, x)
        return x


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative; three layers of e4m3 are within 0.12, ReLU's flips included."""
    return float((found.detach() - exact.detach()).norm() / exact.detach().norm())


@pytest.mark.parametrize("build", [mlp, Stack])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_is_over_with_its_step(build: type[nn.Module], bad: float) -> None:
    """The optimizer is not stepped on it, as GradScaler and careful loops do, so no weight changes."""
    x = torch.randn(64, 64)
    low = formed(build(), x)
    grad = torch.randn(64, 64)

    def gradients(scale: float) -> list[torch.Tensor]:
        for parameter in low.parameters():
            parameter.grad = None
        low(x).backward(scale * grad)
        return [parameter.grad for parameter in low.parameters()]

    before = gradients(1.0)
    assert not all(g.isfinite().all() for g in gradients(bad))
    for found, one in zip(gradients(1.0), before, strict=True):
        assert torch.equal(found, one)


@pytest.mark.parametrize("build", [mlp, Stack])
def test_a_small_backward_after_a_large_one(build: type[nn.Module]) -> None:
    """Gradients of one loss after another, of another size, between two steps."""
    x = torch.randn(64, 64)
    low = formed(build(), x)
    weights = [p for p in low.parameters() if p.dim() == 2]
    alone = torch.autograd.grad(low(x).square().mean(), weights)
    out = low(x)
    torch.autograd.grad(1e6 * out.square().mean(), weights, retain_graph=True)
    for found, one in zip(torch.autograd.grad(out.square().mean(), weights), alone, strict=True):
        assert torch.equal(found, one)


@pytest.mark.parametrize("loop", ["evaluating", "reentrant checkpoint"])
def test_scales_follow_the_data_in_any_loop(loop: str) -> None:
    x = torch.randn(64, 64)
    low = formed(mlp(), x)
    optimizer = torch.optim.SGD(low.parameters(), lr=1e-6)
    for step in range(24):
        values = (x * 2.0 ** (step / 2)).requires_grad_()
        out = checkpoint(low, values, use_reentrant=True) if loop != "evaluating" else low(values)
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if loop == "evaluating":
            with torch.no_grad():
                low(x)
    plain = mlp()
    plain.load_state_dict(low.state_dict())
    last = x * 2.0**11.5
    assert error(low(last), plain(last)) < 0.12


def test_serving_what_was_never_trained_here() -> None:
    """The first batch may be a warm-up of zeros, or a small one."""
    plain, x = mlp(), torch.randn(64, 64)
    low = formed(copy.deepcopy(plain), x)
    with torch.no_grad():
        low(torch.zeros_like(x))
        low(0.01 * x)
        assert error(low(x), plain(x)) < 0.12
        assert error(low(30 * x), plain(30 * x)) < 0.12


def test_a_norm_in_front_reads_what_autocast_would_let_it_read() -> None:
    """bfloat16 keeps 8 bits: of values around 300 it leaves nothing below 1."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64))
    x = 300 + torch.randn(64, 64)
    low = formed(copy.deepcopy(plain), x)
    with torch.autocast("cpu", torch.bfloat16):
        leaf = x.clone().requires_grad_()
        out = low(leaf)
        assert out.dtype == torch.bfloat16
        assert error(out.float(), plain(x).float()) < 0.12
        out.float().square().mean().backward()
    exact = x.clone().requires_grad_()
    plain(exact).square().mean().backward()
    assert leaf.grad.dtype == torch.float32
    assert error(leaf.grad, exact.grad) < 0.15


def test_an_empty_batch_gives_every_parameter_a_gradient() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.SiLU(), nn.Linear(32, 16))
    low = formed(model, torch.randn(4, 64))
    low(torch.randn(0, 64)).sum().backward()
    for parameter in low.parameters():
        assert (parameter.grad == 0).all()


def test_inner_modules_refuse_to_run_by_themselves() -> None:
    x = torch.randn(8, 64)
    low = formed(mlp(), x)
    low(x)
    with pytest.raises(NotConverted, match=r"(?s)computes all of 0, 1, 2, 3, 4.*Way out: .*revert") as caught:
        low[2](torch.randn(8, 128))
    assert "keep=('0',)" in str(caught.value)
    replaced = copy.deepcopy(low)
    replaced[0] = nn.Linear(64, 128)
    with pytest.raises(NotConverted):
        replaced(x)


@pytest.mark.usefixtures("forced_fusion")
@pytest.mark.parametrize("change", ["activation", "norm", "hook", "dropout"])
@forced_fusion()
def test_a_plan_is_refused_where_the_modules_changed(change: str) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(48, 64), nn.LayerNorm(64), nn.SiLU(), nn.Dropout(0.0), nn.Linear(64, 32), nn.ReLU()
        )

    model = build()
    with loka.Probe(model, every=1) as probe:
        model(torch.randn(16, 48)).mean().backward()
    names = ("emulated:tensorwise_e4m3", "emulated:rowwise_e4m3")
    report = loka.measure(probe.stats(), device="cpu", candidates=names)
    plan = loka.plan(report, loka.Budget(chains="always", min_sqnr_db=20))
    assert list(plan.chains) == ["0"]
    other = build()
    if change == "activation":
        other[2] = nn.ReLU()
    elif change == "norm":
        other[1] = nn.RMSNorm(64)
    elif change == "hook":
        other[1].register_forward_hook(lambda module, args, out: 3 * out)
    else:
        other[3].p = 0.9
    with pytest.raises(NotConverted, match="cannot form the chain at 0"):
        loka.convert(other, plan)
    assert not runs_fused(other)
    assert type(other[0]) is nn.Linear
    loka.convert(build(), plan)


def test_probing_what_runs_as_a_whole_is_refused() -> None:
    low = formed(mlp(), torch.randn(8, 64))
    with pytest.raises(NotConverted, match="revert"):
        loka.Probe(low)


def test_cross_stacks_are_reached_by_the_same_functions() -> None:
    x = torch.randn(32, 64)
    low = formed(Stack(), x)
    low(x).sum().backward()
    assert "layers.0.u/weight" in chain_snapshot(low)
    with torch.no_grad():
        for parameter in low.parameters():
            parameter.data.copy_(-1 * parameter)
    forget_weights(low)
    plain = Stack()
    plain.load_state_dict(low.state_dict())
    assert error(low(x), plain(x)) < 0.12
    count_rounding(low)
    low(1e4 * x).sum().backward()
    assert sum(slot["saturated"] for slot in chain_snapshot(low).values()) > 0
