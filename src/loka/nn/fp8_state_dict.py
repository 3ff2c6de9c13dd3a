"""What FP8 sites carry from step to step outside of a `state_dict`: to save it, and to put it back.

It is how often they ran and what was not finite. Sites keep no scale and no FP8 copy of a weight between
calls.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from loka.nn.site import sites_of


def fp8_state_dict(model: nn.Module) -> dict[str, Any]:
    """As plain tensors and names. Tensors are shared with the model, not copied."""
    return {"health": {name: site.health for name, site in sites_of(model).items()}}


@torch.no_grad()
def load_fp8_state_dict(model: nn.Module, content: Mapping[str, Any]) -> None:
    """Puts it into a model that was converted alike.

    Raises ValueError where the FP8 sites are others; the first differences are named.
    """
    sites, there = sites_of(model), list(content["health"])
    if list(sites) != there:
        only = [name for name in there if name not in sites] + [name for name in sites if name not in there]
        raise ValueError(f"other FP8 sites run now than when it was saved: {', '.join(only[:5]) or 'in another order'}")
    for name, site in sites.items():
        site.health.copy_(content["health"][name])


@torch.no_grad()
def carry_over(content: Mapping[str, Any], model: nn.Module) -> None:
    """What `content` (a copy, of before) knows of sites that run in `model` too; others start anew.

    For a model that is converted again with another plan in the middle of training.
    """
    for name, site in sites_of(model).items():
        if name in content["health"]:
            site.health.copy_(content["health"][name])
