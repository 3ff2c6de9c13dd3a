"""Progress bars for long loops, of the form that `track` arguments of the library have."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")


class ProgressBars:
    """Called as `track(items, description, total)`. The bars vanish when the loop is done.

    They are drawn on a terminal only, so that a log file holds none.
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
