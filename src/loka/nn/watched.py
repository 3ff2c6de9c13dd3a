"""What is noted of one forward pass while it is watched: calls of modules, and who reads what they return."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn

from loka.nn.site import DTYPES


@dataclass(eq=False, slots=True)
class Call:
    """One call of a watched module. `state`: two calls under different ones cannot be one."""

    path: str
    module: nn.Module
    source: Value | None = None
    value: Value | None = None
    state: tuple[Any, ...] = ()
    in_place: bool = False
    broken: str = ""
    outer: tuple[torch.Tensor, int] | None = None  # of a cross layer: x_0, and how often it had changed
    joint: bool = False  # x was x_0


@dataclass(eq=False, slots=True)
class Value:
    """What a call returned, and who reads it. A module that works in place makes a new value of a tensor."""

    tensor: torch.Tensor
    call: Call
    readers: list[Call] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    @property
    def reader(self) -> Call | None:
        """The call that alone reads it."""
        return self.readers[0] if len(self.readers) == 1 and not self.others else None


def foreign_hooks(holder: dict[str, Any], prefix: str) -> bool:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = (hook for kind in kinds for hook in (holder.get(prefix + kind) or {}).values())
    return any(not (getattr(hook, "__module__", None) or "").startswith("loka.") for hook in hooks)


def refuse(given: list[Any]) -> str:
    """Why a module's arguments, or its output, are not one dense tensor of rows."""
    if len(given) != 1 or type(given[0]) not in (torch.Tensor, nn.Parameter):
        return "it takes or makes something else than one plain tensor"
    if given[0].layout is not torch.strided or given[0].is_nested or given[0].dtype not in DTYPES:
        return "its tensor is nested, sparse, or of a dtype that LoKA does not know"
    return "" if given[0].ndim else "its tensor has no dimension"


def state_of(given: torch.Tensor) -> tuple[Any, ...]:
    """What has to be the same for modules that run as one: where, how many rows, and under what."""
    kind = given.device.type
    autocast = torch.is_autocast_enabled(kind)
    return (
        given.device,
        given.shape[:-1],
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_autocast_dtype(kind) if autocast else None,
    )


def tensors_in(content: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers, and in the attributes of what a model returns."""
    stack, seen = [content], set()
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (list, tuple, set, frozenset, dict, slice)) and id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, dict):
                stack += item.values()
            else:
                stack += [item.start, item.stop, item.step] if isinstance(item, slice) else item


def held(values: list[Value], root: nn.Module) -> list[Value]:
    """Those whose tensor some object keeps after the pass: it may read it at any time.

    The collector knows who refers to an object (0.1 us per live object, once). It does not look
    at what gc.freeze() set aside; of that, the model's own attributes are looked at here.
    """
    values = [value for value in values if value.reader]
    if not values:
        return []
    tensors = tuple(value.tensor for value in values)
    holders = [*gc.get_referrers(*tensors), *(vars(module) for module in root.modules())]
    holders += [item for module in root.modules() for item in vars(module).values() if _is_container(item)]
    kept = {
        id(item)
        for holder in holders
        if holder is not tensors and not isinstance(holder, (Value, Call)) and not _is_our_frame(holder)
        for item in gc.get_referents(holder)
        if isinstance(item, torch.Tensor)
    }
    return [value for value in values if id(value.tensor) in kept]


def _is_container(item: Any) -> bool:
    return isinstance(item, (list, tuple, dict, set))


def _is_our_frame(holder: Any) -> bool:
    """A frame of this package: of here, or of the finish() that called."""
    return isinstance(holder, FrameType) and holder.f_globals.get("__name__", "").startswith("loka.nn.")


def readers_of(value: Value) -> str:
    names = [f"module {call.path or 'itself'}" for call in value.readers] + value.others
    if not names:
        return "read by nobody"
    kept = list(dict.fromkeys(names))
    return f"read by {', '.join(kept[:4])}{' and more' if len(kept) > 4 else ''}"
