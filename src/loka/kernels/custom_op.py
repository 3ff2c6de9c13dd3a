"""Registers LoKA's ops."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

_IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {}


def registered(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The op `name`, declared without side effects. `fake` takes those of the op's arguments that it reads, by their
    names.

    `torch.library.custom_op` would wrap each call in two more Python functions: one for gradients, which autograd
    functions around our ops give, and one for checks, which tests make.
    """
    signature, read = inspect.signature(function), inspect.signature(fake).parameters

    def of_what_is_read(*given: Any, **named: Any) -> Any:
        bound = signature.bind(*given, **named)
        bound.apply_defaults()
        return fake(**{each: bound.arguments[each] for each in read})

    torch.library.define(name, torch.library.infer_schema(function, mutates_args=()))
    torch.library.impl(name, ("CPU", "CUDA"), function)
    torch.library.register_fake(name, of_what_is_read)
    op = getattr(torch.ops.loka, name.partition("::")[2]).default
    _IMPLEMENTATIONS[op] = function
    return op


def implementation_of(op: Any) -> Callable[..., Any]:
    """The Python function that a registered op calls."""
    return _IMPLEMENTATIONS[op]
