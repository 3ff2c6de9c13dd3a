"""Towers whose layers shard unevenly, and one process that quantizes weights as ranks that gather them in FP8
do."""

import functools
import itertools

import torch
import torch.nn.functional as F
from models import as_gathered, forced_plan
from torch import nn

import loka

POW2 = "emulated:rowwise_e4m3_pow2"
STEPS, LR = 4, 0.01


def tower(*sides):
    """Linear - ReLU - ... - Linear with weights that are the same in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = []
        for wide, out in itertools.pairwise(sides):
            layers += [nn.Linear(wide, out), nn.ReLU()]
        return nn.Sequential(*layers[:-1])


def uneven():
    """Rows that three ranks cannot share evenly, one rank with none of them; sides that are no multiple of
    16."""
    return tower(24, 100, 33, 4, 40)


class Joinable(nn.Module):
    """Sides that regions take, and a forward of its own: Dynamo compiles that of nn.Sequential child by child
    where FSDP2's hooks stand before it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(m for m in tower(64, 112, 80, 32) if isinstance(m, nn.Linear))

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return self.layers[-1](x)


def joinable():
    return Joinable()


@functools.cache
def plan_of(make, candidate=POW2):
    model = make()
    with loka.Probe(model, every=1, effect_samples=0) as probe:
        loss_of(model, *rows(0, 0, width(model))).backward()
    return forced_plan(probe.stats(), candidate)


def width(model):
    return int(next(m for m in model.modules() if isinstance(m, nn.Linear)).in_features)


def rows(step, rank, features, count=16):
    drawn = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(count, features, generator=drawn), torch.randn(count, generator=drawn)


def loss_of(model, x, y):
    return F.mse_loss(model(x).sum(-1), y)


def alone(model, names, ranks, steps=STEPS):
    """Losses [steps][ranks] of one process with the rows of each rank in turn; mean gradients, Adam."""
    optimizer = torch.optim.Adam(model.parameters(), LR)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        with as_gathered(model, names):
            found = [loss_of(model, *rows(step, rank, width(model))) for rank in range(ranks)]
            for loss in found:  # undivided, as on a rank: a third would round to other eight bits
                loss.backward()
        for parameter in model.parameters():
            parameter.grad /= ranks
        optimizer.step()
        losses.append([loss.item() for loss in found])
    return losses
