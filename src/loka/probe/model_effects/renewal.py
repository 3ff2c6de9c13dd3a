"""Effects of every site on the model as it is now, from fresh rows: no step of training, nothing changed.

    for a batch:  forward in eval mode, one backward from the logits to the sites' outputs    sensitivity.py
    after all:    term_i of every row, their mean over rows, relative to H             core/numerics/effect.py
    interval:     standard error over rows, or over clusters of rows; H's own where labels tell it; and with a
                  `horizon` what the model moves until then                                    movement.py

Samples of sampled steps fade slowly and are of models that are gone; these are all of one model, so their
standard error is that of a plain mean. The cost is `samples / per_batch` forward and backward passes (8 with
the defaults) and quantizing `samples` rows once for each recipe, whatever the length of training.
In eval mode a BatchNorm uses its running statistics, so rows do not mix, and such models have effects too.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn

from loka.core.exceptions import DataRefused, NotConverted, PlanMismatch
from loka.core.numerics.effect import NO_PROMISE, OLD, Effect
from loka.core.numerics.label_rate import BaseRate, require_shares, task_rates
from loka.core.records.parts import WIDTH, Part, part_name
from loka.core.records.stats import LinearStats, Stats
from loka.core.row_segments import RowSegments
from loka.nn.linears import find_linears, signature
from loka.nn.site import site_forwards
from loka.nn.unwrap import device_of, unwrap
from loka.probe.force_eager import eager
from loka.probe.layer_stats import with_effects, without_effects
from loka.probe.model_effects.calls import Found, step_seed
from loka.probe.model_effects.effects_by_part import ProbedRows, alike, effects_by_part, over_batches
from loka.probe.model_effects.error_projection import effects_of
from loka.probe.model_effects.logits import Logits, NoEffect, called_logits, refuse
from loka.probe.model_effects.movement import Horizon, added_variance, widened
from loka.probe.model_effects.promise import no_promise
from loka.probe.model_effects.sample_rows import clusters_of_rows, of_mean_one, weights_of_rows
from loka.probe.model_effects.segment_rows import SEGMENT_ROWS, SegmentRows
from loka.probe.model_effects.sensitivity import Sensitivity
from loka.probe.model_effects.untouched import as_evaluated, thawed
from loka.probe.site_trace import SiteCall, SiteNames, SiteTrace
from loka.statistics.effect_casts import CASTS
from loka.statistics.effect_depths import Learnt, Tables, centre_of_input, columns_in, merge_tables, tables_of

Forward = Callable[[nn.Module, Any], Any]
Clusters = Callable[[Any], torch.Tensor]
"""A batch -> int64 [B]: rows of one number, such as a user's, may be alike."""
Weights = Callable[[Any], torch.Tensor]
"""A batch -> [B], not negative: what each row weighs in the loss."""
Labels = Callable[[Any], torch.Tensor | None]
"""A batch -> [B] or [B, tasks] in [0, 1], or None."""
T = TypeVar("T")

SAMPLES, PER_BATCH = 1536, 192


