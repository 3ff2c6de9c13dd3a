"""DCN-V2 (arXiv 2008.13535): cross layers that raise the degree of interaction by one each.

    full rank   x_{l+1} = x_0 * (W x_l + b) + x_l          (1)
    low rank    x_{l+1} = x_0 * (U (V x_l) + b) + x_l      (2)   V [rank, N], U [N, rank]

Stacked: the deep MLP reads the last x. Parallel: it reads x_0, and the logit reads both. MLPerf's DLRM-DCNv2
is stacked and low rank, with DLRM's bottom MLP in front. Low rank trades 2 rank / N of the work for capacity.
"""

from collections.abc import Sequence

import torch
from torch import nn

from loka.zoo.layers import Front, mlp


class CrossLayer(nn.Module):
    """x_0 and x [B, N] -> [B, N]; `rank` None means full rank. The bias belongs to the outer map only."""

    def __init__(self, features: int, *, rank: int | None) -> None:
        super().__init__()
        self.v = nn.Linear(features, rank, bias=False) if rank else None
        self.u = nn.Linear(rank or features, features)

    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        inner = x if self.v is None else self.v(x)
        return x0 * self.u(inner) + x


class DCNv2(nn.Module):
    """dense [B, D], sparse [B, F] -> logits [B]; histories are taken but not read.

    Dense features are one token in front of MLPerf's, and one each in front of BARS'.
    """

    def __init__(
        self,
        front: Front,
        *,
        cross_layers: int,
        rank: int | None,
        deep: Sequence[int],
        parallel: bool = False,
        activation: str = "relu",
        norm: bool = False,
    ) -> None:
        super().__init__()
        self.front = front
        features = front.tokens * front.dim
        self.cross = nn.ModuleList(CrossLayer(features, rank=rank) for _ in range(cross_layers))
        self.deep = mlp(features, deep, activation=activation, norm=norm)
        self.parallel = parallel
        self.logit = nn.Linear(deep[-1] + (features if parallel else 0), 1)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor, *history: torch.Tensor) -> torch.Tensor:
        x0 = self.front(dense, sparse).flatten(1)
        x = x0
        for layer in self.cross:
            x = layer(x0, x)
        last = torch.cat([x, self.deep(x0)], dim=1) if self.parallel else self.deep(x)
        return self.logit(last).squeeze(1)
