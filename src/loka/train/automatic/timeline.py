"""What a run did when: its phases, with the step, the rows and the seconds at which each began."""

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from loka.core.device import synchronize
from loka.core.storage.record_file import RecordFile
from loka.core.table import format_table


@dataclass(frozen=True, kw_only=True)
class Event:
    """`phase` begins after `step` steps and `rows` rows, `seconds` into the work. `note` says what came of
    the phase before."""

    phase: str
    step: int
    rows: int
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class _Phases(RecordFile, kind="training timeline", version=1, way_out="it is written anew by the run's next phase"):
    events: tuple[Event, ...]


def paces(events: Sequence[Event]) -> list[tuple[float | None, float | None]]:
    """For each phase its seconds, None of the last one, and its rows a second, None where it trained none."""
    found: list[tuple[float | None, float | None]] = []
    for event, after in pairwise(events):
        lasted, trained = after.seconds - event.seconds, after.rows - event.rows
        found.append((lasted, trained / lasted if trained and lasted else None))
    return [*found, (None, None)] if events else []


class Timeline:
    """The phases of a run. Seconds count over all its processes, from what checkpoints kept: what a killed process did
    after its last checkpoint is done again, and counts once.
    """

    def __init__(self, events: Sequence[Event] = (), *, seconds: float = 0.0, file: Path | None = None) -> None:
        self.events = list(events)
        self._before, self._started = seconds, time.perf_counter()
        self._file = file

    @property
    def seconds(self) -> float:
        return self._before + time.perf_counter() - self._started

    def begin(self, phase: str, *, step: int, rows: int, device: torch.device, note: str = "") -> None:
        """Notes that `phase` begins now, after what was launched on `device` is done, and writes the file.

        A file that cannot be written is a warning: checkpoints hold the same.
        """
        synchronize(device)
        self.events.append(Event(phase=phase, step=step, rows=rows, seconds=self.seconds, note=note))
        if self._file is None:
            return
        try:
            _Phases(tuple(self.events)).save(self._file)
        except OSError as error:
            warnings.warn(f"{self._file} was not written: {error}", RuntimeWarning, stacklevel=2)

    def __str__(self) -> str:
        """A line for each phase: when it began, how long it took, how fast it trained."""
        rows = [
            (
                event.phase,
                str(event.step),
                f"{event.seconds:.1f}",
                "-" if lasted is None else f"{lasted:.1f}",
                "-" if speed is None else f"{speed:.0f}",
                event.note,
            )
            for event, (lasted, speed) in zip(self.events, paces(self.events), strict=True)
        ]
        return format_table(("phase", "from step", "at s", "lasted s", "rows/s", "note"), rows)


def load_timeline(path: Path) -> tuple[Event, ...]:
    """Reads a timeline. Raises FileRefused for a file that is missing, truncated or edited."""
    return _Phases.load(path).events
