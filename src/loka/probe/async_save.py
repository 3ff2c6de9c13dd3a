"""Saves while training goes on: copied to the CPU, written by a thread, atomic, the newest wins.

    begin of a step   copy what is kept to pinned memory, without waiting; an event tells when it is there
    a later step      finds the event passed and hands the copy to the thread
    the thread        makes the record, writes it beside the old one and renames (Stats.save)

The thread makes no call to a device: one that did would spoil a graph being captured. Whatever happens,
the folder holds the last record that was written whole; a process that is killed loses what came after.
What the thread fails at is raised at the next step, or at the end.
"""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from loka.core.exceptions import LokaError, NotWritten
from loka.core.exchange import ranks_of
from loka.core.records.stats import RECORD, Stats
from loka.core.storage.alone import alone_with
from loka.core.storage.files import require_writable

T = TypeVar("T")

Make = Callable[[], Stats]
"""Makes the record from a copy; runs in the thread."""


@dataclass(frozen=True)
class Copied:
    """When a copy is there: once every event has passed; at once without events."""

    events: tuple[Any, ...] = ()

    def done(self) -> bool:
        return all(event.query() for event in self.events)

    def wait(self) -> None:
        for event in self.events:
            event.synchronize()


def to_host(value: T) -> tuple[T, Copied]:
    """`value` with a copy on the CPU for each tensor in its dataclasses, mappings, tuples and lists.

    Copies from a GPU go to pinned memory on the current stream, and nothing waits for them.
    """
    devices: set[torch.device] = set()
    copy = _copy(value, devices)
    streams = [torch.cuda.current_stream(device) for device in sorted(devices, key=str)]
    return copy, Copied(tuple(stream.record_event() for stream in streams))


def _copy(value: Any, devices: set[torch.device]) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type != "cuda":
            return value.detach().to("cpu", copy=True)
        devices.add(value.device)
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True, device="cpu")
        return host.copy_(value.detach(), non_blocking=True)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _copy(getattr(value, f.name), devices) for f in fields(value)})
    if isinstance(value, dict):
        return {key: _copy(inner, devices) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copy(inner, devices) for inner in value)
    return value


def own_folder(folder: Path) -> Path:
    """Where this process saves: `folder`, or among several ranks its own `rank-3` inside.

    A folder has one writer. `loka.probe.merge_stats` makes one record of the ranks'. Raises NotWritten where nothing
    can be written: before training, at whose end all that was learnt would be lost.
    """
    own = folder if ranks_of() == 1 else folder / f"rank-{torch.distributed.get_rank()}"
    require_writable(own)
    return own


class Saver:
    """Writes to `folder`, from one thread that starts with the first record. Until it is closed no other Saver may.

    Raises InUse where one does.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held = ExitStack()
        self._held.enter_context(alone_with(folder / RECORD, "saving statistics in", chosen="folder"))
        self._copying: tuple[Make, Copied] | None = None
        self._changed = threading.Condition()  # guards what follows
        self._waiting: Make | None = None
        self._writing = self._closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def offer(self, make: Make, copied: Copied) -> None:
        """`make` is to be written once `copied` is done, unless a newer one comes before.

        Raises LokaError where an earlier save failed.
        """
        self._copying = (make, copied)
        self.poll()

    def poll(self) -> None:
        """Hands over what has been copied. Waits for nothing. Raises LokaError where a save failed."""
        self._raise()
        if self._copying is not None and self._copying[1].done():
            self._hand_over()

    def flush(self) -> None:
        """Returns when what was offered last is on the disk. Raises LokaError where a save failed."""
        if self._copying is not None:
            self._copying[1].wait()
            self._hand_over()
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is None and not self._writing)
        self._raise()

    def close(self, last: Callable[[], tuple[Make, Copied]] | None = None) -> None:
        """Writes what `last` copies, or what was offered last. Raises LokaError where a save failed, and what `last`
        raises; the folder is free then, too."""
        try:
            if last is not None:
                self.offer(*last())
            self.flush()
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            if self._thread is not None:
                self._thread.join()
            self._held.close()

    def _hand_over(self) -> None:
        assert self._copying is not None
        with self._changed:
            self._waiting, self._copying = self._copying[0], None
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="loka-stats", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closed)
                make, self._waiting = self._waiting, None
                if make is None:
                    return
                self._writing = True
            try:
                make().save(self.folder)
            except BaseException as error:
                with self._changed:
                    self._error = error
            finally:
                del make  # its memory, until the next one comes
                with self._changed:
                    self._writing = False
                    self._changed.notify_all()

    def _raise(self) -> None:
        with self._changed:
            error, self._error = self._error, None
        if error is None:
            return
        if isinstance(error, LokaError) and not isinstance(error, NotWritten):
            raise error
        raise LokaError(
            f"the statistics were not saved to {self.folder}",
            why=error.why if isinstance(error, NotWritten) else [f"{type(error).__name__}: {error}"],
            way_out="make room there or choose another folder; it still holds what was saved before, "
            "if anything, and Probe(resume=Stats.load(...)) goes on from that",
        ) from error
