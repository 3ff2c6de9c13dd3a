"""CUDA graphs of a frozen model, one for each bucket: compiled once, captured anew for each version.

    freeze    template, a tree of its own  --torch.compile-->  one program for each bucket
    version   its tensors into the template, one call, one capture for each bucket

Compiled code takes a tree's tensors as arguments and its objects as constants: another tree would be compiled
again, and other tensors in the same tree are not. A graph keeps the addresses of its version's tensors, and
the version keeps the tensors. Nothing writes to them, so graphs of several versions replay side by side.

The alarm cannot watch inside of a graph. Its looks are graphs too, of the model as it is written, for a few
rows of every 8th request: they run beside the answers on a stream of their own, and are read when they are
done.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loka.core.compiling import compiled_call
from loka.core.error import sqnr_db
from loka.core.exceptions import ServeRefused, WrongResults
from loka.core.recording import Recording, record, synced
from loka.nn.site import site_forwards
from loka.nn.unwrap import named_modules
from loka.serve.monitor import LOOKED_AT, Look, Range, look
from loka.serve.rows import LEAST_DB, Form, leaves, mapped
from loka.serve.run import Runner
from loka.serve.sites import FrozenSite, observed_by

LOOKS = (1, 8, 32, LOOKED_AT)
"""Rows of a look: the most of these that a request has, so that no row of padding is looked at."""


@dataclass(frozen=True)
class Graph:
    """A recorded call: `inputs` [rows, ...] are read and `output` is written by every replay."""

    rows: int
    inputs: list[torch.Tensor]
    output: Any
    recording: Recording


class Replays:
    """The graphs of one version by number of rows. Threads share them, one at a time."""

    def __init__(self, graphs: Mapping[int, Graph], stream: torch.cuda.Stream | None, form: Form) -> None:
        self._graphs, self._stream, self._form = graphs, stream, form
        self._lock = threading.Lock()

    def __call__(self, tensors: Sequence[torch.Tensor], rows: int) -> Any:
        """Outputs for tensors [B, ...] by the graph of `rows` >= B rows: [B, ...] each.

        Nothing waits for the device: the lock is held while work is queued, and the stream does it in turn.
        """
        graph, count = self._graphs[rows], tensors[0].shape[0]
        with self._lock, synced(self._stream):
            last = self._form.check_rows(tensors[0].device) if count == 0 else tensors
            for buffer, column, row in zip(graph.inputs, tensors, last, strict=True):
                buffer[:count].copy_(column, non_blocking=True)
                if count < rows:
                    buffer[count:].copy_(row[-1:].expand_as(buffer[count:]))
            graph.recording.replay()
            return mapped(graph.output, lambda leaf: self._handed_over(leaf[:count].clone()))

    def _handed_over(self, leaf: torch.Tensor) -> torch.Tensor:
        """Made on the stream of the graphs, and read on the caller's."""
        if self._stream is not None:
            leaf.record_stream(torch.cuda.current_stream(leaf.device))
        return leaf


