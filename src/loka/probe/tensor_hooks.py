"""Hooks that a forward pass puts on tensors and on nodes of autograd: an extra backward would run them too.

What a hook keeps in Python, such as a running mean, would advance twice in a sampled step. Such a step tells no
effects, and says which hook it is. Hooks on leaves, parameters among them, stay: the extra backward ends at the
outputs of sites and reaches no leaf.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from loka.probe.trace import unseen

_READS_NODE = cast(Any, torch.Tensor).grad_fn.__get__  # what a function mode sees of x.grad_fn


class TensorHooks:
    """Those of one forward pass, whose calls a function mode tells of."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._reasons: dict[Any, str] = {}  # by the node of the tensor
        self._reads_nodes = False

    def see(self, func: Any, args: tuple[Any, ...], path: Callable[[], str]) -> None:
        """`func` was called, in the forward of the module at `path`."""
        if func is torch.Tensor.register_hook and not (_is_engines(args[1]) or _is_leaf(args[0])):
            hook = f"puts a hook on a tensor ({_name(args[1])})"
            self._note(args[0], f"{path() or 'the model'} {hook}, which an extra backward would call")
        elif func is torch.Tensor.retain_grad and not _is_leaf(args[0]):
            called = "calls retain_grad, and an extra backward would add to that gradient"
            self._note(args[0], f"{path() or 'the model'} {called}")
        elif func == _READS_NODE:
            self._reads_nodes = True

    def _note(self, tensor: torch.Tensor, reason: str) -> None:
        with unseen():
            self._reasons[tensor.grad_fn] = reason

    def would_call(self, z: torch.Tensor) -> str:
        """Which hook of the program an extra backward from the logits `z` would call, or ""."""
        if not (self._reasons or self._reads_nodes):  # who has no node puts no hook on one
            return ""
        for node in _nodes_behind(z):
            if node in self._reasons:
                return self._reasons[node]
            for hook in _hooks_on(node) if self._reads_nodes else ():
                where = f"a node of autograd ({_name(hook)} on {node.name()})"
                return f"the model puts a hook on {where}, which an extra backward would call"
        return ""


def _is_engines(hook: Any) -> bool:
    """Whether it is of torch's distributed engines, or of LoKA, which expect further backwards."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(("torch.distributed.", "loka."))


def _is_leaf(tensor: torch.Tensor) -> bool:
    with unseen():
        return tensor.is_leaf


def _name(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)


def _nodes_behind(z: torch.Tensor) -> Iterator[Any]:
    """All that `z` was computed by, but those of leaves, behind which is nothing."""
    with unseen():
        waiting, seen = [z.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or not node.next_functions:
            continue
        seen.add(node)
        yield node
        waiting += [before for before, _ in node.next_functions]


def _hooks_on(node: Any) -> list[Any]:
    """torch shows a node's hooks to nobody but the handle of a further one."""
    found: list[Any] = []
    for register in (node.register_prehook, node.register_hook):
        handle = register(_further)
        found += [hook for hook in handle.hooks_dict_ref().values() if not _is_engines(hook)]
        handle.remove()
    return found


def _further(*_: Any) -> None:
    """Is removed before any backward."""
