"""Recommendation models in plain PyTorch, from their papers: `build("wukong", ...)`.

Every linear map is an `nn.Linear`; every model is `forward(dense [B, D], sparse [B, F]) -> logits [B]`.
"""

from loka.zoo.dcn import DCNv2
from loka.zoo.dlrm import DLRM
from loka.zoo.presets import build, presets
from loka.zoo.wukong import Wukong

__all__ = ["DLRM", "DCNv2", "Wukong", "build", "presets"]
