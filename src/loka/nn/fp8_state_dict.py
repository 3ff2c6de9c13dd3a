"""Saves and restores what FP8 sites carry from step to step outside of a `state_dict`.

That is how often each site ran, and whether an operand was not finite. Sites keep no scale and no FP8 copy of
a weight between calls.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from loka.nn.site import sites_of


def fp8_state_dict(model: nn.Module) -> dict[str, Any]:
    """The counts of each FP8 site by name. The tensors are shared with the model, not copied."""
    return {"health": {name: site.health for name, site in sites_of(model).items()}}


@torch.no_grad()
def load_fp8_state_dict(model: nn.Module, content: Mapping[str, Any]) -> None:
    """Puts what `fp8_state_dict` gave into a model that was converted by the same plan.

    Raises ValueError where the model has other FP8 sites; the message names the first of them.
    """
    sites, there = sites_of(model), list(content["health"])
    if list(sites) != there:
        only = [name for name in there if name not in sites] + [name for name in sites if name not in there]
        raise ValueError(f"other FP8 sites run now than when it was saved: {', '.join(only[:5]) or 'in another order'}")
    for name, site in sites.items():
        site.health.copy_(content["health"][name])


@torch.no_grad()
def carry_over(content: Mapping[str, Any], model: nn.Module) -> None:
    """Restores the counts of those sites of `content` that `model` has too; its other sites start from zero.

    For a model that is converted again, by another plan, in the middle of training. `content` must be a copy that
    was made before.
    """
    for name, site in sites_of(model).items():
        if name in content["health"]:
            site.health.copy_(content["health"][name])
