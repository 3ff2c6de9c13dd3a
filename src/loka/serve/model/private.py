"""Makes the copy of the user's model that a server owns: it reads nothing of the original, and a refresh reaches all of
it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from loka.core.exceptions import LokaError, ServeRefused, first_line, truncated
from loka.graph.attach import detach
from loka.nn.copying import private_copy, read_of
from loka.nn.site import site_forwards
from loka.nn.unwrap import kind_of, named_modules, named_parameters, require_initialized, unwrap


def own_copy(model: nn.Module) -> nn.Module:
    """A copy of the model as the user wrote it, without sites, in eval mode.

    Raises ServeRefused where the model holds shards, lies on several devices, cannot be copied, or holds views of
    weights.
    """
    require_initialized(model)
    parameters = [p for _, p in named_parameters(model)]
    sharded = [name for name, p in named_parameters(model) if hasattr(p, "device_mesh")]
    if sharded or any(getattr(p, "_fsdp_flattened", False) for p in parameters):
        raise ServeRefused(
            "this model holds a shard of its weights",
            why=truncated(sharded, 5),
            way_out="gather them into a model on one device, and give that",
        )
    if len({p.device for p in parameters}) != 1:
        raise ServeRefused("this model's weights are not on one device", way_out="model.to(device) first")
    copy, views = private_copy(unwrap(model), refused=ServeRefused)
    if views:
        raise ServeRefused(
            "this model holds weights by tensors that no state dict has: a refresh would leave them as they are",
            why=truncated(views, 5),
            way_out="read the weight in forward, or make the tensor a parameter or a buffer that is saved; what is "
            "for training alone, such as an average's list, belongs outside of the model",
        )
    if site_forwards(copy):
        detach(copy)
    return copy.eval().requires_grad_(False)


def kinds_of(model: nn.Module) -> dict[str, str]:
    """The class of each module by path; "" is the path of the model itself."""
    return {path: kind_of(module).__qualname__ for path, module in named_modules(model)}


def check_apart(original: nn.Module, call: Callable[[], Any]) -> None:
    """Raises ServeRefused where `call`, which runs a copy, reads tensors of the original's state dict."""
    if found := read_of(unwrap(original), call):
        raise ServeRefused(
            "a copy of this model reads the original's weights, which no refresh would reach",
            why=truncated(found, 5),
            way_out="a lambda, a hook, a compiled method or a global holds the module: give it the module as an "
            "argument (a hook's first one), or make it a method, and compile the module as a whole",
        )


def tried(call: Callable[[], Any], what: str, way_out: str) -> Any:
    """The result of `call()`. An error that is not LoKA's becomes a ServeRefused that says `what` failed."""
    try:
        return call()
    except (LokaError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # whatever a model raises
        raise ServeRefused(what, why=[first_line(error)], way_out=way_out) from error


def written_attributes(module: nn.Module, call: Callable[[], Any]) -> list[str]:
    """The attributes and buffers that a call writes to, such as `tower.cache`: the next call would read them."""

    def version(value: Any) -> int:
        return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0

    def now() -> dict[str, tuple[int, int]]:
        return {
            f"{path}.{name}" if path else name: (id(value), version(value))
            for path, part in named_modules(module)
            for held in (part.__dict__, part._buffers)
            for name, value in held.items()
        }

    held = [value for _, part in named_modules(module) for value in part.__dict__.values()]
    before = now()
    call()
    after = now()
    del held  # alive until now, so that no new object took over an id
    return sorted(name for name in after if before.get(name) != after[name])
