"""What those share who watch a step: reading tensors unseen, removing hooks, tensors in nested containers."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes


def unseen() -> contextlib.AbstractContextManager[None]:
    """Inside, tensors are read without any function mode seeing it."""
    return torch._C.DisableTorchFunction()


def uncounted() -> contextlib.AbstractContextManager[object]:
    """Inside, no dispatch mode sees what is computed: another probe would count it as the model's."""
    return _disable_current_modes()


def detach(handles: Iterable[Any], failing: nn.Module | None) -> list[Any]:
    """Removes hooks, and returns those on `failing`: torch raises its own error where they go while it
    runs what `always_call` asks of a forward that failed."""
    left = []
    for handle in handles:
        if failing is not None and handle.hooks_dict_ref() is failing._forward_hooks:
            left.append(handle)
        else:
            handle.remove()
    return left


def tensors_in(content: Any) -> Iterator[torch.Tensor]:
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
