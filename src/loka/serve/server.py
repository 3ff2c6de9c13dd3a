"""A frozen model that answers requests, one version of its weights at a time.

A version is a module tree that nothing writes to. `refresh` builds another beside it and then replaces one
reference, which Python does at once: a request reads it once and keeps that version until its answer is
whole, split or not. So none waits for a refresh, and no answer holds rows of two versions. Without graphs
requests take turns: what `forward` leaves in attributes another thread would read.
"""

import gc
import itertools
import math
import tempfile
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from loka.core.exceptions import ServeRefused, first_line, truncated
from loka.core.records.plan import Plan
from loka.serve.build import frozen_tree, load_precise, record_weights, share
from loka.serve.by_rows import buckets_by_site
from loka.serve.card import Card
from loka.serve.graphs import Capturer
from loka.serve.model.absent import for_compilers
from loka.serve.model.programs import like
from loka.serve.model.written import WrittenGraphs
from loka.serve.packaging.aot import Packaged, package_version
from loka.serve.packaging.triton_folder import PACKAGE, Batching, add_version, config_of
from loka.serve.packaging.weights import PackagedWeights, write_weights
from loka.serve.replays import Replays
from loka.serve.rows import MOST_DRAWN, Request, joined, leaves, mapped, pad
from loka.serve.run import runner_of
from loka.serve.saving import save_version
from loka.serve.sites import Observer, answering, observed_by
from loka.serve.version import Version
from loka.serve.watch.monitor import Alarm, Monitor, is_looked_at
from loka.serve.watch.own_rows import RowOrder, own_rows, row_orders
from loka.serve.watch.shadow import Shadow


@dataclass(frozen=True)
class Answer:
    """The outputs for the rows of one request, in their order, all computed with the weights of `version`.

    `buckets`: the numbers of rows that the model was run with for it, padding included.
    """

    output: Any
    version: int
    buckets: tuple[int, ...]

    @property
    def nonfinite_rows(self) -> int:
        """How many rows have NaN or infinity in an output. On a GPU it waits for the answer."""
        bad = [
            ~leaf.isfinite().reshape(leaf.shape[0], math.prod(leaf.shape[1:])).all(dim=1)
            for leaf in leaves(self.output)
        ]
        return int(torch.stack(bad).any(dim=0).sum()) if bad else 0


