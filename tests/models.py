"""Models that are not ours, with sides that fit nothing."""

from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import loka
from loka.measurement import Settings


def odd_mlp():
    return nn.Sequential(
        nn.Linear(13, 479), nn.LayerNorm(479), nn.SiLU(), nn.Linear(479, 1000), nn.ReLU(), nn.Linear(1000, 1)
    )


class Encoder(nn.Module):
    """nn.TransformerEncoder with a scalar head; x [B, 7, 48] -> [B, 1]."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(48, 4, dim_feedforward=88, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(48, 1)

    def forward(self, x):
        return self.head(self.encoder(x).mean(dim=1))


def batches(model, count, rows=40):
    generator = torch.Generator().manual_seed(0)
    shape = (rows, 7, 48) if isinstance(model, Encoder) else (rows, 13)
    made = []
    for _ in range(count):
        x = torch.randn(shape, generator=generator)
        label = (x.reshape(rows, -1).sum(dim=1, keepdim=True) > 0).float()
        made.append((x, label))
    return made


def train_steps(model, count, *, call=None, device="cpu", lr=1e-3):
    optimizer = torch.optim.Adam(model.parameters(), lr)
    losses = []
    for x, label in batches(model, count):
        with torch.autocast(device, torch.bfloat16):
            logits = (call or model)(x.to(device))
        loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), label.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def stats_of(model, x, loss=lambda y: y.square().mean(), **options):
    with loka.Probe(model, every=1, **options) as probe:
        loss(model(x)).backward()
    return probe.stats()


def forced_plan(stats, *candidates, force=None, budget=None):
    """Every GEMM by the first of `candidates`, whatever it costs, but for those that `force` names."""
    quick = Settings(rows=32, min_draws=2, max_draws=2)
    report = loka.measure(stats, device="cpu", candidates=candidates, errors_only=True, settings=quick)
    return loka.plan(report, budget, force={**(force or {}), "*": candidates[0]})


@contextmanager
def as_gathered(model, names):
    """Within it weights hold what eight bits with one scale, the power of two below 256 / 448 of e4m3, leave
    of them.

    Written here by itself: 2^(ceil(log2 max|W|) - 8) by math, not by the bits.
    """
    masters = {name: p.detach().clone() for name, p in model.named_parameters() if name in names}
    for name, p in model.named_parameters():
        if name in names:
            scale = 2.0 ** (torch.log2(p.detach().abs().max().double()).ceil() - 8).item()
            p.data = (p.detach() / scale).to(torch.float8_e4m3fn).float().mul(scale).to(p.dtype)
    try:
        yield
    finally:
        for name, p in model.named_parameters():
            if name in masters:
                p.data = masters[name]


class Checkpointed(nn.Module):
    def __init__(self, inner, *, reentrant=False):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)
