"""Ctrl-C between steps instead of in the middle of one.

A step that is cut in half has moved some weights and not others, and cannot be resumed
exactly. The first Ctrl-C is therefore only noted; a second one interrupts at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupt:
    """`requested` once Ctrl-C was pressed."""

    requested = False

    def check(self) -> None:
        """Raises the KeyboardInterrupt that is due; for long work between two steps."""
        if self.requested:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Inside, the first SIGINT sets `requested`. Python allows this in the main thread only."""
    interrupt = Interrupt()
    previous = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    # A handler that is not Python's default belongs to the caller: leave it alone.
    if not in_main or previous is not signal.default_int_handler:
        yield interrupt
        return
    signal.signal(signal.SIGINT, interrupt._note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous)
