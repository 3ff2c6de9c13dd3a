"""NoBias: linear and norm layers lose their bias, prediction layers keep theirs (mod 1)."""

from dataclasses import dataclass
from typing import cast

from torch import nn

from loka.mods.change import Change
from loka.mods.modules import FUSED_PARENT, fused_children, select
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
        fused = fused_children(model)
        for found in select(model, filter, _has_bias):
            module = cast(nn.Linear | nn.LayerNorm | nn.GroupNorm, found.module)
            reason = found.split
            if module in fused:
                reason = FUSED_PARENT
            elif type(module) not in _KINDS:
                reason = f"a {type(module).__name__}, which may read its bias in another way"
            elif "bias" not in module._parameters:
                reason = "its bias is computed from another parameter, as pruning does"
            elif isinstance(module, nn.Linear) and is_prediction(module.out_features):
                reason = f"a prediction layer with {module.out_features} outputs"
            if reason:
                kept.append(found.change("NoBias", reason))
                continue
            what = f"{type(module).__name__} bias of {module.bias.numel()} removed"
            module.register_parameter("bias", None)
            changed.append(found.change("NoBias", what))
        return changed, kept


def _has_bias(module: nn.Module) -> bool:
    return isinstance(module, _KINDS) and getattr(module, "bias", None) is not None
