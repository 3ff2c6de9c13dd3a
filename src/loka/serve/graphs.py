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
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from loka.compiler import install
from loka.compiler.joint_sites import misfit, unjoined
from loka.compiler.notes import record_of, uncounted, watched_by
from loka.core.device import has_graphs
from loka.core.exceptions import ServeRefused, WrongResults, truncated
from loka.core.recording import Recording, record, synced
from loka.core.timing import elapsed, timed_replay
from loka.nn.site import install as install_forward
from loka.nn.site import site_forwards, stand_aside
from loka.nn.unwrap import named_modules
from loka.serve.model.code import digest_of_code
from loka.serve.model.private import tried
from loka.serve.model.programs import Programs, bind, fits, like
from loka.serve.model.traced import without_values
from loka.serve.model.written import WrittenGraph, WrittenGraphs
from loka.serve.replays import Graph, Replays, Seen, Shown
from loka.serve.rows import leaves
from loka.serve.run import Runner
from loka.serve.sites import FrozenSite, HighPrecisionSite, answering, frozen_sites, observed_by
from loka.serve.watch.agreement import AnswerError, disagreements
from loka.serve.watch.monitor import look, some_of
from loka.serve.watch.own_rows import RowOrder

_LOG = logging.getLogger("loka.serve")
_RECOMPILES = 4096


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
        written: WrittenGraphs | None,
    ) -> None:
        """`orders`: how rows lie at the sites that the alarm watches. `errors`: the errors of the outputs, by which
        compiled answers are compared with eager ones. `written`: the buckets' traces, of this code or another.
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
        self._template, self._programs, self._code = self._made_for(tree, written)
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
            answers = self._answers(tree, stream)
        graphs = {str(rows): graph for rows, graph in self._programs.written().items() if self._code}
        return Replays(answers, stream, self._run.form, WrittenGraphs(code=self._code or "", graphs=graphs))

    def times(self, tree: nn.Module) -> dict[int, float]:
        """Microseconds of a replay, by bucket. The graphs are compared with eager answers as in `capture`."""
        with torch._dynamo.config.patch(recompile_limit=_RECOMPILES, accumulated_recompile_limit=_RECOMPILES):
            graphs = self._answers(tree, _stream(self._device))
        return {rows: graph.microseconds for rows, graph in graphs.items()}

    def _answers(self, tree: nn.Module, stream: torch.cuda.Stream | None) -> dict[int, Graph]:
        known = bool(self._times) and fits(self._template, tree, self._run, self._rows(self._buckets[0]))
        if self._times and not known:
            self._template, self._programs, self._code = self._made_for(tree, None)  # which may keep other numbers
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

    def _made_for(self, tree: nn.Module, written: WrittenGraphs | None) -> tuple[nn.Module, Programs, str | None]:
        """The digest of the code is of now: a global may be another one when the server is saved. Traces of another
        code are none of the tree's: what they compute for rows that no check has may differ.
        """
        template, code, known = like(tree), digest_of_code(tree), dict[int, WrittenGraph]()
        if written is not None and written.code == code:
            known = {rows: written.graphs[str(rows)] for rows in self._buckets if str(rows) in written.graphs}
        elif written is not None:
            _LOG.info("the traces are of other code or numbers than this model's, which is traced")
        return template, Programs(template, self._run, known), code

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
            return output, torch.empty(0, device="cpu")
        return output, found[0] if len(found) == 1 else torch.cat(found)


def _microseconds(recording: Recording, device: torch.device) -> float:
    if device.type != "cuda":
        recording.replay()
        return 0.0
    events = [timed_replay(recording) for _ in range(3)]
    events[-1][1].synchronize()  # no more: another thread may capture, and the device may not be waited for then
    return min(elapsed(begin, end) for begin, end in events)


def wants_graphs(asked: bool | None, device: torch.device, scratch: Sequence[str]) -> bool:
    """Whether a server gets graphs. `scratch`: attributes that `forward` writes to, which a replay would not do.

    Raises ServeRefused where graphs were asked for and are impossible.
    """
    if asked and not has_graphs(device):
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
    return has_graphs(device) and not scratch if asked is None else asked


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
