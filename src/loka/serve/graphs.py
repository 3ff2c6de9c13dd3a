"""CUDA graphs of a frozen model, one for each bucket: compiled once, captured anew for each version.

    freeze    template, a tree of its own -> each bucket's trace -> its program
    version   its tensors into the template, one call, one capture for each bucket

Compiled code takes a tree's tensors as arguments and its objects as constants: a version whose modules keep other
things is compiled anew, one with other weights is not. A graph keeps the addresses of its version's tensors, and
the version keeps the tensors. Nothing writes to them, so graphs of several versions replay side by side.

Each bucket has a second graph of the same code, which hands the scales of some rows of each FP8 site out to
the alarm besides: one kernel more, for the requests that are looked at. It shares the first one's memory, as
the two never run at once and what they give is copied before either runs again.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from loka.compiler import install
from loka.compiler.joint_sites import misfit, unjoined
from loka.compiler.notes import FINITE, SCALES, record_of, uncounted, watched_by
from loka.core.exceptions import ServeRefused, WrongResults, truncated
from loka.core.recording import Recording, record, synced
from loka.core.timing import elapsed, timed_replay
from loka.nn.site import install as install_forward
from loka.nn.site import site_forwards, stand_aside
from loka.nn.unwrap import named_modules
from loka.serve.model.private import tried
from loka.serve.model.programs import Programs, bind, fits, like
from loka.serve.model.traced import without_values
from loka.serve.rows import Form, leaves, mapped
from loka.serve.run import Runner
from loka.serve.sites import FrozenSite, HighPrecisionSite, answering, frozen_sites, observed_by
from loka.serve.watch.agreement import AnswerError, disagreements
from loka.serve.watch.monitor import apart, look, look_of_scales, some_of
from loka.serve.watch.own_rows import RowOrder, own_rows

_RECOMPILES = 4096
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

    def __init__(self, graphs: Mapping[int, Graph], stream: torch.cuda.Stream | None, form: Form) -> None:
        self._graphs, self._stream, self._form = graphs, stream, form
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


class Capturer:
    """Captures the graphs of versions. `tree`: that of the first version, copied except for its tensors."""

    def __init__(
        self,
        tree: nn.Module,
        *,
        run: Runner,
        buckets: Sequence[int],
        orders: Mapping[str, RowOrder | None],
        device: torch.device,
        errors: Sequence[AnswerError] | None,
    ) -> None:
        """`orders`: how rows lie at the sites that the alarm watches. `errors`: the errors of the outputs, by which
        compiled answers are compared with eager ones.
        """
        self._run, self._orders, self._device, self._errors = run, orders, device, errors
        install()  # what joins sites into regions
        scripted = [path for path, module in named_modules(tree) if isinstance(module, torch.jit.ScriptModule)]
        if scripted:
            raise ServeRefused(
                "scripted modules hold their tensors apart from Python, where graphs put those of each version",
                why=truncated(scripted, 5),
                way_out="graphs=False, or the modules as they were before torch.jit.script",
            )
        self._buckets = tuple(buckets)
        self._template, self._programs = self._made_for(tree)
        self._times: dict[int, float] = {}  # of replays; new weights take no other

    def capture(self, tree: nn.Module) -> Replays:
        """The graphs of a version, after the answers of each were compared with those of `tree`.

        Of later versions, which run by code that was compared already, each is compared with a call of that
        code, and the smallest one with `tree`: requests wait for what the device does here.

        Raises ServeRefused where the model cannot be compiled or captured, and WrongResults where compiled
        and eager answers disagree.
        """
        # Code that several buckets share, behind a graph break, would run as written from the ninth on.
        with torch._dynamo.config.patch(recompile_limit=_RECOMPILES, accumulated_recompile_limit=_RECOMPILES):
            stream = _stream(self._device)
            return Replays(self._answers(tree, stream), stream, self._run.form)

    def times(self, tree: nn.Module) -> dict[int, float]:
        """Microseconds of a replay, by bucket. The graphs are compared with eager answers as in `capture`."""
        with torch._dynamo.config.patch(recompile_limit=_RECOMPILES, accumulated_recompile_limit=_RECOMPILES):
            graphs = self._answers(tree, _stream(self._device))
        return {rows: graph.microseconds for rows, graph in graphs.items()}

    def _answers(self, tree: nn.Module, stream: torch.cuda.Stream | None) -> dict[int, Graph]:
        known = bool(self._times) and fits(self._template, tree, self._run, self._rows(self._buckets[0]))
        if self._times and not known:
            self._template, self._programs = self._made_for(tree)
        bind(self._template, tree)
        answers: dict[int, Graph] = {}
        for rows in self._buckets:
            _plan_for(self._template, rows)
            graph, made = self._graph(self._rows(rows), stream)
            _check(graph, made, self._errors)
            if not (known and answers):
                _check(graph, self._eager(tree, graph), self._errors)
            answers[rows] = graph
        return answers

    def _rows(self, count: int) -> list[torch.Tensor]:
        return self._run.form.check_rows(self._device, count)

    def _made_for(self, tree: nn.Module) -> tuple[nn.Module, Programs]:
        template = like(tree)
        return template, Programs(template, self._run)

    def _eager(self, tree: nn.Module, graph: Graph) -> Any:
        def answered() -> Any:
            answer = self._run(tree, graph.inputs)
            if any(map(without_values, leaves(answer))):
                raise TypeError("it kept a tensor of the trace, which has no values, for later calls")
            return answer

        with answering(graph.rows):
            return tried(
                answered,
                "this model does not answer once it was traced",
                "a cache or a global keeps tensors: hold them in buffers, or take graphs=False in a new process",
            )

    def apart(self) -> dict[str, str]:
        """Why FP8 sites run by themselves in the compiled code, by name. All other sites are in regions."""
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

    def _graph(self, inputs: list[torch.Tensor], stream: torch.cuda.Stream | None) -> tuple[Graph, Any]:
        rows = inputs[0].shape[0]
        pool = None if stream is None else torch.cuda.graph_pool_handle()

        def recorded() -> tuple[Any, Recording, Any, Any]:
            with synced(stream):  # compiles, and makes what is made once
                call = self._programs.call(inputs)
                made = call()
            with uncounted():
                recording, output = record(call, self._device, stream, pool)
                looking = self._looking(call, stream, pool) if self._orders else None
            return made, recording, output, looking

        made, recording, output, looking = tried(
            recorded,
            f"this model cannot be compiled and recorded for {rows} rows",
            "graphs=False answers eagerly; or take what waits for the device out of forward",
        )
        if rows in self._times:
            recording.replay()
        else:
            self._times[rows] = _microseconds(recording, self._device)
        return Graph(rows, inputs, output, recording, self._times[rows], looking), made

    def _looking(
        self, call: Callable[[], Any], stream: torch.cuda.Stream | None, pool: Any
    ) -> tuple[Recording, Any, Shown]:
        sites: list[Seen] = []
        recording, (output, values) = record(lambda: self._shown(call, sites), self._device, stream, pool)
        return recording, output, Shown(values, tuple(sites))

    def _shown(self, call: Callable[[], Any], sites: list[Seen]) -> tuple[Any, torch.Tensor]:
        found: list[torch.Tensor] = []
        sites.clear()
        names = {site.health.data_ptr(): name for name, site in frozen_sites(self._template).items()}

        def take(shown: list[tuple[str, torch.Tensor, int, int]]) -> None:
            """Copies it at once, by a kernel for all that are as wide: the memory of what a graph shows is its own."""
            known = [
                (Seen(name, len(some), some.shape[1], rows, what, self._orders[name]), some)
                for name, some, rows, what in shown
                if name in self._orders
            ]
            known.sort(key=lambda each: (*each[0][2:5], str(each[0].order)))
            for _, alike in itertools.groupby(known, key=lambda each: each[0].width):
                seen, values = zip(*alike, strict=True)
                found.append(torch.cat(values).reshape(-1))
                sites.extend(seen)

        def shown_by(graph: list[tuple[int, torch.Tensor, int]]) -> None:
            take([(names[health], some_of(rows.view(len(rows), -1)), len(rows), what) for health, rows, what in graph])

        with watched_by(shown_by), observed_by(lambda name, rows: take([(name, look(rows)[:, None], len(rows), 0)])):
            output = call()
        if not found:
            return output, torch.empty(0)
        return output, found[0] if len(found) == 1 else torch.cat(found)


def _microseconds(recording: Recording, device: torch.device) -> float:
    if device.type != "cuda":
        recording.replay()
        return 0.0
    events = [timed_replay(recording) for _ in range(3)]
    torch.cuda.synchronize(device)
    return min(elapsed(begin, end) for begin, end in events)


def wants_graphs(asked: bool | None, device: torch.device, scratch: Sequence[str]) -> bool:
    """Whether a server gets graphs. `scratch`: attributes that `forward` writes to, which a replay would not do.

    Raises ServeRefused where graphs were asked for and are impossible.
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
    """Its kernels go before those of other streams that wait for the same processors."""
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None


def _check(graph: Graph, expected: Any, errors: Sequence[AnswerError] | None) -> None:
    if why := disagreements(leaves(graph.output), leaves(expected), errors):
        raise WrongResults(
            f"the compiled model computes something else than the model for {graph.rows} rows",
            why=why,
            way_out="freeze with graphs=False, and report it",
        )


def _plan_for(template: nn.Module, bucket: int) -> None:
    """Has compiled sites run by the plan for this many rows: which of them are in FP8 is a constant of a program.

    A module whose sites are all in high precision runs as it is written, so that the compiler sees only the code of the
    model.
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
