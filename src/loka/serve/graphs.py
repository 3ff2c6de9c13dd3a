"""CUDA graphs of a frozen model, one for each bucket: compiled once, captured anew for each version.

    freeze    template, a tree of its own -> torch.compile -> one program for each bucket
    version   its tensors into the template, one call, one capture for each bucket

Compiled code takes a tree's tensors as arguments and its objects as constants: another tree would be compiled
again, and other tensors in the same tree are not. A graph keeps the addresses of its version's tensors, and
the version keeps the tensors. Nothing writes to them, so graphs of several versions replay side by side.

The alarm cannot watch inside of a graph. Its looks are graphs too, of the model as it is written, for a few
rows: they run beside the answers on a stream of their own, and are read when they are done.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loka.compiler import install
from loka.compiler.joint_sites import misfit, unjoined
from loka.compiler.notes import record_of, uncounted
from loka.core.compiling import compiled_call
from loka.core.error import sqnr_db
from loka.core.exceptions import LokaError, ServeRefused, WrongResults
from loka.core.recording import Recording, record, synced
from loka.core.timing import elapsed, first_line, timed_replay
from loka.nn.site import install as install_forward
from loka.nn.site import site_forwards, stand_aside
from loka.nn.unwrap import named_modules
from loka.serve.build import frozen_sites
from loka.serve.rows import Form, leaves, mapped
from loka.serve.run import Runner
from loka.serve.sites import FrozenSite, HighPrecisionSite, answering, observed_by
from loka.serve.watch.monitor import EVERY, LOOKED_AT, Look, Range, look

LOOKS = (1, 8, 32, LOOKED_AT)
"""Rows of a look: the most of these that a request has, so that no row of padding is looked at."""
_RECOMPILES = 4096
SHARE = 0.01
"""Of the time of answers, for looks."""


@dataclass(frozen=True)
class Graph:
    """A recorded call: `inputs` [rows, ...] are read and `output` is written by every replay, which takes
    `microseconds`."""

    rows: int
    inputs: list[torch.Tensor]
    output: Any
    recording: Recording
    microseconds: float


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

    def microseconds(self, sizes: Sequence[int]) -> float:
        """Of the replays for these numbers of rows."""
        return sum(self._graphs[rows].microseconds for rows in sizes)

    def _handed_over(self, leaf: torch.Tensor) -> torch.Tensor:
        """Made on the stream of the graphs, and read on the caller's."""
        if self._stream is not None:
            leaf.record_stream(torch.cuda.current_stream(leaf.device))
        return leaf


