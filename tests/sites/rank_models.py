import functools

import torch
import torch.nn.functional as F
from foreign.spec import seeded
from torch import nn

import loka
from loka.core.records.report import HP
from loka.measurement import Settings
from loka.nn.site import SiteForward, health_of

ROWWISE = "emulated:rowwise_e4m3"
BATCH, TOKENS, WIDTH, RANK, EXPERTS = 16, 4, 32, 16, 2
STEPS, LR = 3, 0.05


class LowRankCross(nn.Module):
    def __init__(self, layers=1):
        super().__init__()
        self.down = nn.ParameterList(_normal(RANK, WIDTH) for _ in range(layers))
        self.up = nn.ParameterList(_normal(WIDTH, RANK) for _ in range(layers))
        self.bias = nn.ParameterList(nn.Parameter(torch.zeros(WIDTH)) for _ in range(layers))

    def forward(self, x0):
        x = x0
        for down, up, bias in zip(self.down, self.up, self.bias, strict=True):
            x = x0 * (F.linear(F.linear(x, down), up) + bias) + x
        return x


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = _normal(2 * WIDTH, WIDTH)

    def forward(self, x):
        return F.linear(x, self.w[:WIDTH]) * torch.sigmoid(F.linear(x, self.w[WIDTH:]))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = _normal(EXPERTS, WIDTH, WIDTH)

    def forward(self, x):
        return torch.bmm(x.expand(EXPERTS, -1, -1), self.w).mean(0)


class Mixed(nn.Module):
    """[B, TOKENS, WIDTH] -> logits [B]: nn.Linear, attention, parameter lists, slices and experts."""

    def __init__(self):
        super().__init__()
        self.bottom = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.cross = LowRankCross()
        self.gated = Gated()
        self.experts = Experts()
        self.apart = False  # whether attention gets its one input as three tensors, as FSDP2 hands them over
        self.top = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, x):
        x = torch.relu(self.bottom(x))
        q, k, v = (x.view_as(x) for _ in range(3)) if self.apart else (x, x, x)
        x = x + self.attention(q, k, v, need_weights=False)[0]
        x = self.cross(x.mean(1))
        return self.top(x + self.gated(x) + self.experts(x)).sum(-1)


SITES = {
    *("bottom", "top.0", "top.2", "attention.in_proj_weight", "attention.out_proj"),
    *("cross.down.0", "cross.up.0"),
    *(f"gated.w[{part}]" for part in (f":{WIDTH}", f"{WIDTH}:")),
    *(f"experts.w[{expert}]" for expert in range(EXPERTS)),
}


def _normal(*shape):
    return nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5)


mixed = seeded(Mixed)


def rows(step, batch=BATCH):
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(batch, TOKENS, WIDTH, generator=drawn), torch.arange(batch) % 2 * 1.0


def half(step, rank):
    x, y = rows(step)
    return x.chunk(2)[rank], y.chunk(2)[rank]


def loss_of(model, x, y):
    return F.binary_cross_entropy_with_logits(model(x), y)


def probed(model, feed=None, steps=2, **options):
    with loka.Probe(model, every=1, depth_rows=8, **options) as probe:
        for step in range(steps):
            (loss_of(model, *rows(step)) if feed is None else feed(step)).backward()
    model.zero_grad()
    return probe.stats()


def forced(stats, candidate=ROWWISE):
    settings = Settings(rows=32, max_draws=4)
    report = loka.measure(stats, device="cpu", candidates=[candidate], errors_only=True, settings=settings)
    return loka.plan(report, force={"*": candidate})


@functools.cache
def bare_stats():
    return probed(mixed())


@functools.cache
def bare_plan():
    return forced(bare_stats())


def sgd(parameters):
    return torch.optim.SGD(parameters, LR)


def adamw(parameters):
    return torch.optim.AdamW(parameters, 1e-3)


def train(model, optimizer, parts):
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


def alone(model, make):
    """Losses [STEPS][2] of one process that takes the rows of both ranks one after the other."""
    return train(model, make(model.parameters()), lambda step: [half(step, 0), half(step, 1)])


def on_rank(model, parameters, rank, make):
    """Losses [STEPS] of one of two ranks."""
    return [loss for (loss,) in train(model, make(parameters), lambda step: [half(step, rank)])]


def by_halves(plan, make, *, apart=False):
    model = mixed()
    model.apart = apart
    return alone(loka.convert(model, plan), make)


def planned(plan):
    return {decision.site for decision in plan.decisions.values() if decision.candidate != HP}


def runs(model):
    return {site: int(counts["runs"]) for site, counts in health_of(model).items()}


def left(model):
    """Paths of modules on which something of LoKA stands."""
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module.__dict__.get("forward"), SiteForward)
        or any(name.startswith("loka") for name in module.__dict__)
    ]
