"""BlockNorm: LayerNorm and RMSNorm become parameter-free RMSNorm over blocks (mod 2)."""

from dataclasses import dataclass

from torch import nn

from loka.mods.change import FUSED_PARENT, HOOKED, Change, fused_parents, has_hooks, replace_module
from loka.nn.block_norm import BlockNorm as BlockNormModule
from loka.nn.linears import Filter


@dataclass(frozen=True)
class BlockNorm:
    """Replaces norms over the last dimension by `nn.BlockNorm` with blocks of `block` features."""

    block: int = 256

    def apply(self, model: nn.Module, filter: Filter) -> tuple[list[Change], list[Change]]:
        changed, kept = [], []
        owned = fused_parents(model)
        for path, module in list(model.named_modules()):
            if not isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or not filter(module, path):
                continue
            shape = tuple(module.normalized_shape)
            reason = None
            if path in owned:
                reason = FUSED_PARENT
            elif type(module) not in (nn.LayerNorm, nn.RMSNorm):
                reason = f"a {type(module).__name__}, which may do more than norm"
            elif has_hooks(module):
                reason = HOOKED
            elif len(shape) != 1:
                reason = f"it normalizes {len(shape)} dimensions together: {shape}"
            if reason:
                kept.append(Change(mod="BlockNorm", path=path, what=reason))
                continue
            new = BlockNormModule(shape[0], self.block)
            replace_module(model, path, new)
            what = f"{type(module).__name__}({shape[0]}) -> BlockNorm({new.extra_repr()})"
            changed.append(Change(mod="BlockNorm", path=path, what=what))
        return changed, kept