def renew_effects(
    model: nn.Module,
    stats: Stats,
    batches: Iterable[Any],
    *,
    logits: Logits | None = None,
    base_rate: BaseRate | None = None,
    forward: Forward | None = None,
    clusters: Clusters | None = None,
    weights: Weights | None = None,
    horizon: Horizon | None = None,
    tasks: Sequence[str] = (),
    segments: RowSegments | None = None,
    segment_rows: int = SEGMENT_ROWS,
    segment_width: float = WIDTH,
    labels: Labels | None = None,
    samples: int = SAMPLES,
    per_batch: int = PER_BATCH,
    final_rate: float | None = None,
    seed: int = 0,
) -> Stats:
    """`stats` with the effects of all sites, and their histograms, replaced by those of fresh rows.

    Means and hot columns, which a plan fixes, stay those of `stats`: the effects are by them. Where it has no hot
    columns, the first batch tells them, and runs once more.
    `model` is left as it was: weights, buffers, gradients, mode and random state. Wrappers are passed by,
    so a rank may do this alone. Where the rows tell nothing of a site, its old effects stay, and
    `no_effect` says so; where KL/H itself cannot be promised (logits saturated, labels all alike or too
    rare), every site's effects go, and `no_effect` says why.

    Args:
        stats: of this model, by a Probe or by an earlier renewal.
        batches: rows that training has not used, in batches as large as training's: scales of whole tensors
            depend on it. No more are read than `samples` takes, or `segments`.
        logits: function from what `forward` returns to logits; as for `Probe`, and not needed with `tasks`.
        base_rate: share of positive labels, or the labels counted, whose error then widens intervals; of
            several tasks one for all or a sequence of one for each; by default the mean prediction.
        forward: (model, batch) -> what the model returns; by default a `data.Batch` goes in as in training,
            a tuple as arguments, anything else as the one argument.
        clusters: which rows may be alike; by default all are independent.
        weights: of rows in the loss; by default all weigh alike. KL/H is then a weighted mean over the
            weighted labels' H, so `base_rate` has to be of weighted labels too. Histograms stay unweighted.
        horizon: until when the effects are to hold while training goes on, and what is known of how the
            model moves (`Horizon.of_probe`). None: for the model as it is.
        tasks: names of the logits, where they are several: effects on each by itself too (`Stats.parts`),
            for one more backward pass each.
        segments: which rows have effects by themselves too. Batches are read on until each segment has
            `segment_rows` rows; the model sees those alone that hold rows of one that lacks some.
        segment_rows: how many of each are probed.
        segment_width: up to which factor between what a budget is charged and the estimate a task or segment
            counts as known. Where it is wider, `Stats.parts` says how many rows are missing, and plans refuse
            a limit on it.
        labels: batch -> labels [B], or [B, tasks], for the H of each segment; by default `batch.label`. The
            mean prediction where there is none, and of weighted rows.
        samples: rows in all, of which each batch gives `per_batch` at most.
        final_rate: learning rate of `model` as a share of its peak, by which plans tell whether it is
            annealed. None: nobody says.
        seed: of the choice of rows.

    Raises:
        PlanMismatch: `stats` is of another model.
        NotConverted: the model runs by a plan; only the unquantized one can be evaluated.
        DataRefused: places of segments, labels, clusters or weights that do not fit the rows; clusters that are no
            whole numbers.
        ValueError: a base rate that is no share, another number of them than tasks, other names than logits,
            no samples, or weights that are negative, not finite or all 0.
    """
    if samples < 1 or per_batch < 1 or segment_rows < 1 or not segment_width > 1:
        raise ValueError(
            f"samples is {samples}, per_batch {per_batch}, segment_rows {segment_rows}; each must be at "
            f"least 1, and segment_width, {segment_width}, above 1"
        )
    parts = [part_name(t, s) for t in tasks or ("",) for s in ("", *(segments.names if segments else ()))]
    if len(set(parts)) < len(parts) or "" in tasks:
        raise ValueError(f"names of tasks, segments and both have to differ, none empty: {'; '.join(parts)}")
    require_shares(base_rate)
    differences = signature(model, like=stats.model).differences(stats.model)
    if differences:
        raise PlanMismatch("these statistics are of another model", why=differences, way_out="probe this model afresh")
    if site_forwards(model):
        raise NotConverted(
            "this model runs a plan, and its effects are those of the unquantized model",
            way_out="loka.revert(model) first",
        )
    if logits is not None or tasks:  # whoever says what they are knows the loss
        stats = replace(stats, not_clicks="")
    strata = None if segments is None else SegmentRows(segments, wanted=segment_rows)
    if len(tasks) > 1 and logits is None:
        logits = _as_named  # whoever names its columns says what they are
    columns = {path: columns_in(tables_of(layer)) for path, layer in stats.layers.items()}
    rows = _Rows(tasks=tuple(tasks), strata=strata, labels=labels or _labels_of, columns=columns)
    try:
        refuse(model)
    except NoEffect as reason:
        rows.missed = dict.fromkeys(stats.layers, str(reason))
    else:
        run = forward or _as_in_training
        _read(unwrap(model), stats, batches, rows, logits, run, (clusters, weights), samples, per_batch, seed)
    renewed = _renewed(stats, rows, base_rate, horizon, segment_width)
    return replace(renewed, final_rate=final_rate)


@dataclass
class _Rows:
    """What the batches showed: one `Found` for each, its clusters and weights, and why sites show nothing.

    With `strata` a batch may have a second one, of rows beside the sample of all rows: `uniform` tells them
    apart, and `places` say of each row in which segment it is.
    """

    tasks: tuple[str, ...]
    strata: SegmentRows | None
    labels: Labels
    columns: dict[str, Tables]  # that tell the hot ones of each site, once they are known
    uniform: list[bool] = field(default_factory=list)
    places: list[torch.Tensor] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    clusters: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    size: int = 0  # of the latest batch
    missed: dict[str, str] = field(default_factory=dict)
    count: int = 0

    def learn_columns(self, fresh: Found) -> bool:
        """Whether it tells hot columns where none were known. They stay: a plan has one set for all rows."""
        fresh_columns = {path: columns_in(tables) for path, (_, tables) in fresh.sites.items()}
        lacking = {path: tables for path, tables in fresh_columns.items() if tables.keys() - self.columns[path].keys()}
        self.columns |= {path: {**tables, **self.columns[path]} for path, tables in lacking.items()}
        return bool(lacking)

    def require_named(self, count: int) -> None:
        if self.tasks and len(self.tasks) != count:
            raise ValueError(f"{len(self.tasks)} names of tasks, {', '.join(self.tasks)}, for {count} logits: name all")
        if self.strata is not None and count > 1 and not self.tasks:
            raise ValueError(f"segments of {count} logits need their names: pass tasks=")


