"""What passes beside training leave as it is: buffers, random numbers, the mode; and what BatchNorm mixes."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from loka.core.exceptions import truncated
from loka.nn.unwrap import named_modules

_NAMED = 4


@contextlib.contextmanager
def buffers_kept(model: nn.Module, *, of_all: bool = False) -> Iterator[None]:
    """Buffers are afterwards what they were, without autograd taking them for changed in place.

    Those of modules in training mode, or `of_all`.
    """
    kept = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if (module.training or of_all) and buffer is not None
    ]
    try:
        yield
    finally:
        for module, name, buffer, copy in kept:
            buffer.data.copy_(copy)
            module._buffers[name] = buffer


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, `model` is in eval mode; afterwards each module is in the mode it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def as_evaluated(model: nn.Module) -> Iterator[None]:
    """Inside, `model` runs in eval mode with gradients; afterwards its mode and buffers and the random state
    are what they were."""
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    kept = buffers_kept(model, of_all=True)
    with torch.random.fork_rng(devices), kept, torch.enable_grad(), evaluating(model):
        yield


@contextlib.contextmanager
def thawed(model: nn.Module) -> Iterator[None]:
    """Inside, gradients flow through frozen weights too, such as the bases of low-rank adapters."""
    frozen = [p for p in model.parameters() if p.is_floating_point() and not p.requires_grad and not p.is_inference()]
    for parameter in frozen:
        parameter.requires_grad = True
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad = False


def batch_norms(model: nn.Module) -> str:
    """What to add where rows mix samples: the modules that take statistics over the batch; "" without any."""
    paths = [
        path or "the model"
        for path, module in named_modules(model)
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None)
    ]
    if not paths:
        return ""
    return f"; BatchNorm takes its statistics over the batch ({', '.join(truncated(paths, _NAMED))})"
