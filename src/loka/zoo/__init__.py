"""Recommendation models in plain PyTorch, from their papers: `build("wukong", ...)`.

Every linear map is an `nn.Linear`; every model is `forward(dense [B, D], sparse [B, F]) -> logits [B]`,
and with a `HistoryTable` `forward(dense, sparse, sequence [B, L], lengths [B])`.
`dense_part(model)` is the same without the tables, called with looked-up rows [B, F, dim]. For sizes of
one's own: a class and its `Front`, `DLRM(Front(...), top=(256, 128))`.
"""

from loka.zoo.dcn import DCNv2
from loka.zoo.dhen import DHEN
from loka.zoo.dlrm import DLRM
from loka.zoo.embedded import dense_part, look_up
from loka.zoo.history import HistoryTable
from loka.zoo.inventory import inventory
from loka.zoo.layers import Front
from loka.zoo.mmoe import MMoE
from loka.zoo.presets import build, needs_sequences, presets, takes_history
from loka.zoo.sequences.hstu import HSTU
from loka.zoo.sequences.interformer import InterFormer
from loka.zoo.sequences.kunlun import Kunlun
from loka.zoo.wukong import Wukong

__all__ = [
    "DHEN",
    "DLRM",
    "HSTU",
    "DCNv2",
    "Front",
    "HistoryTable",
    "InterFormer",
    "Kunlun",
    "MMoE",
    "Wukong",
    "build",
    "dense_part",
    "inventory",
    "look_up",
    "needs_sequences",
    "presets",
    "takes_history",
]
