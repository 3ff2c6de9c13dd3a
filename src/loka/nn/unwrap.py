"""Module paths as the user wrote them: wrappers of torch and TorchRec leave no prefix.

torch.compile, DistributedDataParallel, FSDP, activation checkpointing, averaged models and TorchRec's
DistributedModelParallel each hold the user's module in an attribute, which then stands in every name below.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from loka.core.exceptions import LokaError, require_kind
from loka.core.signature import child_path

_INNER = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_dmp_wrapped_module")
_HELD_AS_MODULE = ("DistributedDataParallel", "DataParallel", "AveragedModel", "DistributedModelParallel")


def inner_of(module: nn.Module) -> nn.Module | None:
    """The module inside a wrapper, or None for a module that wraps none."""
    if not isinstance(module._modules, dict):  # of a scripted module, which wraps none of ours
        return None
    for name in _INNER:  # naming their classes would import dynamo (2 s), FSDP and TorchRec
        inner = module._modules.get(name)
        if inner is not None:
            return inner
    if any(kind.__name__ in _HELD_AS_MODULE for kind in type(module).__mro__):
        return module._modules.get("module")
    return None


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module inside wrappers. Raises LokaError for what is no module."""
    require_kind(model, nn.Module, "the model", way_out="give the torch.nn.Module itself, not a function that calls it")
    while (inner := inner_of(model)) is not None:
        model = inner
    return model


def weight_of(module: nn.Module) -> Any:
    """`module.weight` as a forward would read it, or None. Nothing changes: in training mode each read of a spectral
    norm iterates on its buffers, and that is the model's own step to take.
    """
    if not parametrize.is_parametrized(module, "weight"):
        return getattr(module, "weight", None)
    chain = cast(nn.ModuleDict, module.parametrizations)["weight"]
    training = [each for each in chain.modules() if each.training]
    try:
        for each in training:
            each.training = False
        return module.weight
    finally:
        for each in training:
            each.training = True


def require_initialized(model: nn.Module) -> None:
    """Raises LokaError for lazy modules that were not called yet: their parameters have no shape."""
    lazy = []
    for path, module in named_modules(model):
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(map(is_lazy, own)):
            lazy.append(f"{path}: {type(module).__name__}".lstrip(": "))
    if lazy:
        raise LokaError(
            f"{class_name(model)} has lazy modules, whose parameters have no shape before a first forward",
            why=lazy,
            way_out="call the model once on a batch, under torch.no_grad() and in eval mode, before anything else",
        )


def device_of(model: nn.Module) -> torch.device:
    """The device of the weights. TorchRec leaves an empty weight on the CPU for a table that has no
    rows on this rank.
    """
    weights = list(model.parameters())
    return next((weight for weight in weights if weight.numel()), weights[0]).device


def class_name(model: nn.Module) -> str:
    """The name of the user's class inside wrappers. `fully_shard` puts FSDP before that name, in place."""
    return kind_of(unwrap(model)).__name__


def kind_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module as the user wrote it, and not the one that `fully_shard` made from it."""
    own, *bases = type(module).__mro__
    sharded = bool(bases) and bases[0].__name__ == "FSDPModule"
    return bases[1] if sharded else own


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As `model.named_modules()`, each by its first path, without wrappers and their prefixes."""
    seen: set[nn.Module] = set()
    stack = [("", unwrap(model))]
    while stack:
        path, module = stack.pop()
        if module in seen:
            continue
        seen.add(module)
        yield path, module
        children = [(name, child) for name, child in module._modules.items() if child is not None]
        for name, child in reversed(children):
            stack.append((child_path(path, name), unwrap(child)))


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Each parameter once, by the path of its module without wrappers. Tied ones have the first name."""
    seen: set[int] = set()
    for path, module in named_modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield child_path(path, name), parameter
