"""A synthetic world with a domain of 2 % of the rows that eight bits harm, and others that they do not.

The other domains tell their labels by columns of one size. In domain 7 a counter stands beside columns that
are a few hundred times smaller, and those tell: with one scale a row and even steps (INT8) they round to next
to nothing.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import nn

from loka.data.batch import Batch
from loka.train import Segments

DOMAINS, RARE, SHARE = 10, 7, 0.02
WIDTH = 16
SEGMENTS = Segments((f"domain = {RARE}",), lambda batch: torch.where(batch.sparse[:, 0] == RARE, 0, -1), by="domain")


@dataclass(frozen=True)
class Domains:
    """`rows` clicks; `sparse` [B, 1] is the domain; batch i is the same on every pass."""

    rows: int
    seed: int = 0
    share: float = SHARE
    dense_features: int = 2 * WIDTH
    vocab_sizes: tuple[int, ...] = (DOMAINS,)

    @property
    def identity(self):
        return f"domains-{self.rows}-{self.seed}-{self.share}"

    def batches(self, batch_size, *, start=0):
        for first in range(start * batch_size, self.rows, batch_size):
            yield self._batch(min(batch_size, self.rows - first), first)

    def _batch(self, count, first):
        g = torch.Generator().manual_seed(self.seed * 1_000_003 + first)
        rare = torch.rand(count, generator=g) < self.share
        other = torch.randint(DOMAINS - 1, (count,), generator=g)
        domain = torch.where(rare, RARE, other + (other >= RARE).long())
        told, small = torch.randn(2, count, WIDTH, generator=g).unbind()
        told[rare], small[~rare] = 0.0, 0.0
        z = torch.where(rare, 2 * small[:, :4].sum(1), told[:, :4].sum(1))
        small = 0.3 * small
        small[rare, -1] = 100.0  # the counter
        label = (torch.rand(count, generator=g) < z.sigmoid()).float()
        return Batch(dense=torch.cat([told, small], dim=1), sparse=domain.unsqueeze(1), label=label)

    def account(self):
        return {}


class Tower(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        layers = [2 * WIDTH, width, width, width]
        self.mlp = nn.Sequential(
            *(part for a, b in itertools.pairwise(layers) for part in (nn.Linear(a, b), nn.ReLU()))
        )
        self.logit = nn.Linear(width, 1)

    def forward(self, dense, sparse):
        return self.logit(self.mlp(dense)).squeeze(1)
