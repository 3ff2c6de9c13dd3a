"""AttentionNorm: frozen QK-norm and post-norm (FOG, arXiv 2505.20524), where projections fail a budget."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from loka.mods.change import HOOKED, Change, has_hooks
from loka.nn.linears import Filter


class UnitRMS(nn.Module):
    """x / rms(x) over the last dimension: no weight to grow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:])


@dataclass(frozen=True)
class AttentionNorm:
    """Norms at the places that attention has for them: an `nn.Identity` of that name, as in the zoo's.

    `qk_norm` is for queries and keys by head, after which no score exceeds sqrt(d_h); `post_norm` for what
    attention gives to the residual. FOG also takes norms before a block away, which this leaves.
    """

    places: tuple[str, ...] = ("qk_norm", "post_norm")

    def apply(self, model: nn.Module, filter: Filter) -> tuple[list[Change], list[Change]]:
        changed, kept = [], []
        for path, module in list(model.named_modules()):
            if isinstance(module, nn.MultiheadAttention) and filter(module, path):
                kept.append(Change(mod="AttentionNorm", path=path, what="it has no place for a norm"))
            for place in self.places:
                found = getattr(module, place, None)
                if type(found) is not nn.Identity or not filter(module, path):
                    continue
                if has_hooks(found):
                    kept.append(Change(mod="AttentionNorm", path=path, what=f"{place}: {HOOKED}"))
                else:
                    setattr(module, place, UnitRMS())
                    changed.append(Change(mod="AttentionNorm", path=path, what=f"{place} -> UnitRMS"))
        return changed, kept
