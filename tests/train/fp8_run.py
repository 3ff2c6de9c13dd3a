"""A small model that runs by an FP8 plan, with everything in it that a checkpoint has to hold.

Layers that are converted, dropout between them, a table with sparse gradients, and a buffer outside the
state dict.
"""

import hashlib

import torch
from small_run import IDS, RandomRows
from torch import nn

import loka
from loka.core.budget import Budget
from loka.measurement.settings import Settings
from loka.nn import BlockNorm, HardSwish
from loka.train import TrainConfig, train
from loka.train.automatic.auto import AutoConfig

CANDIDATES = ["emulated:rowwise_e4m3", "emulated:tensorwise_e4m3"]
CONFIG = TrainConfig(batch_size=16, checkpoint_every=3, log_every=5, window=40)
PROBED = 12  # steps
AUTO = AutoConfig(
    every=3,
    least_steps=5,
    most_steps=PROBED,
    width=1.0001,  # never reached: the phase ends after its share
    budget=Budget(min_sqnr_db=None),
    candidates=tuple(CANDIDATES),
    settings=Settings(min_draws=2, max_draws=2, rows=32),
)


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(IDS, 8, sparse=True)
        self.mlp = nn.Sequential(
            *(nn.Linear(20, 32, bias=False), BlockNorm(32, 16), HardSwish(), nn.Dropout(0.1)),
            *(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU()),
        )
        self.side = nn.Linear(20, 16)
        self.logit = nn.Linear(16, 1)
        self.register_buffer("largest", torch.ones(()), persistent=False)

    def forward(self, dense, sparse):
        if self.training:
            self.largest.mul_(0.9).add_(0.1 * dense.detach().abs().max())
        dense = dense * (1 + 1e-3 * torch.tanh(self.largest))
        x = torch.cat([dense, self.table(sparse).flatten(1)], dim=1)
        return self.logit(self.mlp(x) * torch.tanh(self.side(x))).squeeze(1)


def tower(seed=0):
    torch.manual_seed(seed)
    return Tower()


def make_plan(**budget):
    model = tower()
    with loka.Probe(model, every=1) as probe:
        train(model, RandomRows(64), config=CONFIG)
    report = loka.measure(probe.stats(), device="cpu", candidates=CANDIDATES)
    return loka.plan(report, loka.Budget(min_sqnr_db=None, **budget))


def digest(value):
    hashed = hashlib.sha256()

    def add(item):
        if isinstance(item, torch.Tensor):
            hashed.update(f"{item.dtype} {tuple(item.shape)}".encode())
            hashed.update(item.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(item, dict):
            for key in sorted(item, key=str):
                hashed.update(str(key).encode())
                add(item[key])
        elif isinstance(item, list | tuple):
            for part in item:
                add(part)
        else:
            hashed.update(repr(item).encode())

    add(value)
    return hashed.hexdigest()
