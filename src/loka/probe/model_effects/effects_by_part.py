"""Effects of single tasks and segments from the rows of a renewal; what a part is: core/records/parts.py.

s_i of task t alone, the rows of segment g alone, H by the labels of t in g
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from loka.core.numerics.effect import Effect
from loka.core.numerics.label_rate import BaseRate, LabelRate, TaskRates, task_rates
from loka.core.records.parts import Part, judged
from loka.probe.model_effects.alike import PAIRS, Together, alike
from loka.probe.model_effects.calls import Found
from loka.probe.model_effects.error_projection import effects_of
from loka.probe.model_effects.movement import widened
from loka.probe.model_effects.promise import no_promise
from loka.probe.model_effects.segment_rows import SegmentRows
from loka.statistics.effect_casts import CASTS

_OF_ALL_PARTS = 150_000  # pairs in one recipe; others have up to 2.7 times as many, and a record 64 MiB at most


@dataclass(frozen=True, kw_only=True)
class ProbedRows:
    """All rows of a renewal, one after the other: `found` of each batch, and of each row [m] its place among
    the segments, whether it is of the sample of all rows, and its cluster and weight, if any."""

    found: Sequence[Found]
    places: torch.Tensor
    uniform: torch.Tensor
    groups: torch.Tensor | None
    weights: torch.Tensor | None


def effects_by_part(
    rows: ProbedRows,
    paths: Sequence[str],
    *,
    tasks: Sequence[str],
    segments: SegmentRows | None,
    base_rate: BaseRate | None,
    moves: Mapping[str, float],
    allowed: float,
) -> tuple[dict[str, dict[str, dict[str, Effect]]], dict[str, Part]]:
    """By layer and part the effects by recipe, and what is known of each part.

    Args:
        paths: the layers.
        tasks: names of the logits; empty where there is one.
        base_rate: share of positive labels, or the labels counted, for all tasks or for each; None: H is that of the
            mean prediction. That of a segment is by the labels of its own rows, where they were read.
        moves: by layer, the variance that the logarithm of its effects has by what the model still moves.
        allowed: up to which factor between what a budget is charged and the estimate a part counts as known.
    """
    z = torch.cat([found.logits for found in rows.found]).cpu()
    signed = torch.cat([found.signed for found in rows.found]).cpu()
    names = ("",) if z.shape[1] == 1 else tuple(tasks)
    wanted = [
        *_whole_tasks(rows, names, base_rate, allowed),
        *(_segments(rows, names, segments, allowed) if segments is not None else ()),
    ]
    wanted.sort(key=lambda one: one.task)  # each task before its segments
    effects: dict[str, dict[str, dict[str, Effect]]] = {path: {} for path in paths}
    parts: dict[str, Part] = {}
    pairs = min(PAIRS, _OF_ALL_PARTS // (len(wanted) + 1))
    for one in wanted:
        part, rates = one.part, None if one.rate is None else task_rates(one.rate, 1)
        reason = "none of its rows was read"
        if part.rows:
            reason = no_promise(z[one.rows][:, one.task : one.task + 1], rates)
        if part.segment:  # whose rate nobody passes: it is of the rows that are read
            reason = reason.removesuffix(", or pass base_rate=")
        part = replace(part, unknown=reason)
        if not reason:
            by_layer, together = _effects(rows, paths, one, len(names) > 1, z, signed, rates, pairs)
            for path, by_recipe in by_layer.items():
                variance = moves.get(path, 0.0) + (rates.log_variance if rates else 0.0)
                effects[path][part.name] = widened(by_recipe, variance)
            part = judged(replace(part, alike=together), (effects[path].get(part.name, {}) for path in paths))
        parts[part.name] = part
    return effects, parts


@dataclass(frozen=True)
class _Wanted:
    """A part whose effects are wanted: of logit `task`, over the probed rows [m] where `rows` is true."""

    part: Part
    task: int
    rows: torch.Tensor
    rate: LabelRate | float | None


def _whole_tasks(
    rows: ProbedRows, names: Sequence[str], base_rate: BaseRate | None, allowed: float
) -> Iterator[_Wanted]:
    """Tasks by name, over the sample of all rows; a single task without a name is the whole model, and no part."""
    count = int(rows.uniform.sum())
    for task, name in enumerate(names):
        if name:
            rate = base_rate[task] if isinstance(base_rate, Sequence) else base_rate
            yield _Wanted(Part(task=name, rows=count, read=count, allowed=allowed), task, rows.uniform, rate)


def _segments(rows: ProbedRows, names: Sequence[str], segments: SegmentRows, allowed: float) -> Iterator[_Wanted]:
    """Every segment of every task, over the rows of the segment."""
    for task, name in enumerate(names):
        for at, segment in enumerate(segments.segments.names):
            here, positives, rate = rows.places == at, segments.positives, None
            if positives is not None and positives[at, -1]:  # none are counted of weighted rows
                rate = LabelRate(positives=float(positives[at, task]), rows=int(positives[at, -1]))
            part = Part(task=name, segment=segment, rows=int(here.sum()), read=segments.read[at], allowed=allowed)
            yield _Wanted(part, task, here, rate)


def _effects(
    rows: ProbedRows,
    paths: Sequence[str],
    one: _Wanted,
    several: bool,
    z: torch.Tensor,
    signed: torch.Tensor,
    rates: TaskRates | None,
    pairs: int,
) -> tuple[dict[str, dict[str, Effect]], Together]:
    """A part's effects by layer and recipe, without layers of which its rows say nothing; and their correlations.

    `z` and `signed`: logits and signed weights of all probed rows [m, T]. `several`: whether there are several
    tasks, of which each has changes of its own. `pairs`: how many correlations are kept at most.
    """
    column = slice(one.task, one.task + 1)
    groups = None if rows.groups is None else rows.groups[one.rows].unique(return_inverse=True)[1]
    weighing = None if rows.weights is None else rows.weights[one.rows]
    changes = [over_batches(rows.found, path, one.task if several else None).cpu()[one.rows] for path in paths]
    logits, weighed = z[one.rows][:, column], signed[one.rows][:, column]
    return effects_of_rows(paths, changes, logits, weighed, rates, groups, weighing, pairs)


def effects_of_rows(
    paths: Sequence[str],
    changes: Sequence[torch.Tensor],
    z: torch.Tensor,
    signed: torch.Tensor,
    rates: TaskRates | None,
    groups: torch.Tensor | None,
    weighing: torch.Tensor | None,
    pairs: int = PAIRS,
) -> tuple[dict[str, dict[str, Effect]], Together]:
    """Effects by layer and recipe, without layers of which the rows say nothing; and correlations of all `paths`.

    Of the rows of `changes`, `z` and `signed`. `rates`: of positive labels, whose entropy H then is; None: H is that of
    the mean prediction.
    """
    predicted = (
        z.sigmoid()
        if rates is None
        else torch.tensor(rates.shares, dtype=torch.float64, device=z.device).expand(z.shape)
    )
    found = effects_of(changes, predicted, signed, groups, weighing)
    named = {path: dict(zip(CASTS, each, strict=True)) for path, each in zip(paths, found, strict=True)}
    known = {path: each for path, each in named.items() if any(effect.count for effect in each.values())}
    return known, alike(paths, [each.cpu() for each in changes], weighing, pairs)


def over_batches(found: Sequence[Found], path: str, task: int | None = None) -> torch.Tensor:
    """s [m, recipes] over all rows, of `task` or of all; NaN, which is left out, where a batch tells nothing."""
    parts = []
    for batch in found:
        known = batch.sites[path][0] if path in batch.sites else batch.unreached.get(path)
        if known is not None and task is not None:
            known = batch.by_task[task].get(path)
        if known is None:
            known = batch.logits.new_full((len(batch.picks), len(CASTS)), torch.nan)
        parts.append(known)
    return torch.cat(parts)
