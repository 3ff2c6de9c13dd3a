"""Ctrl-C and SIGTERM between steps instead of in the middle of one.

A step that is cut in half has moved some weights and not others, and cannot be resumed
exactly. The first signal is therefore only noted; a second one interrupts at once. Schedulers
send SIGTERM some seconds before they kill, time enough for a step and a checkpoint.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived. It ends a run wherever Ctrl-C would; only the exit status differs."""


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
    usual: dict[int, tuple[Any, ...]] = {
        signal.SIGINT: (signal.default_int_handler,),
        signal.SIGTERM: (signal.SIG_DFL, _terminate),
    }
    with _handled(interrupt._note, usual):
        yield interrupt


@contextmanager
def terminable() -> Iterator[None]:
    """Inside, SIGTERM raises `Terminated` where Ctrl-C would raise KeyboardInterrupt, so that the work under way is
    saved and cleaned up.
    """
    _came.clear()
    with _handled(_terminate, {signal.SIGTERM: (signal.SIG_DFL,)}):
        yield


def is_terminated(error: KeyboardInterrupt) -> bool:
    """Whether SIGTERM caused the error. A library that waits in C may raise a KeyboardInterrupt of its own."""
    return isinstance(error, Terminated) or _came.is_set()


_came = threading.Event()


def _terminate(number: int, frame: Any) -> None:
    _came.set()
    raise Terminated


@contextmanager
def _handled(handler: Callable[[int, Any], None], usual: Mapping[int, tuple[Any, ...]]) -> Iterator[None]:
    replaced = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in usual}
        replaced = {number: found for number, found in before.items() if found in usual[number]}
    for number in replaced:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, found in replaced.items():
            signal.signal(number, found)
