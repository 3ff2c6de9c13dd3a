"""Wukong at a published size with Swish: there HardSwish has something to replace.

The zoo's published sizes of Wukong take ReLU, as its paper does; LoKA's Wukong has Swish at first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from loka.zoo import build
from loka.zoo.layers import Front
from loka.zoo.wukong import Wukong

_TOKENS = 64  # into and out of each layer of the 2-GFLOP size but the first


def wukong_2gf_swish(*, dense_features: int, vocab_sizes: Sequence[int]) -> nn.Module:
    return build(
        "wukong", size="2gf", activation="silu", dense_features=dense_features, vocab_sizes=vocab_sizes
    )


def wukong_2gf_layer(*, dense_features: int, vocab_sizes: Sequence[int]) -> nn.Module:
    """One of the seven equal layers of `wukong_2gf_swish`, behind 64 tokens and before a narrow head.

    For step times: what is around the layer is a tenth of its GEMMs, so the step's time is the layer's.
    Tokens are looked up, without an MLP; the features are repeated until there are 64.
    """
    return _OneLayer(dense_features, vocab_sizes)


class _OneLayer(Wukong):
    def __init__(self, dense_features: int, vocab_sizes: Sequence[int]) -> None:
        fields = _TOKENS - dense_features
        self._rounds = -(-fields // len(vocab_sizes))
        self._fields = fields
        front = Front(
            dense_features=dense_features,
            vocab_sizes=(tuple(vocab_sizes) * self._rounds)[:fields],
            dim=160,
            bottom=None,
        )
        super().__init__(
            front,
            layers=1,
            fm_tokens=_TOKENS // 2,
            lc_tokens=_TOKENS // 2,
            rank=24,
            hidden=(2048, 2048, 2048),
            top=(256,),
            activation="silu",
            norm=True,
        )

    def forward(  # type: ignore[override]
        self, dense: torch.Tensor, sparse: torch.Tensor
    ) -> torch.Tensor:
        return super().forward(dense, sparse.repeat(1, self._rounds)[:, : self._fields])
