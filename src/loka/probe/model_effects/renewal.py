"""Effects of every site on the model as it is now, from fresh rows: no step of training, nothing changed.

    for a batch:  forward in eval mode, one backward from the logits to the sites' outputs     fresh_rows.py
    after all:    term_i of every row, their mean over rows, relative to H             core/numerics/effect.py
    interval:     standard error over rows, or over clusters of rows; H's own where labels tell it; and with a
                  `horizon` what the model moves until then                                    movement.py

Samples of sampled steps fade slowly and are of models that are gone; these are all of one model, so their
standard error is that of a plain mean. The cost is `samples / per_batch` forward and backward passes (8 with
the defaults) and quantizing `samples` rows once for each recipe, whatever the length of training.
In eval mode a BatchNorm uses its running statistics, so rows do not mix, and such models have effects too.
"""

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import nn

from loka.core.exceptions import NotConverted, require_kind
from loka.core.numerics.effect import NO_PROMISE, OLD, Effect
from loka.core.numerics.label_rate import BaseRate, TaskRates, require_shares, task_rates
from loka.core.records.parts import WIDTH, Part, part_name
from loka.core.records.row_segments import RowSegments
from loka.core.records.stats import LinearStats, Stats
from loka.nn.linears import signature
from loka.nn.site import site_forwards
from loka.nn.unwrap import unwrap
from loka.probe.layer_stats import with_effects, without_effects
from loka.probe.model_effects.calls import Found
from loka.probe.model_effects.effects_by_part import ProbedRows, effects_by_part, effects_of_rows, over_batches
from loka.probe.model_effects.fresh_rows import Clusters, Forward, FreshRows, Labels, Reading, Weights, read_batches
from loka.probe.model_effects.logits import Logits, NoEffect, refuse
from loka.probe.model_effects.movement import Horizon, added_variance, widened
from loka.probe.model_effects.promise import no_promise
from loka.probe.model_effects.sample_rows import require_weights
from loka.probe.model_effects.segment_rows import SEGMENT_ROWS, SegmentRows
from loka.probe.refusals import refuse_other_model
from loka.statistics.effect_depths import Tables, columns_in, merge_tables, tables_of

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

    Warns where some batches tell nothing and others do: these are then no sample of all rows.

    Raises:
        PlanMismatch: `stats` is of another model.
        NotConverted: the model runs by a plan; only the unquantized one can be evaluated.
        DataRefused: places of segments, labels, clusters or weights that do not fit the rows; clusters that are no
            whole numbers.
        ValueError: a base rate that is no share, another number of them than tasks, other names than logits,
            no samples, a final rate that is no share, or weights that are negative, not finite or all 0.
    """
    if samples < 1 or per_batch < 1 or segment_rows < 1 or not segment_width > 1:
        raise ValueError(
            f"samples is {samples}, per_batch {per_batch}, segment_rows {segment_rows}; each must be at "
            f"least 1, and segment_width, {segment_width}, above 1"
        )
    number = isinstance(final_rate, Real) and not isinstance(final_rate, bool)
    if final_rate is not None and not (number and 0 <= final_rate < math.inf):
        raise ValueError(f"final_rate is {final_rate!r}; it is a share of the peak, 0 or more, or None")
    require_kind(stats, Stats, "stats", way_out="probe.stats() of a Probe, or loka.Stats.load(folder)")
    _require_names(tasks, segments)
    require_shares(base_rate)
    _require_same_model(model, stats)
    if logits is not None or tasks:  # whoever says what they are knows the loss
        stats = replace(stats, not_clicks="")
    strata = None if segments is None else SegmentRows(segments, wanted=segment_rows)
    if len(tasks) > 1 and logits is None:
        logits = _as_named  # whoever names its columns says what they are
    columns = {path: columns_in(tables_of(layer)) for path, layer in stats.layers.items()}
    rows = FreshRows(tasks=tuple(tasks), strata=strata, columns=columns)
    try:
        refuse(model)
    except NoEffect as reason:
        rows.missed = dict.fromkeys(stats.layers, str(reason))
    else:
        reading = Reading(
            model=unwrap(model),
            stats=stats,
            logits=logits,
            forward=forward or _as_in_training,
            clusters=clusters,
            weights=weights,
            labels=labels or _labels_of,
            samples=samples,
            per_batch=per_batch,
            seed=seed,
        )
        read_batches(batches, reading, rows)
        if rows.dropped and any(rows.uniform):
            warnings.warn(
                f"{len(rows.dropped)} of {rows.read} batches tell no effects, which are of the others alone: "
                f"{'; '.join(dict.fromkeys(rows.dropped))}",
                stacklevel=2,
            )
    renewed = _renewed(stats, rows, base_rate, horizon, segment_width)
    return replace(renewed, final_rate=final_rate)


def _require_names(tasks: Sequence[str], segments: RowSegments | None) -> None:
    parts = [part_name(t, s) for t in tasks or ("",) for s in ("", *(segments.names if segments else ()))]
    if len(set(parts)) < len(parts) or "" in tasks:
        raise ValueError(f"names of tasks, segments and both have to differ, none empty: {'; '.join(parts)}")


def _require_same_model(model: nn.Module, stats: Stats) -> None:
    refuse_other_model(stats, signature(model, like=stats.model))
    if site_forwards(model):
        raise NotConverted(
            "this model runs a plan, and its effects are those of the unquantized model",
            way_out="loka.revert(model) first",
        )


def _renewed(
    stats: Stats, rows: FreshRows, base_rate: BaseRate | None, horizon: Horizon | None, allowed: float
) -> Stats:
    """`stats` with what `rows` show; `allowed` is `segment_width`."""
    if not any(rows.uniform):
        reasons = rows.missed or dict.fromkeys(stats.layers, "there were no rows to renew it from")
        kept = {p: _kept(layer, reasons.get(p, "")) for p, layer in stats.layers.items()}
        return replace(stats, layers=kept, parts={}, alike={})
    found = _of_all_rows(rows.found, rows)
    z = torch.cat([each.logits for each in found])
    rates = task_rates(base_rate, z.shape[1]) if base_rate is not None else None
    refused = no_promise(z, rates)
    if refused:
        reason = NO_PROMISE + refused
        without = {p: without_effects(layer, reason) for p, layer in stats.layers.items()}
        return replace(stats, layers=without, parts={}, alike={})
    shown = [path for path in stats.layers if path not in rows.mixing and any(path in each.sites for each in found)]
    model_effects = _model_effects(rows, shown, rates)
    known = model_effects.known
    moves = dict.fromkeys(known, 0.0)
    if horizon is not None:
        moves = added_variance({path: stats.layers[path].effects for path in known}, known, horizon)
    by_part: dict[str, dict[str, dict[str, Effect]]] = {}
    parts: dict[str, Part] = {}
    if rows.tasks or rows.strata is not None:
        by_part, parts = effects_by_part(
            _probed(rows),
            list(known),
            tasks=rows.tasks,
            segments=rows.strata,
            base_rate=base_rate,
            moves=moves,
            allowed=allowed,
        )
    of_labels = rates.log_variance if rates is not None else 0.0
    layers = {}
    for path, layer in stats.layers.items():
        if path in known:
            tables = {**_tables(found, path), **rows.columns[path]}
            effects = widened(known[path], of_labels + moves[path])
            layer = with_effects(without_effects(layer, ""), effects, tables, "")
            layers[path] = replace(layer, effects_by_part=by_part.get(path, {}))
        elif path in rows.mixing:  # its old effects are of steps that hid it
            layers[path] = without_effects(layer, rows.mixing[path])
        else:
            reason = "its effect is finite on no sample"
            if path not in model_effects.paths:
                reason = rows.missed.get(path, "no fresh row reaches it")
            layers[path] = _kept(layer, reason)
    return replace(stats, layers=layers, parts=parts, alike=model_effects.alike)


@dataclass(frozen=True)
class _ModelEffects:
    """Effects on the whole loss, from the sample of all rows.

    Attributes:
        paths: the sites that some batch showed.
        known: of those, by site, the effects by recipe, where some recipe's is finite on a row.
        alike: correlations of what the sites of `paths` change, as `Stats.alike`.
    """

    paths: list[str]
    known: dict[str, dict[str, Effect]]
    alike: dict[str, dict[str, float]]


def _model_effects(rows: FreshRows, paths: list[str], rates: TaskRates | None) -> _ModelEffects:
    found = _of_all_rows(rows.found, rows)
    z = torch.cat([each.logits for each in found])
    signed = torch.cat([each.signed for each in found])
    clusters, weights = _of_all_rows(rows.clusters, rows), _of_all_rows(rows.weights, rows)
    groups = torch.cat(clusters).unique(return_inverse=True)[1] if clusters else None
    weighing = require_weights(torch.cat(weights)) if weights else None
    changes = [over_batches(found, path) for path in paths]
    return _ModelEffects(paths, *effects_of_rows(paths, changes, z, signed, rates, groups, weighing))


def _of_all_rows(values: Sequence[T], rows: FreshRows) -> list[T]:
    """Those of `values`, one for each `Found`, that belong to the sample of all rows; none where none were given."""
    return [value for value, uniform in zip(values, rows.uniform, strict=True) if uniform] if values else []


def _probed(rows: FreshRows) -> ProbedRows:
    counts = [len(found.picks) for found in rows.found]
    none = [torch.full((count,), -1, device="cpu") for count in counts]
    uniform = [torch.full((count,), one, device="cpu") for count, one in zip(counts, rows.uniform, strict=True)]
    return ProbedRows(
        found=rows.found,
        places=torch.cat(rows.places or none),
        uniform=torch.cat(uniform),
        groups=torch.cat(rows.clusters) if rows.clusters else None,
        weights=torch.cat(rows.weights) if rows.weights else None,
    )


def _tables(found: Sequence[Found], path: str) -> Tables:
    """The site's histograms, summed over batches."""
    total: Tables = {}
    for batch in found:
        if path in batch.sites:
            total = merge_tables(total, batch.sites[path][1])
    return total


def _kept(layer: LinearStats, reason: str) -> LinearStats:
    """A layer that fresh rows did not renew: with its old effects, marked as old, unless nothing can be promised."""
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
