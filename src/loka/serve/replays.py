"""Answers by CUDA graphs of a version, one for each bucket, and what they show the alarm (graphs.py makes them)."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from loka.compiler.notes import FINITE, SCALES
from loka.core.recording import Recording, synced
from loka.serve.model.written import WrittenGraphs
from loka.serve.rows import Form, mapped
from loka.serve.watch.monitor import apart, look_of_scales
from loka.serve.watch.own_rows import RowOrder, own_rows

_LEAST_ROWS = 8  # of a site over tokens, where a request fills little of its graph: else always the same few


class Seen(NamedTuple):
    """`looked_at` of a site's `rows` are, by `width` numbers each: `SCALES`, numbers that are `FINITE` or not, or
    maxima, 0. `order`: how the rows of a batch lie among them."""

    name: str
    looked_at: int
    width: int
    rows: int
    what: int
    order: RowOrder | None


def _likeness(seen: Seen) -> tuple[Any, ...]:
    return seen[1:]


@dataclass(frozen=True)
class Shown:
    """What a recorded call hands out besides: a number for each row, of the sites one after the other, those
    that are alike side by side, so that they are read at once."""

    values: torch.Tensor
    sites: tuple[Seen, ...]


@dataclass(frozen=True)
class Graph:
    """A recorded call: `inputs` [rows, ...] are read and `output` is written by every replay, which takes
    `microseconds`. `looking`: the same for requests that are looked at."""

    rows: int
    inputs: list[torch.Tensor]
    output: Any
    recording: Recording
    microseconds: float
    looking: tuple[Recording, Any, Shown] | None = None


class Replays:
    """The graphs of one version by number of rows. Threads share them, one at a time."""

    def __init__(
        self, graphs: Mapping[int, Graph], stream: torch.cuda.Stream | None, form: Form, written: WrittenGraphs
    ) -> None:
        """`written`: the traces that the graphs were compiled from, of the buckets where these have a text."""
        self._graphs, self._stream, self._form, self.written = graphs, stream, form, written
        self._lock = threading.Lock()
        self._shown: deque[_Waiting] = deque()

    def __call__(self, tensors: Sequence[torch.Tensor], rows: int, *, looking: bool = False) -> Any:
        """Outputs for tensors [B, ...] by the graph of `rows` >= B rows: [B, ...] each.

        Nothing waits for the device: the lock is held while work is queued, and the stream does it in turn.
        """
        graph, count = self._graphs[rows], tensors[0].shape[0]
        recording, output, shown = graph.recording, graph.output, None
        if looking and count and graph.looking is not None:
            recording, output, shown = graph.looking
        with self._lock, synced(self._stream):
            if count == rows:
                for buffer, column in zip(graph.inputs, tensors, strict=True):
                    buffer.copy_(column, non_blocking=True)
            else:
                last = self._form.check_rows(tensors[0].device) if count == 0 else tensors
                for buffer, column, row in zip(graph.inputs, tensors, last, strict=True):
                    buffer[:count].copy_(column, non_blocking=True)
                    buffer[count:].copy_(row[-1:].expand_as(buffer[count:]))
            recording.replay()
            if shown is not None:
                self._shown.append(_Waiting.for_device(shown, (count, rows), self._stream))
            return mapped(output, lambda leaf: self._handed_over(leaf[:count].clone()))

    def note(self, note: Callable[..., None], *, wait: bool = False) -> None:
        """Hands over what `Monitor.look_at` takes, for each request that was looked at and that the device is done
        with; or waits for the device.
        """
        while self._shown:
            with self._lock:
                if not self._shown or not self._shown[0].done(wait=wait):
                    return
                waiting = self._shown.popleft()
            note(*waiting.by_rows())

    @property
    def unscaled(self) -> tuple[str, ...]:
        """Sites of which a look sees only whether the rows are finite."""
        shown = [graph.looking[2].sites for graph in self._graphs.values() if graph.looking]
        return tuple(dict.fromkeys(seen.name for sites in shown for seen in sites if seen.what == FINITE))

    def _handed_over(self, leaf: torch.Tensor) -> torch.Tensor:
        """Made on the stream of the graphs, and read on the caller's."""
        if self._stream is not None:
            leaf.record_stream(torch.cuda.current_stream(leaf.device))
        return leaf


@dataclass(frozen=True)
class _Waiting:
    sites: tuple[Seen, ...]
    values: torch.Tensor
    event: torch.cuda.Event | None
    filled: tuple[int, int]

    @classmethod
    def for_device(cls, shown: Shown, filled: tuple[int, int], stream: torch.cuda.Stream | None) -> _Waiting:
        host = torch.empty_like(shown.values, device="cpu", pin_memory=stream is not None)
        host.copy_(shown.values, non_blocking=True)
        return cls(shown.sites, host, None if stream is None else stream.record_event(), filled)

    def done(self, *, wait: bool) -> bool:
        if self.event is not None and wait:
            self.event.synchronize()
        return self.event is None or self.event.query()

    def by_rows(self) -> Iterator[tuple[list[str], torch.Tensor]]:
        """Sites of which as many rows were looked at, and maxima, without rows that only pad."""
        count, whole = self.filled
        begin = 0
        for (looked_at, width, rows, what, order), alike in itertools.groupby(self.sites, key=_likeness):
            names = [seen.name for seen in alike]
            end = begin + len(names) * looked_at * width
            numbers = self.values[begin:end].view(len(names), looked_at, width).sum(dim=2)
            begin = end
            own = numbers[:, own_rows(order, rows, count=count, padded=whole, apart=apart(rows))]
            if own.shape[1] >= _LEAST_ROWS or own.shape[1] == looked_at or rows <= whole:
                yield names, _maxima(own, what)


def _maxima(numbers: torch.Tensor, what: int) -> torch.Tensor:
    """As `look` gives them; of numbers that tell no more than whether rows are finite, -1 or NaN."""
    return look_of_scales(numbers) if what == SCALES else numbers * 0.0 - 1.0 if what == FINITE else numbers
