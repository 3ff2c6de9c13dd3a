"""What those share who watch a step: reading tensors unseen, removing hooks, tensors in nested containers."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
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


class _Beside(threading.local):
    passes = 0


_beside = _Beside()


@contextlib.contextmanager
def beside_training() -> Iterator[None]:
    """Inside, a forward pass of this thread is no step of training, though it may have gradients."""
    _beside.passes += 1
    try:
        yield
    finally:
        _beside.passes -= 1


def trains() -> bool:
    """Whether a forward pass that begins now is a step, by all that shows: with gradients, and not beside training."""
    return torch.is_grad_enabled() and not _beside.passes


class ModelHook:
    """A probe's hook on its model. On a copy of the model, by deepcopy or pickle, it does nothing: nobody would read
    what a probe that is copied along with it learns, nor close that."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        self._hook(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelHook, (nothing,)


def nothing(*_: Any) -> None:
    """What a copy's hook calls."""


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
