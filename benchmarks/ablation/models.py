"""Wukong at a published size with Swish: there HardSwish has something to replace.

The zoo's published sizes of Wukong take ReLU, since its paper does not say; LoKA's Wukong has Swish at first.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from loka.zoo import build


def wukong_2gf_swish(*, dense_features: int, vocab_sizes: Sequence[int]) -> nn.Module:
    model = build("wukong", size="2gf", dense_features=dense_features, vocab_sizes=vocab_sizes)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.ReLU):
                setattr(parent, name, nn.SiLU())
    return model
