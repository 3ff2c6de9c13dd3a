"""Activation checkpointing inside the forward of a module that owns sites.

torch.utils.checkpoint runs a function again in backward, under the autocast and random state of the first
time, and without its function modes. A function that multiplies by a raw parameter would then recompute
in high precision what ran as a site. So the function that it keeps is one that enters the sites again.
torch has no hook for this: functions of torch.utils.checkpoint are wrapped, once, when a model with such
sites first runs or is probed; without sites around the call they do what they did.

Probe needs more. A reentrant checkpoint runs without a graph in forward, so there is nothing of which a
gradient could be observed, and its layers would be planned without their two GEMMs in backward. In a sampled
step it runs as one without reentrance: it computes the same and keeps as little. Only a parameter that
several such checkpoints share gets its gradient in one sum and not in several.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint as checkpoint
from torch.overrides import _get_current_function_mode_stack

from loka.graph.parameters import ParameterMode

_GENERATOR = "_checkpoint_without_reentrant_generator"
if hasattr(checkpoint, f"{_GENERATOR}_impl"):  # from torch 2.14 on, the other one calls it
    _GENERATOR += "_impl"
_done = False


def keep_sites() -> None:
    """Makes checkpoints that begin under sites recompute under them."""
    global _done
    if _done:
        return
    _done = True
    apply = checkpoint.CheckpointFunction.apply
    reentrant = checkpoint.CheckpointFunction.forward
    generator = getattr(checkpoint, _GENERATOR)

    def forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return reentrant(ctx, _under_sites(run_function, runs_first=True), *args)

    def without_reentrant(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return generator(_under_sites(fn, runs_first=False), *args, **kwargs)

    def with_graph(run_function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if not _is_watched(args):
            return apply(run_function, preserve, *args)
        return checkpoint.checkpoint(run_function, *args, use_reentrant=False, preserve_rng_state=preserve)

    checkpoint.CheckpointFunction.apply = staticmethod(with_graph)  # type: ignore[method-assign]
    checkpoint.CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]
    setattr(checkpoint, _GENERATOR, without_reentrant)


_watching = threading.local()


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Recomputes in backward what ran under Probe: checkpoints within are to take the same kind again."""
    before = _is_on()
    _watching.on = True
    try:
        yield
    finally:
        _watching.on = before


def _is_on() -> bool:
    return getattr(_watching, "on", False)


def _is_watched(args: tuple[Any, ...]) -> bool:
    """Whether Probe looks on and the checkpoint would have a gradient to pass on."""
    on = _is_on() or any(
        isinstance(mode, ParameterMode) and mode.watches for mode in _get_current_function_mode_stack()
    )
    given = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    return on and given and torch.is_grad_enabled()


def _under_sites(function: Callable[..., Any], *, runs_first: bool) -> Callable[..., Any]:
    """`function` as it is to be recomputed.

    `runs_first`: its first call is the one in forward, with the modes on.
    """
    modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, ParameterMode)]
    kept = [(mode, mode.again) for mode in modes if mode.again is not None]
    on = _is_on()  # a checkpoint within one that is recomputed
    if not (kept or on):
        return function
    in_forward = runs_first
    given: list[list[tuple[int, str]]] = [[] for _ in kept]

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal in_forward
        if in_forward:
            in_forward = False
            for (mode, _), keys in zip(kept, given, strict=True):
                keys += [(place, key) for place, arg in enumerate(args) if (key := mode.key_of(arg)) is not None]
            return function(*args, **kwargs)
        with contextlib.ExitStack() as entered:
            for (_, again), keys in zip(kept, given, strict=True):
                mode = entered.enter_context(again())
                for place, key in keys:  # a reentrant checkpoint recomputes with its arguments detached
                    mode.note(args[place], key)
            if on:
                entered.enter_context(watching())
            return function(*args, **kwargs)

    return run
