"""Progress bars for long loops, in the shape the library's `track` arguments take."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")


class ProgressBars:
    """Callable as `track(items, description, total)`; bars vanish when done.

    On a terminal only: a log file is spared them.
    """

    def __init__(self, label: str = "", *, console: Console | None = None) -> None:
        self._label = label
        self._console = console or Console(stderr=True)

    def __call__(self, items: Iterable[T], description: str, total: int) -> Iterator[T]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        shown = f"{self._label} {description}".strip()
        silent = not self._console.is_terminal
        with Progress(*columns, console=self._console, transient=True, disable=silent) as progress:
            yield from progress.track(items, description=shown, total=total)
