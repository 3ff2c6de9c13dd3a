"""Runs sampled steps eagerly: torch.compile stands aside for them, and for them only."""

import threading
from typing import Any

import torch


class _Eager:
    """While any probe's sampled step runs; nested probes, and those of other threads, count."""

    def __init__(self) -> None:
        self._depth = 0
        self._stance: Any = None
        self._lock = threading.Lock()

    def acquire(self) -> None:
        with self._lock:
            if self._depth == 0:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()
            self._depth += 1

    def release(self) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._stance.__exit__(None, None, None)


eager = _Eager()


def capturing() -> bool:
    """Whether a CUDA graph is being captured: what is called now runs later, and must not wait for the device."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