class Looks:
    """The alarm's view of one version: what rows at its FP8 sites are, by graphs of a few rows."""

    def __init__(
        self, graphs: Mapping[int, Graph], names: Sequence[str], stream: torch.cuda.Stream | None
    ) -> None:
        self._graphs, self._names, self._stream = graphs, names, stream
        self._lock = threading.Lock()
        self._pending: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    def __call__(self, tensors: Sequence[torch.Tensor], note: Callable[[str, Look], None]) -> None:
        """Looks at some rows [B, ...], and notes what the look before showed, if it is done."""
        count = tensors[0].shape[0]
        if count == 0 or not self._lock.acquire(blocking=False):
            return
        try:
            if self._pending is not None:
                numbers, event = self._pending
                if event is not None and not event.query():
                    return
                self._pending = None
                for name, found in zip(self._names, numbers.tolist(), strict=True):
                    note(name, Look.of(found))
            graph = self._graphs[max(rows for rows in self._graphs if rows <= count)]
            with synced(self._stream):
                for buffer, column in zip(graph.inputs, tensors, strict=True):
                    buffer.copy_(column[:: count // graph.rows][: graph.rows], non_blocking=True)
                graph.recording.replay()
                numbers = torch.empty_like(graph.output, device="cpu", pin_memory=self._stream is not None)
                numbers.copy_(graph.output, non_blocking=True)
                self._pending = numbers, _recorded(self._stream)
        finally:
            self._lock.release()


def _recorded(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    return None if stream is None else stream.record_event()


class Capturer:
    """Makes the graphs of versions. `tree`: of the first one, which it copies but for the tensors."""

    def __init__(
        self,
        tree: nn.Module,
        *,
        run: Runner,
        buckets: Sequence[int],
        ranges: Mapping[str, Range],
        device: torch.device,
    ) -> None:
        self._run, self._ranges, self._device = run, ranges, device
        self._template = _like(tree)
        self._programs = {rows: compiled_call(self._template) for rows in buckets}

    def capture(self, tree: nn.Module) -> tuple[Replays, Looks]:
        """The graphs of a version, after the answers of each were compared with those of `tree`.

        Raises WrongResults where they agree to less than `LEAST_DB`.
        """
        _bind(self._template, tree)
        streams = [_stream(self._device) for _ in range(2)]
        answers = {}
        for rows, program in self._programs.items():
            graph = self._graph(rows, lambda inputs, program=program: self._run(program, inputs), streams[0])  # type: ignore[misc]
            _check(graph, self._run(tree, graph.inputs))
            answers[rows] = graph
        names: list[str] = []
        looks = {
            rows: self._graph(rows, lambda inputs: self._looked(tree, inputs, names), streams[1])
            for rows in LOOKS
        }
        form = self._run.form
        return Replays(answers, streams[0], form), Looks(looks, tuple(names), streams[1])

    def _graph(
        self, rows: int, call: Callable[[list[torch.Tensor]], Any], stream: torch.cuda.Stream | None
    ) -> Graph:
        inputs = self._run.form.check_rows(self._device, rows)
        with synced(stream):  # compiles, and makes what is made once
            call(inputs)
        recording, output = record(lambda: call(inputs), self._device, stream)
        recording.replay()
        return Graph(rows, inputs, output, recording)

    def _looked(self, tree: nn.Module, inputs: Sequence[torch.Tensor], names: list[str]) -> torch.Tensor:
        """float32 [looks, 4]: what each site's call shows (`monitor.look`); `names` are theirs, in order."""
        found: list[torch.Tensor] = []
        names.clear()

        def observe(name: str, rows: torch.Tensor) -> None:
            if name in self._ranges:
                names.append(name)
                found.append(look(rows, self._ranges[name].ceiling))

        with observed_by(observe):
            self._run(tree, inputs)
        return torch.stack(found)


def wants_graphs(asked: bool | None, device: torch.device, scratch: Sequence[str]) -> bool:
    """Whether a server has graphs. `scratch`: attributes that `forward` writes to, which replays would not.

    Raises ServeRefused where they were asked for and cannot be.
    """
    if asked and not _has_graphs(device):
        raise ServeRefused(
            f"CUDA graphs need a CUDA device; the model is on {device}",
            way_out="graphs=False, or model.to('cuda') first",
        )
    if asked and scratch:
        raise ServeRefused(
            "forward writes to attributes, which the replay of a graph would not do",
            why=scratch,
            way_out="graphs=False",
        )
    return _has_graphs(device) and not scratch if asked is None else asked


def _has_graphs(device: torch.device) -> bool:
    return device.type == "cuda"


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def _check(graph: Graph, expected: Any) -> None:
    for place, (found, want) in enumerate(zip(leaves(graph.output), leaves(expected), strict=True)):
        agreement = sqnr_db(found, want)
        if bool(want.isfinite().all()) and not agreement >= LEAST_DB:
            raise WrongResults(
                f"the compiled model computes something else than the model for {graph.rows} rows",
                why=[f"output {place} agrees to {agreement:.1f} dB"],
                way_out="freeze with graphs=False, and report it",
            )


def _like(tree: nn.Module) -> nn.Module:
    """Another tree of the same modules and sites with the same tensors."""
    sites = [site for forward in site_forwards(tree).values() for site in forward.sites]
    shared: list[Any] = [*tree.parameters(), *tree.buffers()]
    for site in sites:
        shared += [value for value in vars(site).values() if not isinstance(value, str)]
    return copy.deepcopy(tree, {id(value): value for value in shared})


def _bind(template: nn.Module, tree: nn.Module) -> None:
    """Has `template` compute with the tensors of `tree`."""
    for (_, own), (_, other) in zip(named_modules(template), named_modules(tree), strict=True):
        own._parameters.update(other._parameters)
        own._buffers.update(other._buffers)
    theirs = site_forwards(tree)
    for path, forward in site_forwards(template).items():
        for own_site, site in zip(forward.sites, theirs[path].sites, strict=True):
            if isinstance(own_site, FrozenSite) and isinstance(site, FrozenSite):
                own_site.weight, own_site.input_scale = site.weight, site.input_scale
