"""NoBias: linear and norm layers lose their bias, prediction layers keep theirs (mod 1)."""

from dataclasses import dataclass

from torch import nn

from loka.mods.change import FUSED_PARENT, Change, fused_parents
from loka.nn.linears import Filter, is_prediction

_KINDS = (nn.Linear, nn.LayerNorm, nn.GroupNorm)


@dataclass(frozen=True)
class NoBias:
    """Removes the bias of nn.Linear, nn.LayerNorm and nn.GroupNorm.

    A linear layer with at most 8 outputs is taken for a prediction layer and keeps its bias,
    which carries the base rate.
    """

    def apply(self, model: nn.Module, filter: Filter) -> tuple[list[Change], list[Change]]:
        changed, kept = [], []
        owned = fused_parents(model)
        for path, module in model.named_modules():
            if not isinstance(module, _KINDS) or module.bias is None:
                continue
            if not filter(module, path):
                continue
            reason = None
            if path in owned:
                reason = FUSED_PARENT
            elif type(module) not in _KINDS:
                reason = f"a {type(module).__name__}, which may read its bias in another way"
            elif isinstance(module, nn.Linear) and is_prediction(module.out_features):
                reason = f"a prediction layer with {module.out_features} outputs"
            if reason:
                kept.append(Change(mod="NoBias", path=path, what=reason))
                continue
            what = f"{type(module).__name__} bias of {module.bias.numel()} removed"
            module.register_parameter("bias", None)
            changed.append(Change(mod="NoBias", path=path, what=what))
        return changed, kept
