"""Wukong (arXiv 2403.02545): stacked factorization machines over a set of embeddings X [n, d].

    X'  = LN(concat(FMB(X), LCB(X)) + R X)           n -> n_fm + n_lc tokens; R only where n changes
    FMB = reshape(MLP(LN(flatten(X (X^T Y)))))       [n, k] -> [n_fm, d], all pairs at rank k instead of n
    LCB = W X                                        [n_lc, n] [n, d]

Y [n, k] is learned; attentive, it is computed from the input by an MLP over k compressed tokens, which
costs a GEMM of width n k. The maps over tokens (Y, W, R) are Linears on X^T.
"""

from collections.abc import Sequence

import torch
from torch import nn

from loka.zoo.layers import Front, TokenLinear, mlp


class FactorizationBlock(nn.Module):
    """FMB: [B, n, d] -> [B, out_tokens, d]. `attention` widths make Y attentive; None makes it learned."""

    def __init__(
        self,
        *,
        tokens: int,
        dim: int,
        out_tokens: int,
        rank: int,
        hidden: Sequence[int],
        attention: Sequence[int] | None,
        activation: str,
        norm: bool,
    ) -> None:
        super().__init__()
        self.shape = (out_tokens, dim)
        self.rank = rank
        # Learned: X^T [d, n] -> X^T Y [d, k]. Attentive: the same map compresses n tokens to k, as Y's input.
        self.project = nn.Linear(tokens, rank, bias=False)
        self.attend: nn.Sequential | None = None
        if attention is not None:
            widths = [*attention, tokens * rank]
            self.attend = mlp(rank * dim, widths, activation=activation, norm=norm, last_activation=False)
        self.norm = nn.LayerNorm(tokens * rank)
        self.mlp = mlp(
            tokens * rank, [*hidden, out_tokens * dim], activation=activation, norm=norm, last_activation=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        xt = x.transpose(1, 2)
        projected = self.project(xt)
        if self.attend is not None:
            y = self.attend(projected.flatten(1)).unflatten(1, (x.shape[1], self.rank))
            projected = torch.bmm(xt, y)
        pairs = torch.bmm(x, projected)
        return self.mlp(self.norm(pairs.flatten(1))).unflatten(1, self.shape)


class WukongLayer(nn.Module):
    """[B, n, d] -> [B, fm_tokens + lc_tokens, d]."""

    def __init__(
        self,
        *,
        tokens: int,
        dim: int,
        fm_tokens: int,
        lc_tokens: int,
        rank: int,
        hidden: Sequence[int],
        attention: Sequence[int] | None,
        activation: str,
        norm: bool,
    ) -> None:
        super().__init__()
        self.fmb = FactorizationBlock(
            tokens=tokens,
            dim=dim,
            out_tokens=fm_tokens,
            rank=rank,
            hidden=hidden,
            attention=attention,
            activation=activation,
            norm=norm,
        )
        self.lcb = TokenLinear(tokens, lc_tokens)
        out_tokens = fm_tokens + lc_tokens
        self.residual = nn.Identity() if tokens == out_tokens else TokenLinear(tokens, out_tokens)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.cat([self.fmb(x), self.lcb(x)], dim=1) + self.residual(x))


class Wukong(nn.Module):
    """dense [B, D], sparse [B, F] -> logits [B]; histories are taken but not read.

    Dense features are one token, as in the paper, or one each (FuxiCTR), as the front makes them.
    """

    def __init__(
        self,
        front: Front,
        *,
        layers: int,
        fm_tokens: int,
        lc_tokens: int,
        rank: int,
        hidden: Sequence[int],
        top: Sequence[int],
        attention: Sequence[int] | None = None,
        activation: str = "relu",
        norm: bool = False,
    ) -> None:
        super().__init__()
        self.front = front
        out_tokens = fm_tokens + lc_tokens
        self.layers = nn.Sequential(
            *(
                WukongLayer(
                    tokens=out_tokens if index else front.tokens,
                    dim=front.dim,
                    fm_tokens=fm_tokens,
                    lc_tokens=lc_tokens,
                    rank=rank,
                    hidden=hidden,
                    attention=attention,
                    activation=activation,
                    norm=norm,
                )
                for index in range(layers)
            )
        )
        self.top = mlp(out_tokens * front.dim, top, activation=activation, norm=norm)
        self.logit = nn.Linear(top[-1], 1)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor, *history: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.front(dense, sparse))
        return self.logit(self.top(x.flatten(1))).squeeze(1)
