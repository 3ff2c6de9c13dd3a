"""Looking inside wrappers that change module paths."""

from __future__ import annotations

from torch import nn


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module inside torch.compile and DistributedDataParallel wrappers."""
    while True:
        compiled = model._modules.get("_orig_mod")  # naming OptimizedModule would import dynamo: 2 s
        if compiled is not None:
            model = compiled
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model
