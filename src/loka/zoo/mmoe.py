"""MMoE (Ma et al., KDD 2018): a gate for each task mixes experts that all share.

    y_k = h^k(sum_i g^k(x)_i f_i(x)),   g^k(x) = softmax(W_gk x)          x = flatten(tokens)

f_i and h^k are MLPs; the last layer of h^k is row k of `logit`. Domains are ours: with `domain`, a sparse
feature, g^k = softmax(W_gk e_s) of its embedding alone, a mixture for each task and domain s.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from loka.zoo.layers import Front, mlp


class MMoE(nn.Module):
    """dense [B, D], sparse [B, F] -> logits [B], or [B, tasks]; histories are taken but not read.

    `expert` and `tower` are widths of each f_i and h^k. Raises ValueError for a domain that is no sparse feature.
    """

    def __init__(
        self,
        front: Front,
        *,
        experts: int,
        expert: Sequence[int],
        tower: Sequence[int],
        tasks: int = 1,
        domain: int | None = None,
        activation: str = "relu",
        norm: bool = False,
    ) -> None:
        super().__init__()
        fields = front.tokens - front.dense_tokens
        if domain is not None and not 0 <= domain < fields:
            raise ValueError(f"domain is {domain}; there are {fields} sparse features, counted from 0")
        self.front = front
        self.domain = None if domain is None else front.dense_tokens + domain
        self.column = f"column_{domain}"  # in the names of weights: those of another column do not load
        width = front.tokens * front.dim
        part = functools.partial(mlp, activation=activation, norm=norm)
        gates = nn.Linear(width if domain is None else front.dim, tasks * experts, bias=False)
        self.gates: Any = gates if domain is None else nn.ModuleDict({self.column: gates})
        self.experts = nn.ModuleList(part(width, expert) for _ in range(experts))
        self.towers = nn.ModuleList(part(expert[-1], tower) for _ in range(tasks))
        self.logit = nn.Linear(tower[-1], tasks)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor, *history: torch.Tensor) -> torch.Tensor:
        tokens = self.front(dense, sparse)
        x = tokens.flatten(1)
        found = torch.stack([expert(x) for expert in self.experts], dim=1)  # [B, experts, width]
        gates = self.gates(x) if self.domain is None else self.gates[self.column](tokens[:, self.domain])
        shares = gates.unflatten(1, (len(self.towers), -1)).softmax(dim=-1)
        mixed = torch.bmm(shares.to(found.dtype), found).unbind(1)
        heads = zip(self.towers, mixed, self.logit.weight.split(1), self.logit.bias.split(1), strict=True)
        logits = [functional.linear(tower(x), weight, bias) for tower, x, weight, bias in heads]
        return torch.cat(logits, dim=1).squeeze(1)
