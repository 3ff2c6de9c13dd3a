"""BlockNorm: LayerNorm and RMSNorm become parameter-free RMSNorm over blocks (mod 2)."""

from dataclasses import dataclass
from typing import cast

from torch import nn

from loka.mods.change import Change
from loka.mods.modules import FUSED_PARENT, fused_children, held_outside, irreplaceable, replace_module, select
from loka.nn.block_norm import BlockNorm as BlockNormModule
from loka.nn.linears import Filter


@dataclass(frozen=True)
class BlockNorm:
    """Replaces norms over the last dimension by `nn.BlockNorm` with blocks of `block` features."""

    block: int = 256

    def apply(self, model: nn.Module, filter: Filter) -> tuple[list[Change], list[Change]]:
        changed, kept = [], []
        fused, outside = fused_children(model), held_outside(model)
        for found in select(model, filter, lambda module: isinstance(module, (nn.LayerNorm, nn.RMSNorm))):
            module = cast(nn.LayerNorm | nn.RMSNorm, found.module)
            shape = tuple(module.normalized_shape)
            reason = found.split
            if module in fused:
                reason = FUSED_PARENT
            elif type(module) not in (nn.LayerNorm, nn.RMSNorm):
                reason = f"a {type(module).__name__}, which may do more than norm"
            elif len(shape) != 1:
                reason = f"it normalizes {len(shape)} dimensions together: {shape}"
            reason = reason or irreplaceable(model, module, outside)
            if reason:
                kept.append(found.change("BlockNorm", reason))
                continue
            new = BlockNormModule(shape[0], self.block)
            replace_module(model, module, new)
            what = f"{type(module).__name__}({shape[0]}) -> BlockNorm({new.extra_repr()})"
            changed.append(found.change("BlockNorm", what))
        return changed, kept
