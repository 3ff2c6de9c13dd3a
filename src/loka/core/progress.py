"""The `track` argument of long loops: who shows progress wraps what a loop goes through, and the loop knows no display.

Such a display is report/progress.py; `untracked`, the default, shows nothing.
"""

from collections.abc import Iterable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Track(Protocol):
    """Wraps the items of a loop to show progress: `for item in track(items, description, total)`."""

    def __call__(self, items: Iterable[T], description: str, total: int) -> Iterable[T]: ...


def untracked(items: Iterable[T], description: str, total: int) -> Iterable[T]:
    """The progress display that shows nothing."""
    return items
