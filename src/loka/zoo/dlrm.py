"""DLRM (arXiv 1906.00091): a bottom MLP, embeddings, their pairwise dots, a top MLP.

tokens t_0 = bottom(dense), t_i = embedding_i(id_i);   logit = top([t_0, (t_i . t_j) for i > j])
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from loka.zoo.layers import Front, mlp


class PairwiseDots(nn.Module):
    """[B, n, dim] -> [B, n (n - 1) / 2]: dots of distinct tokens, row by row below the diagonal."""

    pairs: torch.Tensor

    def __init__(self, tokens: int) -> None:
        super().__init__()
        row, column = torch.tril_indices(tokens, tokens, offset=-1)
        self.register_buffer("pairs", row * tokens + column, persistent=False)
        self.out_features = tokens * (tokens - 1) // 2

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        dots = torch.bmm(tokens, tokens.transpose(1, 2))
        # Flat, because indexing with two lists took 3.7 ms against 1.6 (batch 1024, 27 tokens, one CPU core).
        return dots.flatten(1).index_select(1, self.pairs)


class DLRM(nn.Module):
    """dense [B, D], sparse [B, F] -> logits [B]; histories are taken but not read.

    `bottom` leaves out its last width, the embedding's.
    """

    def __init__(
        self,
        *,
        dense_features: int,
        vocab_sizes: Sequence[int],
        embedding_dim: int,
        bottom: Sequence[int],
        top: Sequence[int],
        activation: str = "relu",
        norm: bool = False,
    ) -> None:
        super().__init__()
        if not dense_features:
            raise ValueError("dense_features=0: DLRM needs dense features for its bottom MLP")
        self.front = Front(
            dense_features=dense_features,
            vocab_sizes=vocab_sizes,
            dim=embedding_dim,
            bottom=bottom,
            activation=activation,
            norm=norm,
        )
        self.dots = PairwiseDots(self.front.tokens)
        self.top = mlp(embedding_dim + self.dots.out_features, top, activation=activation, norm=norm)
        self.logit = nn.Linear(top[-1], 1)

    def forward(
        self,
        dense: torch.Tensor,
        sparse: torch.Tensor,
        sequence: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        tokens = self.front(dense, sparse)
        return self.logit(self.top(torch.cat([tokens[:, 0], self.dots(tokens)], dim=1))).squeeze(1)
