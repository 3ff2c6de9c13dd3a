"""What fresh batches show of the model as it is now: the first half of a renewal (renewal.py).

Each batch gives one forward in eval mode and one backward from the logits of the rows that are probed. Up to
`samples` rows are drawn from all rows, evenly; where segments are asked for, further rows of each segment that
lacks some are chosen, and run in a forward of their own, until each segment has enough.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from loka.core.exceptions import DataRefused
from loka.core.numerics.effect import NO_PROMISE
from loka.core.records.stats import Stats
from loka.nn.linears import find_linears
from loka.nn.unwrap import device_of
from loka.probe.force_eager import eager
from loka.probe.model_effects.calls import Found, step_seed
from loka.probe.model_effects.logits import Logits, called_logits
from loka.probe.model_effects.sample_rows import clusters_of_rows, weights_of_rows
from loka.probe.model_effects.segment_rows import SegmentRows
from loka.probe.model_effects.sensitivity import Sensitivity
from loka.probe.model_effects.untouched import as_evaluated, thawed
from loka.probe.site_trace import SiteCall, SiteNames, SiteTrace
from loka.probe.trace import beside_training
from loka.statistics.effect_depths import Learnt, Tables, centre_of_input, columns_in

Forward = Callable[[nn.Module, Any], Any]
Clusters = Callable[[Any], torch.Tensor]
"""A batch -> int64 [B]: rows of one number, such as a user's, may be alike."""
Weights = Callable[[Any], torch.Tensor]
"""A batch -> [B], not negative: what each row weighs in the loss."""
Labels = Callable[[Any], torch.Tensor | None]
"""A batch -> [B] or [B, tasks] in [0, 1], or None."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How batches are read. Attributes without a word here are arguments of `renew_effects`.

    Attributes:
        model: without its wrappers.
        stats: of this model; their sites are probed, by their means.
    """

    model: nn.Module
    stats: Stats
    logits: Logits | None
    forward: Forward
    clusters: Clusters | None
    weights: Weights | None
    labels: Labels
    samples: int
    per_batch: int
    seed: int

    def seed_of(self, number: int) -> int:
        """Of batch `number`, counted from 1, for generators that take 31 bits."""
        return step_seed(self.seed, number) % (1 << 31)


@dataclass
class FreshRows:
    """What the batches showed: one `Found` for each forward, and why sites show nothing.

    With `strata`, the segments, a batch may have a second `Found`, of rows beside the sample of all rows.

    Attributes:
        tasks: names of the logits; empty where they have none.
        columns: by site, the tables that tell its hot columns; empty ones until they are known.
        uniform: for each `Found`, whether its rows belong to the sample of all rows.
        places: for each `Found`, the segment of each row, int64 [m]; empty without `strata`.
        clusters, weights: for each `Found`, of each row [m]; empty where the caller gave none.
        size: rows of the latest batch.
        missed: by site, why the latest batch that showed nothing of it did not.
        mixing: of sites whose rows mixed samples in some batch, what was seen: others only hide it.
        count: rows of the sample of all rows so far.
        reason: why the latest forward showed nothing, if it did not.
        read: batches that were to show some of these; `dropped`: why those showed nothing that did not.
    """

    tasks: tuple[str, ...]
    strata: SegmentRows | None
    columns: dict[str, Tables]
    uniform: list[bool] = field(default_factory=list)
    places: list[torch.Tensor] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    clusters: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    size: int = 0
    missed: dict[str, str] = field(default_factory=dict)
    mixing: dict[str, str] = field(default_factory=dict)
    count: int = 0
    reason: str = ""
    read: int = 0
    dropped: list[str] = field(default_factory=list)

    def learn_columns(self, fresh: Found) -> bool:
        """Keeps hot columns that `fresh` shows where none were known; returns whether there were such.

        They stay as the first batch shows them, because a plan has one set of columns for all rows.
        """
        fresh_columns = {path: columns_in(tables) for path, (_, tables) in fresh.sites.items()}
        lacking = {path: tables for path, tables in fresh_columns.items() if tables.keys() - self.columns[path].keys()}
        self.columns |= {path: {**tables, **self.columns[path]} for path, tables in lacking.items()}
        return bool(lacking)

    def require_named(self, count: int) -> None:
        """Raises ValueError unless the names of tasks fit `count` logits."""
        if self.tasks and len(self.tasks) != count:
            raise ValueError(f"{len(self.tasks)} names of tasks, {', '.join(self.tasks)}, for {count} logits: name all")
        if self.strata is not None and count > 1 and not self.tasks:
            raise ValueError(f"segments of {count} logits need their names: pass tasks=")