class Looks:
    """The alarm's view of one version: what rows at its FP8 sites are, by graphs of a few rows.

    A look is due `EVERY` requests after the last one, and when `SHARE` of the time that these took pays for
    it: it is a forward pass of kernels by themselves, and small requests are over sooner.
    """

    def __init__(
        self,
        graphs: Mapping[int, Graph],
        sites: Mapping[int, Sequence[tuple[str, int]]],
        ranges: Mapping[str, Range],
        stream: torch.cuda.Stream | None,
    ) -> None:
        """`sites`: of each graph, name and number of rows of each site, in the order of its output."""
        self._graphs, self._sites, self._ranges, self._stream = graphs, sites, ranges, stream
        self._lock = threading.Lock()
        self._requests, self._saved = 0, 0.0
        self._pending: tuple[int, torch.Tensor, torch.cuda.Event | None] | None = None

    def __call__(
        self, tensors: Sequence[torch.Tensor], microseconds: float, note: Callable[[str, Look], None]
    ) -> None:
        """Takes account of a request [B, ...] whose answer took so long, and looks at some rows if that is
        due; then notes what the look before showed."""
        count = tensors[0].shape[0]
        if count == 0 or not self._lock.acquire(blocking=False):
            return
        try:
            self._requests += 1
            self._saved += SHARE * microseconds
            graph = self._graphs[max(rows for rows in self._graphs if rows <= count)]
            if self._requests < EVERY or self._saved < graph.microseconds or not self._noted(note):
                return
            self._requests, self._saved = 0, 0.0
            with synced(self._stream):
                for buffer, column in zip(graph.inputs, tensors, strict=True):
                    buffer.copy_(column[:: count // graph.rows][: graph.rows], non_blocking=True)
                graph.recording.replay()
                host = torch.empty_like(graph.output, device="cpu", pin_memory=self._stream is not None)
                host.copy_(graph.output, non_blocking=True)
                event = None if self._stream is None else self._stream.record_event()
            self._pending = graph.rows, host, event
        finally:
            self._lock.release()

    def _noted(self, note: Callable[[str, Look], None]) -> bool:
        """Notes the look that was taken last; False where the device is not done with it."""
        if self._pending is None:
            return True
        rows, maxima, event = self._pending
        if event is not None and not event.query():
            return False
        self._pending = None
        names, counts = zip(*self._sites[rows], strict=True)
        for name, part in zip(names, maxima.split(counts), strict=True):
            note(name, Look.of(part, self._ranges[name].ceiling))
        return True


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
        least_db: float,
    ) -> None:
        """`least_db`: what compiled and eager answers agree to at least."""
        self._run, self._ranges, self._device, self._least_db = run, ranges, device, least_db
        install()  # what joins sites into regions
        self._template = _like(tree)
        self._programs = {rows: compiled_call(self._template) for rows in buckets}
        self._times: dict[tuple[str, int], float] = {}  # of replays; new weights take no other

    def capture(self, tree: nn.Module) -> tuple[Replays, Looks]:
        """The graphs of a version, after the answers of each were compared with those of `tree`.

        Of later versions, which run by code that was compared already, each is compared with a call of that
        code, and the smallest one with `tree`: requests wait for what the device does here.

        Raises ServeRefused where the model cannot be compiled or captured, and WrongResults where compiled
        and eager answers agree to less than `least_db`.
        """
        # Code that several buckets share, behind a graph break, would run as written from the ninth on.
        with torch._dynamo.config.patch(recompile_limit=_RECOMPILES, accumulated_recompile_limit=_RECOMPILES):
            return self._capture(tree)

    def times(self, tree: nn.Module) -> dict[int, float]:
        """Microseconds of a replay by bucket, of graphs that are compared as those of `capture` are."""
        with torch._dynamo.config.patch(recompile_limit=_RECOMPILES, accumulated_recompile_limit=_RECOMPILES):
            graphs = self._answers(tree, _stream(self._device, True))
        return {rows: graph.microseconds for rows, graph in graphs.items()}

    def _answers(self, tree: nn.Module, stream: torch.cuda.Stream | None) -> dict[int, Graph]:
        _bind(self._template, tree)
        answers: dict[int, Graph] = {}
        known = bool(self._times)
        for rows, program in self._programs.items():
            _plan_for(self._template, rows)
            call = functools.partial(self._run, program)  # type: ignore[arg-type]  # a compiled call of one
            graph, made = self._graph("answer", rows, call, stream)
            _check(graph, made, self._least_db)
            if not (known and answers):
                with answering(rows):
                    _check(graph, self._run(tree, graph.inputs), self._least_db)
            answers[rows] = graph
        return answers

    def _capture(self, tree: nn.Module) -> tuple[Replays, Looks]:
        streams = [_stream(self._device, urgent) for urgent in (True, False)]
        answers = self._answers(tree, streams[0])
        looks, sites = {}, {}
        for rows in LOOKS:
            sites[rows] = found = list[tuple[str, int]]()
            call = functools.partial(self._looked, tree, found)
            looks[rows], _ = self._graph("look", rows, call, streams[1])
        replays = Replays(answers, streams[0], self._run.form)
        return replays, Looks(looks, sites, self._ranges, streams[1])

    def apart(self) -> dict[str, str]:
        """Why FP8 sites run by themselves in the compiled code, by name; regions have the others."""
        found = {}
        for name, site in frozen_sites(self._template).items():
            record = record_of(site.health)
            if site.weight.joined is None:
                n, k = site.weight.sides
                found[name] = unjoined(site.candidate) or misfit(k, n) or "it was frozen without graphs"
            elif record is None:
                found[name] = "no graph runs it in FP8"
            elif not any(name in region for region in record[0]):
                found[name] = record[1].get(name, "the compiler took it out of the graph")
        return found

    def _graph(
        self,
        kind: str,
        rows: int,
        call: Callable[[list[torch.Tensor]], Any],
        stream: torch.cuda.Stream | None,
    ) -> tuple[Graph, Any]:
        """The recorded call, and what the call before it gave."""
        inputs = self._run.form.check_rows(self._device, rows)
        try:
            with synced(stream):  # compiles, and makes what is made once
                made = call(inputs)
            with uncounted():
                recording, output = record(lambda: call(inputs), self._device, stream)
        except (LokaError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:  # compilers raise what they like
            raise ServeRefused(
                f"this model cannot be compiled and recorded for {rows} rows",
                why=[first_line(error)],
                way_out="graphs=False answers eagerly; or take what waits for the device out of forward",
            ) from error
        if (kind, rows) in self._times:
            recording.replay()
        else:
            self._times[kind, rows] = _microseconds(recording, self._device)
        return Graph(rows, inputs, output, recording, self._times[kind, rows]), made

    def _looked(
        self, tree: nn.Module, sites: list[tuple[str, int]], inputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """The row maxima (`monitor.look`) of all sites one after the other; `sites` says whose they are."""
        found: list[torch.Tensor] = []
        sites.clear()

        def observe(name: str, rows: torch.Tensor) -> None:
            if name in self._ranges:
                found.append(look(rows))
                sites.append((name, found[-1].numel()))

        with observed_by(observe):
            self._run(tree, inputs)
        return torch.cat(found)


def _microseconds(recording: Recording, device: torch.device) -> float:
    """Of a replay, the shortest of three; 0 off CUDA."""
    if device.type != "cuda":
        recording.replay()
        return 0.0
    events = [timed_replay(recording) for _ in range(3)]
    torch.cuda.synchronize(device)
    return min(elapsed(begin, end) for begin, end in events)


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


def _stream(device: torch.device, urgent: bool) -> torch.cuda.Stream | None:
    """`urgent`: its kernels go before those of other streams that wait for the same processors."""
    return torch.cuda.Stream(device, priority=-int(urgent)) if device.type == "cuda" else None


def _check(graph: Graph, expected: Any, least_db: float) -> None:
    for place, (found, want) in enumerate(zip(leaves(graph.output), leaves(expected), strict=True)):
        agreement = sqnr_db(found, want)
        if bool(want.isfinite().all()) and not agreement >= least_db:
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


def _plan_for(template: nn.Module, bucket: int) -> None:
    """Has compiled sites go by the plan for so many rows: which are in FP8 is a constant of a program.

    A module all of whose sites are in high precision runs as it is written, for the compiler to see no other
    code than that of the model.
    """
    for forward in site_forwards(template).values():
        for site in forward.sites:
            if isinstance(site, FrozenSite):
                site.traced_in_hp = bucket in site.in_hp
        precise = all(
            isinstance(site, HighPrecisionSite) or (isinstance(site, FrozenSite) and site.traced_in_hp)
            for site in forward.sites
        )
        (stand_aside if precise else install_forward)(forward)


def _bind(template: nn.Module, tree: nn.Module) -> None:
    """Has `template` compute with the tensors of `tree`."""
    for (_, own), (_, other) in zip(named_modules(template), named_modules(tree), strict=True):
        own._parameters.update(other._parameters)
        own._buffers.update(other._buffers)
    theirs = frozen_sites(tree)
    for name, own_site in frozen_sites(template).items():
        own_site.weight, own_site.input_scale = theirs[name].weight, theirs[name].input_scale
