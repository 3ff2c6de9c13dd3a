"""CUDA graphs of recorded launches, kept by the addresses that they work on.

A caching allocator hands out the same addresses in every step of a training loop, so a call's launches repeat to the
byte: one graph in their place costs the host 2 us, where each launch costs 8 (H200, torch 2.11). Nothing is shared
between calls. Operands and results lie where the caller's allocator puts them, and a call whose addresses are others
launches one by one. Nothing is captured while another thread might wait for the device (core/recording.py).
"""

import functools
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from loka.core.exceptions import first_line
from loka.core.recording import eager_graphs_are_off, may_capture_eagerly
from loka.kernels.triton.driver import Graph, captured

MOST = 512  # graphs; one of six launches takes 120 KB of the device
_SEEN = 8192  # keys remembered, of which most never come again where addresses wander
_AT_ONCE, _PAID_BY = 64, 4  # captures, and launches of kept graphs that pay for one more: it takes the host 85 us


class _Kept:
    """The graphs of this process, the longest unused first."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal's handler, run while it is held, may train
        self.graphs: dict[Any, Graph] = {}
        self.seen: set[int] = set()
        self.captures = self.launches = 0
        self.refused = False


_kept = _Kept()


def launch_kept(key: tuple[Any, ...], launches: Callable[[int], None], stream: int, device: int) -> None:
    """Puts `launches` on `stream`, the current one of `device`: as a graph if this key has one.

    Args:
        key: all that the launches depend on, addresses and stream included.
        launches: puts them on a stream that it is given, the current one then; it may not wait.
    """
    if eager_graphs_are_off():
        if _kept.graphs:
            with _kept.lock:
                _kept.graphs.clear()
        launches(stream)
        return
    if torch.cuda.is_current_stream_capturing():  # the launches become part of the caller's graph
        launches(stream)
        return
    with _kept.lock:
        graph = _kept.graphs.pop(key, None)
        if graph is not None:
            _kept.graphs[key] = graph
            _kept.launches += 1
    if graph is not None:
        graph.launch(stream)
    elif _pays(key) and may_capture_eagerly(stream) and (graph := _captured(launches, device, stream)) is not None:
        with _kept.lock:
            if len(_kept.graphs) >= MOST:
                del _kept.graphs[next(iter(_kept.graphs))]
            _kept.graphs[key] = graph
            _kept.captures += 1
    else:
        launches(stream)


def _pays(key: tuple[Any, ...]) -> bool:
    """Whether to capture: a key that comes the second time, while captured graphs are launched often enough."""
    with _kept.lock:
        if _kept.refused or not _shares_memory() or _kept.captures >= _AT_ONCE + _kept.launches // _PAID_BY:
            return False
        if hash(key) in _kept.seen:
            return True
        if len(_kept.seen) >= _SEEN:
            _kept.seen.clear()
        _kept.seen.add(hash(key))
        return False


@functools.cache
def _shares_memory() -> bool:
    """Whether torch allocates by its own caching allocator, whose pools keep what a capture allocates: others hand it
    back to the device, under graphs that work in it. Torch looks whether the variable is set, be it to nothing."""
    return torch.cuda.get_allocator_backend() == "native" and "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ


def _captured(launches: Callable[[int], None], device: int, target: int) -> Graph | None:
    """A new graph, launched once: for that it is given memory of the device, of which there may be none left."""
    try:
        graph = captured(launches, device, target)
        if graph is not None:
            graph.launch(target)
        return graph
    except RuntimeError as error:
        _kept.refused = True
        warnings.warn(
            f"eager sites launch their kernels one by one from here on, which takes the host longer: the driver "
            f"makes no graph of them ({first_line(error)})",
            stacklevel=2,
        )
        return None
