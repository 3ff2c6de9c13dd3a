"""A model with sites of every kind, a plan that forces FP8 on it, and training steps with counted sites."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import loka
from loka.core.plan import Plan
from loka.nn.site import health_of
from loka.nn.unwrap import unwrap
from loka.probe import Settings

ROWWISE = "emulated:rowwise_e4m3"
BATCH, TOKENS, WIDTH, RANK, EXPERTS = 16, 4, 32, 16, 2
STEPS, LR = 3, 0.05


class LowRankCross(nn.Module):
    """x <- x0 * (V (W x) + b) + x, with members of two ParameterLists, as TorchRec's LowRankCrossNet."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.down = nn.ParameterList(_normal(RANK, WIDTH) for _ in range(layers))
        self.up = nn.ParameterList(_normal(WIDTH, RANK) for _ in range(layers))
        self.bias = nn.ParameterList(nn.Parameter(torch.zeros(WIDTH)) for _ in range(layers))

    def forward(self, x0: torch.Tensor) -> torch.Tensor:
        x = x0
        for down, up, bias in zip(self.down, self.up, self.bias, strict=True):
            x = x0 * (F.linear(F.linear(x, down), up) + bias) + x
        return x


class Gated(nn.Module):
    """Two slices of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = _normal(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.w[:WIDTH]) * torch.sigmoid(F.linear(x, self.w[WIDTH:]))


class Experts(nn.Module):
    """Stacked weights in one bmm."""

    def __init__(self) -> None:
        super().__init__()
        self.w = _normal(EXPERTS, WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.expand(EXPERTS, -1, -1), self.w).mean(0)


class Mixed(nn.Module):
    """[B, TOKENS, WIDTH] -> logits [B]: nn.Linear, attention, parameter lists, slices and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.cross = LowRankCross()
        self.gated = Gated()
        self.experts = Experts()
        self.top = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bottom(x))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.cross(x.mean(1))
        return self.top(x + self.gated(x) + self.experts(x)).squeeze(-1)


SITES = {
    *("bottom", "top.0", "top.2", "attention.in_proj_weight", "attention.out_proj"),
    *(f"cross.{name}.{layer}" for name in ("down", "up") for layer in range(2)),
    *(f"gated.w[{part}]" for part in (f":{WIDTH}", f"{WIDTH}:")),
    *(f"experts.w[{expert}]" for expert in range(EXPERTS)),
}


def _normal(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5)


def mixed() -> Mixed:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Mixed().train()


def rows(step: int, batch: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(batch, TOKENS, WIDTH, generator=drawn), torch.arange(batch) % 2 * 1.0


def half(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of `step` that rank 0 or 1 has."""
    x, y = rows(step)
    return x.chunk(2)[rank], y.chunk(2)[rank]


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(model(x), y)


def probed(model: nn.Module, feed: Callable[[int], torch.Tensor] | None = None, steps: int = 2) -> loka.Stats:
    """Statistics over `steps` sampled steps; `feed(step)` makes the loss."""
    with loka.Probe(model, every=1, depth_rows=8) as probe:
        for step in range(steps):
            (loss_of(model, *rows(step)) if feed is None else feed(step)).backward()
    model.zero_grad()
    return probe.stats()


def forced(stats: loka.Stats) -> Plan:
    """Every GEMM of every site in FP8, whatever it costs."""
    report = loka.measure(
        stats, device="cpu", candidates=[ROWWISE], errors_only=True, settings=Settings(rows=32, max_draws=4)
    )
    return loka.plan(report, force={"*": ROWWISE})


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, LR)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3)


def train(
    model: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer, parts: Callable[[int], list[Any]]
) -> list[list[float]]:
    """Losses of each part of each step; an update has the mean gradient of its parts."""
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        found = []
        for x, y in (given := parts(step)):
            loss = loss_of(model, x, y)
            (loss / len(given)).backward()
            found.append(loss.item())
        optimizer.step()
        losses.append(found)
    return losses


def alone(model: nn.Module, make: Callable[..., torch.optim.Optimizer]) -> list[list[float]]:
    """Losses [STEPS][2] of one process that takes the rows of both ranks one after the other."""
    return train(model, make(model.parameters()), lambda step: [half(step, 0), half(step, 1)])


def converted(plan: Plan) -> nn.Module:
    return loka.convert(mixed(), plan)


def runs(model: nn.Module) -> dict[str, int]:
    return {site: int(counts["runs"]) for site, counts in health_of(model).items()}


def planned(plan: Plan) -> set[str]:
    """Names of the FP8 GEMMs of a plan."""
    return {d.site for d in plan.decisions.values() if d.candidate != "hp"}


def forwards(model: nn.Module) -> list[str]:
    """Paths of modules with a `forward` of their own, or any other trace of LoKA."""
    return [
        path
        for path, module in unwrap(model).named_modules()
        if any(name == "forward" or name.startswith("loka") for name in module.__dict__)
    ]


def twin(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)
