"""A copy of a model that reads no tensor of the original, and whose weights refresh reaches, all of them.

`copy.deepcopy` copies what a module holds, and no function: a lambda or a hook over `self` goes on reading the
original. And what holds a view of a weight, in any list or object, holds it after new weights came.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loka.core.exceptions import LokaError, ServeRefused
from loka.core.timing import first_line
from loka.graph.attach import detach
from loka.nn.site import site_forwards
from loka.nn.unwrap import named_modules, named_parameters, unwrap


def private_copy(model: nn.Module) -> nn.Module:
    """As the user wrote it, without sites, in eval.

    Raises ServeRefused where it holds shards, lies on several devices, cannot be copied, or holds views of weights.
    """
    parameters = [p for _, p in named_parameters(model)]
    sharded = [name for name, p in named_parameters(model) if hasattr(p, "device_mesh")]
    if sharded or any(getattr(p, "_fsdp_flattened", False) for p in parameters):
        raise ServeRefused(
            "this model holds a shard of its weights",
            why=sharded[:5],
            way_out="gather them into a model on one device, and freeze that",
        )
    if len({p.device for p in parameters}) != 1:
        raise ServeRefused("this model's weights are not on one device", way_out="model.to(device) first")
    whole = unwrap(model)
    copying = _Copying(whole)
    try:
        with copying:
            made = copy.deepcopy(whole)
    except Exception as error:  # whatever the user's classes raise
        raise ServeRefused(
            "this model cannot be copied",
            why=[f"{type(error).__name__}: {first_line(error)}"],
            way_out="keep locks, files and the like outside of it, or give their class a __deepcopy__",
        ) from error
    if copying.views:
        raise ServeRefused(
            "this model reads weights by tensors that no state dict has: a refresh would leave them as they are",
            why=copying.views,
            way_out="read the weight in forward, or make the tensor a parameter or a buffer that is saved",
        )
    if site_forwards(made):
        detach(made)
    return made.eval().requires_grad_(False)


def check_apart(original: nn.Module, call: Callable[[], Any]) -> Any:
    """`call()`, of a copy. Raises ServeRefused where it reads tensors of the original's state dict."""
    reading = _Reading(_memory(unwrap(original)))
    with reading:
        answer = call()
    if reading.found:
        raise ServeRefused(
            "a copy of this model reads the original's weights, which no refresh would reach",
            why=sorted(reading.found)[:5],
            way_out="a lambda, a hook or a global holds the module: give it the module as an argument (a hook's "
            "first one), or make it a method",
        )
    return answer


def tried(call: Callable[[], Any], what: str, way_out: str) -> Any:
    """`call()`. Raises ServeRefused, which says `what` failed, for an error that is none of ours."""
    try:
        return call()
    except (LokaError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a model raises
        raise ServeRefused(what, why=[f"{type(error).__name__}: {first_line(error)}"], way_out=way_out) from error


def written_attributes(module: nn.Module, call: Callable[[], Any]) -> list[str]:
    """Attributes and buffers that a call writes to, such as `tower.cache`: the next call finds them."""

    def now() -> dict[str, tuple[int, int]]:
        return {
            f"{path}.{name}" if path else name: (id(value), value._version if isinstance(value, torch.Tensor) else 0)
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


def _memory(model: nn.Module) -> dict[int, str]:
    """Keys of the state dict by the storage that their tensors lie in."""
    held = model.state_dict(keep_vars=True).items()
    return {tensor.untyped_storage()._cdata: key for key, tensor in held if _has_memory(tensor)}


def _has_memory(value: Any) -> bool:
    """Not of subclasses, which may keep theirs elsewhere."""
    plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided
    return plain and not value.is_meta and value.numel() > 0


class _Copying(TorchFunctionMode):
    """Sees the tensors that `copy.deepcopy` comes to, wherever they are held. Tensors with a graph, which torch
    does not copy, are copied without it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.views: list[str] = []
        self._memory = _memory(model)
        self._known = {id(value) for value in model.state_dict(keep_vars=True).values()}
        self._names: dict[int, str] = {}
        for path, module in named_modules(model):
            for name, value in (vars(module) | module._buffers).items():
                if f"{name}_orig" in module._parameters:
                    self._known.add(id(value))  # torch's old spectral norm makes it anew before each forward
                self._names[id(value)] = f"{path}.{name}".lstrip(".")

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func != torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor = args[0]
        if id(tensor) not in self._known and _has_memory(tensor):
            key = self._memory.get(tensor.untyped_storage()._cdata)
            if key is not None:
                self.views.append(
                    f"{self._names.get(id(tensor), 'a tensor inside of an attribute')} is a view of {key}"
                )
        return func(*args, **(kwargs or {})) if tensor.is_leaf else tensor.detach().clone()


class _Reading(TorchDispatchMode):
    """Names those of `memory` that operations take."""

    def __init__(self, memory: Mapping[int, str]) -> None:
        super().__init__()
        self.found: set[str] = set()
        self._memory = memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for value in tree_leaves((args, kwargs or {})):
            if _has_memory(value):
                key = self._memory.get(value.untyped_storage()._cdata)
                if key is not None:
                    self.found.add(key)
        return func(*args, **(kwargs or {}))
