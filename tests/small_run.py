"""A small model and rows whose training depends on everything a checkpoint has to hold.

Dropout (random state), a table with sparse gradients, Adam moments, and a buffer outside
the state dict that scales the next forward.
"""

from dataclasses import dataclass

import torch
from torch import nn

from loka.data.batch import Batch

IDS = 50


@dataclass(frozen=True)
class RandomRows:
    """`rows` clicks with a linear teacher; batch i is the same on every pass."""

    rows: int = 1000
    seed: int = 7
    dense_features: int = 4
    vocab_sizes: tuple[int, ...] = (IDS, IDS)

    @property
    def identity(self):
        return f"random-{self.rows}-{self.seed}"

    def batches(self, batch_size, *, start=0):
        for first in range(start * batch_size, self.rows, batch_size):
            count = min(batch_size, self.rows - first)
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + first)
            dense = torch.randn(count, self.dense_features, generator=generator)
            sparse = torch.randint(IDS, (count, len(self.vocab_sizes)), generator=generator)
            chance = torch.sigmoid(dense.sum(1) + (sparse[:, 0] % 3 - 1).float() - 1)
            label = (torch.rand(count, generator=generator) < chance).float()
            yield Batch(dense=dense, sparse=sparse, label=label)

    def account(self):
        return {}


class SmallModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(IDS, 8, sparse=True)
        self.mlp = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
        self.register_buffer("largest", torch.ones(()), persistent=False)

    def forward(self, dense, sparse):
        if self.training:
            self.largest.mul_(0.9).add_(0.1 * dense.detach().abs().max())
        inputs = torch.cat([dense / self.largest, self.table(sparse).flatten(1)], dim=1)
        return self.mlp(inputs).squeeze(1)


def stop_at(last, error=KeyboardInterrupt):
    """Raises after `last` steps. A run saves itself at Ctrl-C; at a MemoryError what no checkpoint has is lost."""

    def stop(step):
        if step == last:
            raise error

    return stop


def small_model(seed=0):
    torch.manual_seed(seed)
    return SmallModel()
