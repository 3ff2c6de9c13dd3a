"""Who calls TorchScript with which tensors: torch's function modes are not asked there.

While somebody listens, the callables of TorchScript report their arguments before they run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Listener = Callable[[str, Any], None]


class _ScriptCalls:
    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._originals: dict[Any, Any] = {}

    def add(self, listener: Listener) -> None:
        if not self._listeners:
            for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
                self._originals[kind] = kind.__call__
                kind.__call__ = self._reporting(kind.__call__)  # type: ignore[method-assign]
        self._listeners.append(listener)

    def discard(self, listener: Listener) -> None:
        self._listeners.remove(listener)
        if not self._listeners:
            for kind, original in self._originals.items():
                kind.__call__ = original

    def _reporting(self, original: Any) -> Any:
        def call(script: Any, *args: Any, **kwargs: Any) -> Any:
            for listener in list(self._listeners):
                listener("a TorchScript function", (args, kwargs))
            return original(script, *args, **kwargs)

        return call


script_calls = _ScriptCalls()
