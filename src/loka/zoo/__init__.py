"""Recommendation models in plain PyTorch, from their papers: `build("wukong", ...)`.

Every linear map is an `nn.Linear`; every model is `forward(dense [B, D], sparse [B, F]) -> logits [B]`.
`dense_part(model)` is the same without the tables, called with looked-up rows [B, F, dim].
"""

from loka.zoo.dcn import DCNv2
from loka.zoo.dlrm import DLRM
from loka.zoo.embedded import dense_part
from loka.zoo.presets import build, presets
from loka.zoo.wukong import Wukong

__all__ = ["DLRM", "DCNv2", "Wukong", "build", "dense_part", "presets"]
