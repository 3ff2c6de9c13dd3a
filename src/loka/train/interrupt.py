"""Ctrl-C and SIGTERM between steps instead of in the middle of one.

A step that is cut in half has moved some weights and not others, and cannot be resumed
exactly. The first signal is therefore only noted; a second one interrupts at once. Schedulers
send SIGTERM some seconds before they kill, time enough for a step and a checkpoint.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Terminated(KeyboardInterrupt):
    """SIGTERM. What ends a run by Ctrl-C ends it by this too; only the exit status differs."""


class Interrupt:
    """`requested` once Ctrl-C was pressed or SIGTERM came."""

    requested = False
    _kind: type[KeyboardInterrupt] = KeyboardInterrupt

    def check(self) -> None:
        """Raises the KeyboardInterrupt that is due; for long work between two steps."""
        if self.requested:
            raise self._kind

    def _note(self, number: int, frame: Any) -> None:
        self._kind = Terminated if number == signal.SIGTERM else KeyboardInterrupt
        if self.requested:
            raise self._kind
        self.requested = True


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Inside, the first SIGINT or SIGTERM sets `requested`. Python allows this in the main thread only."""
    interrupt = Interrupt()
    # Any other handler belongs to the caller: leave it alone.
    usual: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    replaced = {}
    if threading.current_thread() is threading.main_thread():
        replaced = {number: usual[number] for number in usual if signal.getsignal(number) is usual[number]}
    for number in replaced:
        signal.signal(number, interrupt._note)
    try:
        yield interrupt
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)
