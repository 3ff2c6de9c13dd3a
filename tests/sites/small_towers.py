import pytest
import torch
from forced import plan_of
from oracle import by_hand
from sweeps import sweep
from torch import nn

import loka

ROWS = 128
BOTH_WAYS = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
EAGER_FIRST = pytest.mark.parametrize("compiled", sweep((False, True), [False]), ids=["eager", "compiled"])
"""Compiled they are slow."""


def tower(norm=False, dropout=None):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = []
        for _ in range(3):
            layers.append(nn.Linear(64, 64))
            layers += [nn.LayerNorm(64)] if norm else []
            layers += [nn.Dropout(dropout)] if dropout is not None else []
            layers.append(nn.ReLU())
        return nn.Sequential(*layers, nn.Linear(64, 1))


def batch(rows=ROWS, seed=1):
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))


def pair(**options):
    plain = tower(**options)
    found = loka.convert(tower(**options), plan_of(plain, batch().requires_grad_()))
    return found, by_hand(tower(**options))
