"""Changes that make a model friendlier to FP8: NoBias, BlockNorm, HardSwish, AttentionNorm."""

from loka.mods.apply import apply
from loka.mods.attention_norm import AttentionNorm
from loka.mods.block_norm import BlockNorm
from loka.mods.change import Change, Changes
from loka.mods.hard_swish import HardSwish
from loka.mods.no_bias import NoBias

__all__ = ["AttentionNorm", "BlockNorm", "Change", "Changes", "HardSwish", "NoBias", "apply"]