def _read(
    model: nn.Module,
    stats: Stats,
    batches: Iterable[Any],
    rows: _Rows,
    logits: Logits | None,
    forward: Forward,
    by_row: tuple[Clusters | None, Weights | None],
    samples: int,
    per_batch: int,
    seed: int,
) -> None:
    clusters, weights = by_row
    linears, _ = find_linears(model)
    traced = {path: shape for path, shape in stats.model.layers.items() if shape.use is not None}

    def learnt(path: str) -> Learnt:
        """What a plan by the renewed statistics will fix."""
        return Learnt(centre_of_input(stats.layers[path]).to(device_of(unwrap(model))), rows.columns[path])

    def probe(
        batch: Any, step: int, take: int, chosen: torch.Tensor | None, places: torch.Tensor | None
    ) -> Found | None:
        """One forward, and backward from the logits of some rows."""
        found: list[Found] = []
        sensitivity = Sensitivity(
            samples=take,
            per_step=take,
            logits=logits,
            base_rate=None,
            seed=seed,
            sink=found.append,
            by_task=bool(rows.tasks),
            chosen=chosen,
            learnt=learnt,
        )

        def observe(site: SiteCall, output: torch.Tensor) -> None:
            if site.path in stats.layers:
                sensitivity.see(site.path, site.weight, site.x, output, site.rows)

        names = SiteNames(linears, traced)
        trace = SiteTrace(
            model, names, linears=linears, filter=None, observe=observe, account=False, hooks=sensitivity.hooks
        )
        eager.acquire()
        try:
            with as_evaluated(model), thawed(model):
                sensitivity.begin((), step=step_seed(seed, step) % (1 << 31))
                trace.start()
                try:
                    output = forward(model, batch)
                finally:
                    for handle in trace.stop():
                        handle.remove()
                columns = called_logits(output) if logits is None and not isinstance(output, tuple) else None
                if isinstance(columns, torch.Tensor) and columns.ndim == 2:
                    rows.require_named(columns.shape[1])
                sensitivity.finish(model, output)
        finally:
            eager.release()
        if rows.strata is not None and places is not None and sensitivity.size not in (0, len(places)):
            raise DataRefused(
                f"segments.of gives {len(places)} places in {rows.strata.segments.names} to {sensitivity.size} rows",
                way_out="give each row one, or -1",
            )
        refused = {path for path, reason in rows.missed.items() if reason.startswith(NO_PROMISE)}
        rows.missed |= {path: reason for path, reason in sensitivity.missed().items() if path not in refused}
        rows.size = sensitivity.size
        return found[0] if found else None

    def keep(batch: Any, fresh: Found | None, places: torch.Tensor | None, *, uniform: bool) -> None:
        if fresh is None:
            return
        rows.require_named(fresh.logits.shape[1])
        rows.found.append(fresh)
        rows.uniform.append(uniform)
        if rows.strata is not None and places is not None:
            rows.strata.note(places, fresh)
            rows.places.append(places[fresh.picks])
        if clusters is not None:
            rows.clusters.append(clusters_of_rows(clusters(batch), rows.size)[fresh.picks])
        if weights is not None:
            rows.weights.append(weights_of_rows(weights(batch), rows.size)[fresh.picks])

    for number, batch in enumerate(batches):
        strata, places, fresh = rows.strata, None, None
        if strata is not None:
            places = strata.places(batch)
        if rows.count < samples:
            take = min(per_batch, samples - rows.count)
            fresh = probe(batch, number + 1, take, None, places)
            if fresh is not None and rows.learn_columns(fresh):
                fresh = probe(batch, number + 1, take, None, places)
            keep(batch, fresh, places, uniform=True)
            rows.count += len(fresh.picks) if fresh is not None else 0
        if strata is not None and places is not None:
            strata.see(places, rows.labels(batch) if weights is None else None, rows.tasks)
            taken = fresh.picks if fresh is not None else places[:0]
            chosen = strata.choose(places, taken, step_seed(seed, number + 1) % (1 << 31))
            if len(chosen):
                keep(batch, probe(batch, number + 1, len(chosen), chosen, places), places, uniform=False)
        if rows.count >= samples and (strata is None or strata.enough):
            return