def read_batches(batches: Iterable[Any], reading: Reading, rows: FreshRows) -> None:
    """Probes `batches` into `rows`, until there are `samples` rows and each segment has enough.

    Raises:
        DataRefused: places of segments, labels, clusters or weights do not fit the rows.
        ValueError: names of tasks do not fit the logits, or what `places_of` raises.
    """
    for number, batch in enumerate(batches, start=1):
        strata = rows.strata
        places = None if strata is None else strata.places(batch)
        fresh = None
        if rows.count < reading.samples:
            fresh = _probe_all_rows(batch, number, places, reading, rows)
        if strata is not None and places is not None:
            strata.see(places, reading.labels(batch) if reading.weights is None else None, rows.tasks)
            taken = fresh.picks if fresh is not None else places[:0]
            chosen = strata.choose(places, taken, reading.seed_of(number))
            if len(chosen):
                of_segments = _probe(batch, number, len(chosen), chosen, places, reading, rows)
                _keep(batch, of_segments, places, reading, rows, uniform=False)
        if rows.count >= reading.samples and (strata is None or strata.enough):
            return


def _probe_all_rows(
    batch: Any, number: int, places: torch.Tensor | None, reading: Reading, rows: FreshRows
) -> Found | None:
    """Probes this batch's part of the sample of all rows; None where it shows nothing."""
    take = min(reading.per_batch, reading.samples - rows.count)
    fresh = _probe(batch, number, take, None, places, reading, rows)
    if fresh is not None and rows.learn_columns(fresh):  # effects of hot recipes are by the columns: once more
        fresh = _probe(batch, number, take, None, places, reading, rows)
    _keep(batch, fresh, places, reading, rows, uniform=True)
    rows.read += 1
    if fresh is None:
        rows.dropped.append(rows.reason)
    else:
        rows.count += len(fresh.picks)
    return fresh


def _probe(
    batch: Any,
    number: int,
    take: int,
    chosen: torch.Tensor | None,
    places: torch.Tensor | None,
    reading: Reading,
    rows: FreshRows,
) -> Found | None:
    """One forward, and one backward from the logits of `take` rows: those `chosen`, or drawn ones.

    `number` is the batch's, from 1, and seeds the draw. Returns None where the batch shows nothing; `rows.missed`
    then says why, by site.
    """
    found: list[Found] = []

    def learnt(path: str) -> Learnt:
        """What a plan by the renewed statistics will fix."""
        centre = centre_of_input(reading.stats.layers[path])
        return Learnt(centre.to(device_of(reading.model)), rows.columns[path])

    sensitivity = Sensitivity(
        samples=take,
        per_step=take,
        logits=reading.logits,
        base_rate=None,
        seed=reading.seed,
        sink=found.append,
        by_task=bool(rows.tasks),
        chosen=chosen,
        learnt=learnt,
        shows=bool(rows.found),
    )
    _run(batch, number, sensitivity, reading, rows)
    if rows.strata is not None and places is not None and sensitivity.size not in (0, len(places)):
        raise DataRefused(
            f"segments.of gives {len(places)} places in {rows.strata.segments.names} to {sensitivity.size} rows",
            way_out="give each row one, or -1",
        )
    refused = {path for path, reason in rows.missed.items() if reason.startswith(NO_PROMISE)}
    rows.missed |= {path: reason for path, reason in sensitivity.missed().items() if path not in refused}
    rows.mixing |= sensitivity.mixing
    rows.size = sensitivity.size
    rows.reason = "" if found else next(iter(sensitivity.missed().values()), "")
    return found[0] if found else None


def _run(batch: Any, number: int, sensitivity: Sensitivity, reading: Reading, rows: FreshRows) -> None:
    """Runs the model on `batch` in eval mode, eagerly, while `sensitivity` sees its sites; then its backward.

    The model is afterwards as it was. Raises ValueError where columns of logits do not fit the tasks' names.
    """
    model, stats = reading.model, reading.stats

    def observe(site: SiteCall, output: torch.Tensor) -> None:
        if site.path in stats.layers:
            sensitivity.see(site.path, site.weight, site.x, output, site.rows)

    linears, _ = find_linears(model)
    names = SiteNames(linears, stats.model.traced)
    trace = SiteTrace(
        model, names, linears=linears, filter=None, observe=observe, account=False, hooks=sensitivity.hooks
    )
    eager.acquire()
    try:
        with as_evaluated(model), thawed(model), beside_training():
            sensitivity.begin((), step=reading.seed_of(number))
            trace.start()
            try:
                output = reading.forward(model, batch)
            finally:
                for handle in trace.stop():
                    handle.remove()
            columns = called_logits(output) if reading.logits is None and not isinstance(output, tuple) else None
            if isinstance(columns, torch.Tensor) and columns.ndim == 2:
                rows.require_named(columns.shape[1])
            sensitivity.finish(model, output)
    finally:
        eager.release()


def _keep(
    batch: Any, fresh: Found | None, places: torch.Tensor | None, reading: Reading, rows: FreshRows, *, uniform: bool
) -> None:
    """Adds to `rows` what was `fresh`, with the segments, clusters and weights of its rows; nothing where None."""
    if fresh is None:
        return
    rows.require_named(fresh.logits.shape[1])
    rows.found.append(fresh)
    rows.uniform.append(uniform)
    if rows.strata is not None and places is not None:
        rows.strata.note(places, fresh)
        rows.places.append(places[fresh.picks])
    if reading.clusters is not None:
        rows.clusters.append(clusters_of_rows(reading.clusters(batch), rows.size)[fresh.picks])
    if reading.weights is not None:
        rows.weights.append(weights_of_rows(reading.weights(batch), rows.size)[fresh.picks])
