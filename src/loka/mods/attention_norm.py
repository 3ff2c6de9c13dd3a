"""AttentionNorm: frozen QK-norm and post-norm (FOG, arXiv 2505.20524), where projections fail a budget."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from loka.mods.change import Change
from loka.mods.modules import HOOKED, has_hooks, held_outside, select, still_run
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
        outside = held_outside(model)
        for found in select(model, filter, self._may_hold):
            if isinstance(found.module, nn.MultiheadAttention):
                kept.append(found.change("AttentionNorm", "it has no place for a norm"))
            for place in self._free(found.module):
                identity = found.module._modules[place]
                assert identity is not None
                reason = found.split
                if has_hooks(identity):
                    reason = HOOKED
                elif identity in outside:
                    reason = still_run(outside[identity])
                if reason:
                    kept.append(found.change("AttentionNorm", f"{place}: {reason}"))
                else:
                    setattr(found.module, place, UnitRMS())
                    changed.append(found.change("AttentionNorm", f"{place} -> UnitRMS"))
        return changed, kept

    def _may_hold(self, module: nn.Module) -> bool:
        return isinstance(module, nn.MultiheadAttention) or bool(self._free(module))

    def _free(self, module: nn.Module) -> list[str]:
        """Of its own: `getattr` would find those of a module inside a wrapper too."""
        held = dict(module._modules.items())
        return [place for place in self.places if type(held.get(place)) is nn.Identity]