def _renewed(stats: Stats, rows: _Rows, base_rate: BaseRate | None, horizon: Horizon | None, allowed: float) -> Stats:
    if not any(rows.uniform):
        reasons = rows.missed or dict.fromkeys(stats.layers, "there were no rows to renew it from")
        kept = {p: _kept(layer, reasons.get(p, "")) for p, layer in stats.layers.items()}
        return replace(stats, layers=kept, parts={}, alike={})
    every = [found for found, uniform in zip(rows.found, rows.uniform, strict=True) if uniform]
    z = torch.cat([found.logits for found in every])
    rates = task_rates(base_rate, z.shape[1]) if base_rate is not None else None
    refused = no_promise(z, rates)
    if refused:
        reason = NO_PROMISE + refused
        without = {p: without_effects(layer, reason) for p, layer in stats.layers.items()}
        return replace(stats, layers=without, parts={}, alike={})
    predicted = z.sigmoid()
    if rates is not None:
        predicted = torch.tensor(rates.shares, dtype=torch.float64).expand(z.shape)
    signed = torch.cat([found.signed for found in every])
    groups = torch.cat(_of(rows.clusters, rows)).unique(return_inverse=True)[1] if rows.clusters else None
    paths = [path for path in stats.layers if any(path in found.sites for found in every)]
    changes = [over_batches(every, path) for path in paths]
    weighing = of_mean_one(torch.cat(_of(rows.weights, rows))) if rows.weights else None
    known = dict(zip(paths, effects_of(changes, predicted, signed, groups, weighing), strict=True))
    now = {path: dict(zip(CASTS, effects, strict=True)) for path, effects in known.items()}
    now = {path: effects for path, effects in now.items() if any(e.count for e in effects.values())}
    variance = rates.log_variance if rates is not None else 0.0
    moves = dict.fromkeys(now, 0.0)
    if horizon is not None:
        moves = added_variance({path: stats.layers[path].effects for path in now}, now, horizon)
    by_part: dict[str, dict[str, dict[str, Effect]]] = {}
    parts: dict[str, Part] = {}
    if rows.tasks or rows.strata is not None:
        by_part, parts = effects_by_part(
            _probed(rows),
            list(now),
            tasks=rows.tasks,
            segments=rows.strata,
            base_rate=base_rate,
            moves=moves,
            allowed=allowed,
        )
    layers = {}
    for path, layer in stats.layers.items():
        if path in now:
            tables = {**_tables(every, path), **rows.columns[path]}
            effects = widened(now[path], variance + moves[path])
            layer = with_effects(without_effects(layer, ""), effects, tables, "")
            layers[path] = replace(layer, effects_by_part=by_part.get(path, {}))
        else:
            reason = rows.missed.get(path, "no fresh row reaches it")
            layers[path] = _kept(layer, "its effect is finite on no sample" if path in known else reason)
    return replace(stats, layers=layers, parts=parts, alike=alike(paths, [each.cpu() for each in changes], weighing))


def _of(values: Sequence[T], rows: _Rows) -> list[T]:
    return [value for value, uniform in zip(values, rows.uniform, strict=True) if uniform]


def _probed(rows: _Rows) -> ProbedRows:
    counts = [len(found.picks) for found in rows.found]
    none = [torch.full((count,), -1) for count in counts]
    uniform = [torch.full((count,), one) for count, one in zip(counts, rows.uniform, strict=True)]
    return ProbedRows(
        found=rows.found,
        places=torch.cat(rows.places or none),
        uniform=torch.cat(uniform),
        groups=torch.cat(rows.clusters) if rows.clusters else None,
        weights=torch.cat(rows.weights) if rows.weights else None,
    )


def _tables(found: Sequence[Found], path: str) -> Tables:
    total: Tables = {}
    for batch in found:
        if path in batch.sites:
            total = merge_tables(total, batch.sites[path][1])
    return total


def _kept(layer: LinearStats, reason: str) -> LinearStats:
    if reason.startswith(NO_PROMISE):
        return without_effects(layer, reason)
    reason = reason or layer.no_effect.removeprefix(OLD) or "the fresh rows do not tell"
    return replace(layer, no_effect=OLD + reason if layer.effects else reason, effects_by_part={})


def _as_named(output: Any) -> Any:
    return output


def _labels_of(batch: Any) -> torch.Tensor | None:
    found = getattr(batch, "label", None)
    return found if isinstance(found, torch.Tensor) else None


def _as_in_training(model: nn.Module, batch: Any) -> Any:
    tensors = getattr(batch, "tensors", None)
    if callable(tensors):
        return model(*(tensor for name, tensor in tensors().items() if name != "label"))
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
