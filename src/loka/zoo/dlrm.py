"""DLRM (arXiv 1906.00091): a bottom MLP, embeddings, their pairwise dots, a top MLP.

tokens t_0 = bottom(dense), t_i = embedding_i(id_i);   logit = top([t_0, (t_i . t_j) for i > j])
"""

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

    The front has the bottom MLP. Raises ValueError for one without.
    """

    def __init__(self, front: Front, *, top: Sequence[int], activation: str = "relu", norm: bool = False) -> None:
        super().__init__()
        if front.dense_tokens != 1:
            raise ValueError(
                f"DLRM needs the one dense token of a bottom MLP, and its front has {front.dense_tokens}: "
                "give it dense features and `bottom` widths"
            )
        self.front = front
        self.dots = PairwiseDots(front.tokens)
        self.top = mlp(front.dim + self.dots.out_features, top, activation=activation, norm=norm)
        self.logit = nn.Linear(top[-1], 1)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor, *history: torch.Tensor) -> torch.Tensor:
        tokens = self.front(dense, sparse)
        return self.logit(self.top(torch.cat([tokens[:, 0], self.dots(tokens)], dim=1))).squeeze(1)
