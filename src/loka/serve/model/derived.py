"""What forward derived of weights before they were frozen, and keeps: new weights would meet what old ones left."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from loka.core.exceptions import LokaError, ServeRefused
from loka.nn.unwrap import named_modules
from loka.serve.model.programs import like
from loka.serve.rows import leaves
from loka.serve.watch.agreement import same_bits

State = Mapping[str, Any]
_OTHER = 1.5  # times the weights, in the place of new ones


def check_derived(tree: nn.Module, call: Callable[[nn.Module], Any]) -> None:
    """Raises ServeRefused where `tree` holds in an attribute what its forward makes of weights.

    By what happens without the attribute: with the same weights the answers of `call` are the same to the bit, with
    others they are not. A constant is missed in both, and what loading a state dict empties is made anew in both.
    """
    kept = [
        (path, name)
        for path, module in named_modules(tree)
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules") and any(map(_is_number, tree_leaves(value)))
    ]
    if not kept:
        return
    now = tree.state_dict(keep_vars=True)
    other = copy.copy(now)  # with the versions of its form
    other.update({key: value.detach() * _OTHER for key, value in now.items() if _is_number(value)})
    found = [f"{path}.{name}".lstrip(".") for path, name in kept if _is_derived(tree, (now, other), path, name, call)]
    if found:
        raise ServeRefused(
            "this model keeps in attributes what its forward derived of weights: a refresh would not reach it",
            why=found,
            way_out="empty them before freeze (set them to None, as they are before the first call), or let a hook of "
            "load_state_dict do so",
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 0


def _is_derived(
    tree: nn.Module, states: tuple[State, State], path: str, name: str, call: Callable[[nn.Module], Any]
) -> bool:
    for stays in (True, False):  # empty, or gone
        if [_changes_nothing(tree, state, path, name, stays, call) for state in states] == [True, False]:
            return True
    return False


def _changes_nothing(
    tree: nn.Module, state: State, path: str, name: str, stays: bool, call: Callable[[nn.Module], Any]
) -> bool | None:
    """Whether answers are the same to the bit without the attribute; None where there are none."""
    try:
        ours, theirs = (
            leaves(call(each)) for each in (_with(tree, state), _without(_with(tree, state), path, name, stays))
        )
    except LokaError:
        raise
    except Exception:  # of a model that lacks what it needs
        return None
    return len(ours) == len(theirs) and all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))


def _with(tree: nn.Module, state: State) -> nn.Module:
    """Another tree, with other weights, put there as a refresh puts them."""
    made = like(tree)
    made.load_state_dict(state, assign=True)
    return made.requires_grad_(False)


def _without(tree: nn.Module, path: str, name: str, stays: bool) -> nn.Module:
    held = vars(dict(named_modules(tree))[path])
    value = held.pop(name)
    if stays:
        held[name] = type(value)() if isinstance(value, (list, dict)) else None
    return tree