class Server:
    """Answers requests from any number of threads. Made by `freeze` and `load`."""

    def __init__(
        self,
        *,
        card: Card,
        plan: Plan,
        skeleton: nn.Module,
        scales: Mapping[str, torch.Tensor],
        module: nn.Module,
        precise: nn.Module | None,
        shadow: float,
        graphs: bool,
        device: torch.device,
        written: WrittenGraphs | None,
    ) -> None:
        """`module`, `precise`: of version 1. `graphs`: whether versions answer by graphs. `written`: their traces."""
        self.card, self.plan, self.device = card, plan, device
        self._skeleton, self._scales = skeleton, scales
        self._changing, self._saving = threading.Lock(), threading.Lock()
        self._one = nullcontext() if graphs else threading.Lock()  # forward may keep what a call needs in attributes
        self._requests = itertools.count()
        self._shadow = shadow
        self._run = runner_of(card)
        self._orders = self._orders_in(module)
        self._capturer = (
            Capturer(
                module,
                run=self._run,
                buckets=card.buckets,
                orders=self._orders,
                device=device,
                errors=card.answers,
                written=written,
            )
            if graphs
            else None
        )
        self._newest = 0
        self._current = self._version(module, precise, self._monitor())
        self._previous: Version | None = None
        if graphs:  # Python's full collection is due after compiling: it stopped requests for 0.2 to 0.3 s
            gc.collect()

    def __reduce__(self) -> NoReturn:
        raise ServeRefused(
            "a server, which holds locks, is neither pickled nor copied",
            way_out="save(folder), and loka.serve.load(folder, model) where it is to answer",
        )

    @property
    def graphs(self) -> bool:
        """Whether answers come from CUDA graphs of compiled code."""
        return self._capturer is not None

    def apart(self) -> dict[str, str]:
        """With graphs, why FP8 sites are in no region, by name; empty without graphs."""
        return {} if self._capturer is None else self._capturer.apart()

    @property
    def version(self) -> int:
        """The number of the weights that answer requests now."""
        return self._current.number

    @property
    def current(self) -> Version:
        """The version that answers requests now. Nothing may write to it."""
        return self._current

    def save(self, folder: Path | str) -> None:
        """Writes the version that answers now into a folder, which `loka.serve.load` reads.

        Raises NotWritten where the disk refuses, and InUse where another process saves there; the folder is as it was.
        """
        with self._saving:  # two into one folder would take each other's files for their own
            save_version(Path(folder), self.card, self.plan, self._apart_from_requests(), self.device)

    def package(self, path: Path | str, *, batch: tuple[int, int] = (1, 4096)) -> Packaged:
        """Compiles the version that answers now into a file that runs without loka (serve/packaging/aot.py).

        The file is called with the inputs in the order of `card.form.columns`. `batch`: the least and the most rows of
        a call. The file is run in a fresh process that cannot import loka, and compared with this server.

        Raises:
            ServeRefused: the server cannot be packaged; the reasons are listed.
            MissingLibrary: there is no C++ compiler.
            WrongResults: the file gives no answers, or answers that are too far from this server's. No file is left.
            NotWritten: the disk refuses the file.
        """
        version = self._apart_from_requests()
        return package_version(Path(path), self.card, self.plan, version, batch=batch, device=self.device)

    def package_weights(self, package: Path | str, path: Path | str) -> PackagedWeights:
        """Writes the weights of the version that answers now, for a package of this server to take in place of its own
        without compiling (serve/packaging/weights.py). The package is run with them in a fresh process, and compared
        with this server; the file of the package stays as it is.

        Raises:
            FileRefused: `package` cannot be read, or `package` did not write it.
            ServeRefused: the package is of another server, or its code holds numbers that differ in this version;
                or `path` is the package.
            WrongResults: with these weights the package answers otherwise than this server. No file is left.
            NotWritten: the disk refuses the file.
        """
        version = self._apart_from_requests()
        return write_weights(Path(package), Path(path), self.card, self.plan, version, device=self.device)

    def publish(
        self, repository: Path | str, name: str, *, most: int = 4096, delay_us: int = 0
    ) -> tuple[Path, Packaged]:
        """Packages the version that answers now as the next version of a model of Triton Inference Server.

        Args:
            repository: the folder of models that the server watches.
            most: the most rows of a batch that the server may join requests to.
            delay_us: how long a request may wait for others, in microseconds.

        Returns the folder of the version, and what the check of its package found.

        Raises what `package` raises, and ServeRefused where the Triton server cannot take the model, or already has
        another one of that name; then nothing is written.
        """
        rows = self.card.form.check_rows(self.device)
        outputs = self._run(self._apart_from_requests().module, rows)
        config = config_of(name, self.card.form, outputs, Batching(most=most, delay_us=delay_us))
        with tempfile.TemporaryDirectory() as folder:
            found = self.package(Path(folder) / PACKAGE, batch=(1, most))
            return add_version(found.path, Path(repository), name, config), found

    def __call__(self, request: Request) -> Answer:
        """The outputs for the rows of a request [B, ...], for any B.

        Rows are padded to the next bucket, and the padding is cut off again. A request with more rows than the largest
        bucket is split, and one version answers all its parts. Rows with NaN are answered with NaN and leave the other
        rows as they are. The alarm looks at one request in 8, and of its parts at the first.

        Raises ServeRefused for a request of another form than was frozen, and for one that reads a weight in a way that
        no calibration row took.
        """
        version, number = self._current, next(self._requests)
        tensors = self.card.form.read(request, self.device)
        by, looking = version.replays or version.module, is_looked_at(number) and tensors[0].shape[0] > 0
        with self._one:
            output, sizes = self._answer(by, tensors, looking=version.monitor if looking else None)
            if version.replays is not None:
                version.replays.note(version.monitor.look_at)
            if (precise := version.precise) is not None and self._shadowed(number):
                version.tally.compare(leaves(output), lambda: leaves(self._answer(precise, tensors)[0]))
        return Answer(output=output, version=version.number, buckets=sizes)

    def _answer(
        self, by: nn.Module | Replays, tensors: Sequence[torch.Tensor], *, looking: Monitor | None = None
    ) -> tuple[Any, tuple[int, ...]]:
        buckets, count = self.card.buckets, tensors[0].shape[0]
        largest = buckets[-1]
        parts, sizes = [], []
        for first in range(0, max(count, 1), largest):
            part = [t[first : first + largest] for t in tensors] if count > largest else tensors
            rows = part[0].shape[0]
            sizes.append(buckets[bisect_left(buckets, rows)])
            if isinstance(by, Replays):
                parts.append(by(part, sizes[-1], looking=looking is not None and not first))
                continue
            monitor = None if first else looking
            observed = observed_by(None if monitor is None else self._shown(monitor, rows, sizes[-1]))
            with answering(sizes[-1]), observed, self._refusing():
                output = self._run(by, pad(part, sizes[-1], self.card.form))
                parts.append(mapped(output, partial(_own_rows, rows)))
        return joined(parts), tuple(sizes)

    def _orders_in(self, module: nn.Module) -> dict[str, RowOrder | None]:
        """How the rows of a batch lie among the rows of each site, in the order in which sites run."""
        tree, rows = like(module), self.card.form.check_rows(self.device)
        found = row_orders(lambda each: self._run(tree, each), rows, self.card.buckets[-1])
        known = {name: order for name, order in found.items() if name in self.card.sites}
        return known | {name: None for name in self.card.sites if name not in known}

    def _monitor(self, behind: Monitor | None = None) -> Monitor:
        return Monitor({name: self.card.sites[name].range for name in self._orders}, behind=behind)

    def _shown(self, monitor: Monitor, rows: int, padded: int) -> Observer:
        """Shows the alarm what a site sees of the rows of the request, without padding."""

        def show(name: str, seen: torch.Tensor) -> None:
            if name in self._orders:
                own = own_rows(self._orders[name], len(seen), count=rows, padded=padded)
                monitor.observe(name, seen[own])

        return show

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Translates torch's error about a tensor on the meta device into what it means here."""
        try:
            yield
        except (RuntimeError, NotImplementedError) as error:  # torch has no class of its own for it
            if not self.card.dropped or "meta" not in str(error):
                raise
            raise ServeRefused(
                "this request takes a way through the model that no calibration row took",
                why=["it reads a weight there that is kept in FP8 alone", first_line(error)],
                way_out="freeze with calibration rows that take it",
            ) from error

    def _shadowed(self, number: int) -> bool:
        """Of the first n requests n times the share, rounded up: 7 of 10 for 0.7."""
        return math.ceil((number + 1) * self._shadow) > math.ceil(number * self._shadow)

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self, state: Mapping[str, torch.Tensor], *, keep: str | Sequence[str] = ()) -> int:
        """Serves new weights from the next request on; returns the number of their version.

        The new weights are copied and quantized beside those that run. Memory holds both until the refresh after this
        one, because the version before stays for `rollback`. Static scales and the ranges of the alarm remain those of
        the calibration rows.

        Args:
            state: a state dict of the model that was frozen.
            keep: patterns of keys, such as "front.embeddings.*", that stay as they are where `state` does not hold
                them. Weights that are kept in FP8 alone cannot be kept so.

        Raises ServeRefused where keys or shapes differ, or a weight is not finite where it was; what runs now goes on.
        """
        with self._changing:
            whole = self._with_kept(state, keep)
            precise = load_precise(self._skeleton, whole, self.device, before=self._current.module.state_dict())
            rows = self.card.form.check_rows(self.device, MOST_DRAWN)
            weights = record_weights(precise, self.plan, lambda tree: self._run(tree, rows), joined=self.graphs)
            lost = [name for name in self.card.sites if name not in weights]
            if lost:
                raise ServeRefused(
                    "with these weights the model does not reach sites that it did", why=lost, way_out="freeze again"
                )
            weights = {name: weights[name] for name in self.card.sites}
            tree = frozen_tree(
                share(precise) if self._shadow else precise,
                self.plan,
                weights,
                self._scales,
                self.card.dropped,
                buckets_by_site(self.card.buckets, self.card.in_hp),
            )
            monitor = self._monitor(self._current.monitor)
            version = self._version(tree, precise if self._shadow else None, monitor)
            self._previous, self._current = self._current, version
            return version.number

    def _apart_from_requests(self) -> Version:
        """The version that answers now, with modules of its own: requests may keep things in the modules of theirs."""
        with self._one:
            return replace(self._current, module=like(self._current.module))

    def _version(self, module: nn.Module, precise: nn.Module | None, monitor: Monitor) -> Version:
        """The next version. Its number is used up only if its graphs are sound."""
        replays = None
        if self._capturer is not None:
            for_compilers(module)
            replays = self._capturer.capture(module)
        self._newest += 1
        return Version(number=self._newest, module=module, precise=precise, monitor=monitor, replays=replays)

    def _with_kept(self, state: Mapping[str, torch.Tensor], keep: str | Sequence[str]) -> dict[str, torch.Tensor]:
        if not isinstance(state, Mapping):
            raise ServeRefused(f"a {type(state).__name__} is no state dict", way_out="give model.state_dict()")
        whole, held = OrderedDict(state), self._current.module.state_dict()
        if hasattr(state, "_metadata"):  # the versions of the form in which its modules write their state
            whole._metadata = state._metadata  # type: ignore[attr-defined]
        for pattern in [keep] if isinstance(keep, str) else keep:
            matching = [key for key in held if fnmatchcase(key, pattern)]
            gone = [key for key in matching if getattr(held[key], "is_meta", False) and key not in whole]
            if not matching or gone:
                raise ServeRefused(
                    f"keep={pattern!r} cannot be kept",
                    why=truncated([f"{key} is kept in FP8 alone" for key in gone], 5) or ["no key matches it"],
                    way_out="give these weights too",
                )
            whole |= {key: held[key] for key in matching if key not in whole}
        return whole

    def rollback(self) -> int:
        """Serves the version before the last refresh again; returns its number.

        Raises ServeRefused where there is none: one version before is kept, and a rollback uses it up.
        """
        with self._changing:
            if self._previous is None:
                raise ServeRefused(
                    f"there is no version before {self._current.number}",
                    way_out="refresh with the weights that you want",
                )
            self._current, self._previous = self._previous, None
            return self._current.number

    def alarms(self) -> tuple[Alarm, ...]:
        """The alarms raised so far for the weights that run now; each was logged as a warning too.

        It waits until everything that requests have shown the alarm is looked at.
        """
        version = self._current
        if version.replays is not None:
            version.replays.note(version.monitor.look_at, wait=True)
        return version.monitor.alarms()

    def shadow(self) -> Shadow:
        """How answers by the weights that run now differed from high precision, over shadowed requests."""
        return self._current.tally.shadow()

    def __str__(self) -> str:
        lines = [f"version {self.version} of", str(self.card)]
        if self.graphs:
            apart = self.apart()
            lines.append(
                f"{len(self.card.buckets)} CUDA graphs of compiled code: "
                f"{len(self.card.sites) - len(apart)} of {len(self.card.sites)} sites are in regions"
            )
            lines += [f"  {name} runs by itself: {reason}" for name, reason in apart.items()]
            unscaled = self._current.replays.unscaled if self._current.replays else ()
            lines += [f"  {name}: the alarm sees what is not finite alone, behind a norm" for name in unscaled]
        return "\n".join(lines)


def _own_rows(rows: int, leaf: torch.Tensor) -> torch.Tensor:
    """Of an output, copied: it may be the caller's own memory, or a buffer of the model, which another request
    would write over."""
    if leaf.is_meta:
        raise NotImplementedError("an output lies on the meta device")
    return leaf[:rows].clone()
