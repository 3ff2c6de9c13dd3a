"""HardSwish: x * relu6(x + 3) / 6 in place of Swish, which amplifies outliers (mod 3)."""

from dataclasses import dataclass

from torch import nn

from loka.mods.change import Change
from loka.mods.modules import fused_children, held_outside, irreplaceable, replace_module, select
from loka.nn.linears import Filter


@dataclass(frozen=True)
class HardSwish:
    """Replaces activation modules of the types in `replace` by nn.Hardswish.

    Only modules can be seen: a call to F.silu inside a forward stays as it is.
    """

    replace: tuple[type[nn.Module], ...] = (nn.SiLU,)

    def apply(self, model: nn.Module, filter: Filter) -> tuple[list[Change], list[Change]]:
        changed, kept = [], []
        fused, outside = fused_children(model), held_outside(model)
        for found in select(model, filter, lambda module: type(module) in self.replace):
            module = found.module
            reason = found.split
            if module in fused:
                reason = "its parent's fused path computes the activation that it was built with"
            reason = reason or irreplaceable(model, module, outside)
            if reason:
                kept.append(found.change("HardSwish", reason))
                continue
            # A parent may drop the result of an activation in place: `self.act(y); return y`.
            replace_module(model, module, nn.Hardswish(inplace=getattr(module, "inplace", False)))
            changed.append(found.change("HardSwish", f"{type(module).__name__} -> Hardswish"))
        return changed, kept
