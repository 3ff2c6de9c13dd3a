"""HardSwish: x * relu6(x + 3) / 6 in place of Swish, which amplifies outliers (mod 3)."""

from dataclasses import dataclass

from torch import nn

from loka.mods.change import HOOKED, Change, has_hooks, replace_module
from loka.nn.linears import Filter


@dataclass(frozen=True)
class HardSwish:
    """Replaces activation modules of the types in `replace` by nn.Hardswish.

    Only modules can be seen: a call to F.silu inside a forward stays as it is.
    """

    replace: tuple[type[nn.Module], ...] = (nn.SiLU,)

    def apply(self, model: nn.Module, filter: Filter) -> tuple[list[Change], list[Change]]:
        changed, kept = [], []
        for path, module in list(model.named_modules()):
            if type(module) not in self.replace or not path or not filter(module, path):
                continue
            if has_hooks(module):
                kept.append(Change(mod="HardSwish", path=path, what=HOOKED))
            else:
                replace_module(model, path, nn.Hardswish())
                what = f"{type(module).__name__} -> Hardswish"
                changed.append(Change(mod="HardSwish", path=path, what=what))
        return changed, kept
