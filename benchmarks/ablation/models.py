"""Wukong at a published size with Swish: there HardSwish has something to replace.

The zoo's published sizes of Wukong take ReLU, as its paper does; LoKA's Wukong has Swish at first.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from loka.zoo import build


def wukong_2gf_swish(*, dense_features: int, vocab_sizes: Sequence[int]) -> nn.Module:
    return build(
        "wukong", size="2gf", activation="silu", dense_features=dense_features, vocab_sizes=vocab_sizes
    )
