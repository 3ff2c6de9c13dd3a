"""Activation checkpointing inside the forward of a module that owns sites.

torch.utils.checkpoint runs a function again in backward, under the autocast and random state of the first
time, and without its function modes. A function that multiplies by a raw parameter would then recompute
in high precision what ran as a site. So the function that it keeps is one that enters the sites again.
torch has no hook for this: two functions of torch.utils.checkpoint are wrapped, once, when a model with such
sites first runs; without sites around the call they do what they did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint as checkpoint
from torch.overrides import _get_current_function_mode_stack

from loka.graph.parameters import ParameterMode

_done = False


def keep_sites() -> None:
    """Makes checkpoints that begin under sites recompute under them."""
    global _done
    if _done:
        return
    _done = True
    reentrant = checkpoint.CheckpointFunction.forward
    generator = checkpoint._checkpoint_without_reentrant_generator

    def forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return reentrant(ctx, _under_sites(run_function, runs_first=True), *args)

    def without_reentrant(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return generator(_under_sites(fn, runs_first=False), *args, **kwargs)

    checkpoint.CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]
    checkpoint._checkpoint_without_reentrant_generator = without_reentrant


def _under_sites(function: Callable[..., Any], *, runs_first: bool) -> Callable[..., Any]:
    """`function` as it is to be recomputed.

    `runs_first`: its first call is the one in forward, with the modes on.
    """
    modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, ParameterMode)]
    kept = [mode.again for mode in modes if mode.again is not None]
    if not kept:
        return function
    in_forward = runs_first

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal in_forward
        if in_forward:
            in_forward = False
            return function(*args, **kwargs)
        return _entered(kept, function, args, kwargs)

    return run


def _entered(kept: list[Callable[[], Any]], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if not kept:
        return function(*args, **kwargs)
    with kept[0]():
        return _entered(kept[1:], function, args, kwargs)
