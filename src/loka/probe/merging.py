"""One record from several: of ranks that each saw a part of the data, or of several runs.

The merged statistics are those of one process that saw the parts' batches one after another: counts,
sums, moments, histograms and effects add up, in float64, and round once. What cannot be a sum:

* `rows`, the size of a GEMM as it ran, is the largest one: ranks do not multiply together.
* `factor` has a fixed rank. Each truncation drops the smallest directions, so both the merged and the
  single process's F^T F lie below the scatter matrix, each by at most its own tr(scatter) - |F|^2 in
  any direction; the diagonal `square` is exact. Likewise `sample_factor` (statistics/sample_coherence.py).
* A weight is one tensor, not a sample: its matrix normal (averages over time) is that of the part with
  the most snapshots, the last of equals. Data-parallel ranks hold the same one.
* Effects of centred and hot recipes are by the means and columns of their part (probe/merged_effects.py).
* `amax` keeps the last batches' maxima: the maximum over the parts, the latest beside the latest.

Parts that overlap are counted twice: do not merge a record with one that was resumed from it. The same
record twice is refused.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from loka.core import exchange
from loka.core.exceptions import PlanMismatch, require_kind
from loka.core.numerics.effect import NO_PROMISE
from loka.core.records.parts import Part, joined, joined_alike, judged, tasks_in
from loka.core.records.stats import Distribution, LinearStats, Stats
from loka.core.records.stats_bytes import from_bytes, to_bytes
from loka.core.signature import ModelSignature
from loka.core.storage.codec import decode, encode
from loka.probe.merged_effects import with_effects_of, with_means_of, with_merged_effects
from loka.statistics import depths, effect_depths, gaussian, matrix_normal, sample_coherence

_OWN = {
    gaussian.KIND: {"mean", "square", "scatter", "factor", "amax", sample_coherence.FACTOR},
    matrix_normal.KIND: {"mean", "rows", "columns"},
}
_RAGGED = {"amax", "factor", sample_coherence.FACTOR}  # their first side grows with what was seen
_LEAST_RANK = 64  # of a merged low-rank covariance, which keeps the parts' rank where that is higher
_SUMS = ("tail_", depths.PREFIX, effect_depths.PREFIX)  # how names begin of what adds up


def merge_stats(several: Sequence[Stats]) -> Stats:
    """The statistics of all of `several`, on the CPU; see above for what that means.

    Raises:
        PlanMismatch: they are of different models, or were not learnt alike; all differences are listed.
            Or one of them is there twice.
        ValueError: there are none.
    """
    if not several:
        raise ValueError("there are no statistics to merge")
    require_kind(several, Sequence, "several", way_out="a list of Stats, of at least one")
    for stats in several:
        require_kind(stats, Stats, "one of several", way_out="loka.Stats.load(folder) for each")
    claims = [_claim(stats) for stats in several]
    _refuse(_all_differences(claims, [f"statistics {at + 1}" for at in range(len(several))]))
    _refuse_twice(several)
    return reduce(_merge, several)


def gather_stats(stats: Stats, *, group: dist.ProcessGroup | None = None) -> Stats:
    """`merge_stats` of all ranks' statistics, the same bytes on every rank. A collective.

    Ranks send to each other in pairs, so none holds more than two records at a time. Works over gloo and
    nccl. Without an initialised process group it returns `stats` unchanged.

    Raises:
        PlanMismatch: a rank's statistics do not merge with those of the first; on all ranks.
        ValueError: this process is not in `group`.
    """
    world = exchange.ranks_of(group)
    if world == 1:
        return stats
    claims = exchange.gather_json(_claim(stats), group)
    names = [f"rank {exchange.global_rank(group, at)}" for at in range(world)]
    _refuse(_all_differences(claims, names))
    me, apart = dist.get_rank(group), 1
    while apart < world:
        if me % (2 * apart) == apart:
            exchange.send(to_bytes(stats), me - apart, group)
            break
        if me % (2 * apart) == 0 and me + apart < world:
            stats = _merge(stats, from_bytes(exchange.receive(me + apart, group)))
        apart *= 2
    return from_bytes(exchange.broadcast(to_bytes(stats) if me == 0 else b"", group))


def gather_renewed(stats: Stats, renew: Callable[[Stats], Stats], *, group: dist.ProcessGroup | None = None) -> Stats:
    """`gather_stats` with renewed effects, of all ranks' rows by the means and hot columns that the ranks share.

    A collective. `renew` gets `stats` with these, and returns them with effects of this rank's own fresh rows:
    `lambda stats: renew_effects(model, stats, rows)`. Effects of each rank's own means would be of other quantizers
    than that of the plan which follows.

    Raises:
        PlanMismatch: a rank's statistics do not merge with those of the first; on all ranks.
        ValueError: this process is not in `group`.
        Exception: what `renew` raises, here; the other ranks wait for it.
    """
    if exchange.ranks_of(group) == 1:
        return renew(stats)
    whole = gather_stats(stats, group=group)
    return with_effects_of(whole, gather_stats(renew(with_means_of(stats, whole)), group=group))


def _claim(stats: Stats) -> dict[str, Any]:
    layers = {}
    for path, layer in stats.layers.items():
        lines = {"computes in": layer.dtype, "keeps its weight in": layer.weight_dtype}
        lines["quantizes its weight"] = "once (for inference)" if layer.kept_weight else "in each call"
        tasks = {len(effect.probabilities) for effect in layer.effects.values() if effect.count}
        if tasks:
            lines["has effects on"] = f"{'/'.join(map(str, sorted(tasks)))} tasks"
            if named := tasks_in(stats.parts):
                lines["has effects on tasks called"] = ", ".join(named)
        for operand, found in layer.operands.items():
            lines[f"describes {operand} as"] = found.kind
            if found.kind == gaussian.KIND:
                full = "scatter" in found.tensors
                lines[f"keeps the covariance of {operand}"] = "in full" if full else "as low rank"
            for name, tensor in found.tensors.items():
                if name not in _RAGGED | {"scatter", "factor"}:
                    lines[f"keeps {operand} {name} as"] = str(list(tensor.shape))
            unknown = sorted(_unknown(found))
            if unknown:
                lines[f"keeps of {operand}, unknown here:"] = ", ".join(unknown)
        layers[path] = lines
    return {"model": encode(stats.model), "layers": layers}


def _unknown(found: Distribution) -> set[str]:
    own = _OWN.get(found.kind)
    if own is None:
        return {f"kind {found.kind}"}
    return {name for name in found.tensors if name not in own and not name.startswith(_SUMS)}


def _all_differences(claims: Sequence[dict[str, Any]], names: Sequence[str]) -> list[str]:
    lines = []
    for claim, name in zip(claims, names, strict=True):
        lines += [f"{name}: {line}" for line in _differences(claim, claims[0], names[0])]
    return lines


def _differences(claim: dict[str, Any], first: dict[str, Any], of_first: str) -> list[str]:
    there = decode(ModelSignature, first["model"])
    lines = [f"model: {line}" for line in decode(ModelSignature, claim["model"]).differences(there)]
    for path, layer in claim["layers"].items():
        against = first["layers"].get(path, {})
        for what, value in layer.items():
            if "unknown here" in what:
                lines.append(f"{path} {what} {value}")
            elif against.get(what, value) != value:  # what only one of them has stays as it is
                lines.append(f"{path} {what} {value}, {against[what]} in {of_first}")
    return lines


def _refuse(differences: Iterable[str]) -> None:
    why = list(differences)
    if why:
        raise PlanMismatch(
            "these statistics do not merge",
            why=why,
            way_out="merge statistics of one model, probed with the same LoKA and the same settings",
        )


def _refuse_twice(several: Sequence[Stats]) -> None:
    """Its samples would count twice. Records without samples may well be equal."""
    if len(several) < 2:
        return
    seen: dict[str, int] = {}
    why = []
    for at, stats in enumerate(several, start=1):
        first = seen.setdefault(stats.digest(), at)
        if first < at and stats.sampled_steps:
            why.append(f"statistics {at} are statistics {first} once more")
    if why:
        raise PlanMismatch("these statistics do not merge", why=why, way_out="give each of them once")


def _merge(a: Stats, b: Stats) -> Stats:
    layers = dict(a.layers)
    for path, layer in b.layers.items():
        layers[path] = _merge_layers(layers[path], layer) if path in layers else layer
    layers = dict(sorted(layers.items(), key=lambda item: item[1].order))
    every = layers.values()
    refused = not any(layer.effects for layer in every) and any(e.no_effect.startswith(NO_PROMISE) for e in every)
    return Stats(
        model=a.model,
        steps=a.steps + b.steps,
        sampled_steps=a.sampled_steps + b.sampled_steps,
        layers=layers,
        skipped={path: why for path, why in {**b.skipped, **a.skipped}.items() if path not in layers},
        coverage=a.coverage or b.coverage,
        final_rate=a.final_rate if a.final_rate == b.final_rate else None,
        parts={} if refused else _parts(a, b, layers),
        not_clicks=a.not_clicks or b.not_clicks,
        alike={} if refused else joined_alike(a.alike, b.alike, (_effect_rows(a), _effect_rows(b))),
    )


def _effect_rows(stats: Stats) -> float:
    return max((effect.count for layer in stats.layers.values() for effect in layer.effects.values()), default=0.0)


def _parts(a: Stats, b: Stats, layers: Mapping[str, LinearStats]) -> dict[str, Part]:
    found = {**b.parts, **a.parts}
    for name in a.parts.keys() & b.parts.keys():
        both = joined(a.parts[name], b.parts[name])
        found[name] = judged(both, (layer.effects_by_part.get(name, {}) for layer in layers.values()))
    return found


def _merge_layers(a: LinearStats, b: LinearStats) -> LinearStats:
    operands = dict(a.operands)
    for operand, found in b.operands.items():
        mine = operands.get(operand)
        operands[operand] = _merge_operands(mine, found) if mine is not None else found
    both = replace(
        a,
        rows=max(a.rows, b.rows),
        calls=a.calls + b.calls,
        order=min(a.order, b.order),
        needs_input_grad=a.needs_input_grad or b.needs_input_grad,
        needs_weight_grad=a.needs_weight_grad or b.needs_weight_grad,
        over_tokens=a.over_tokens or b.over_tokens,
        reads=tuple(sorted({*a.reads, *b.reads})),
        operands=operands,
    )
    return with_merged_effects(both, a, b)


def _merge_operands(a: Distribution, b: Distribution) -> Distribution:
    if a.kind == gaussian.KIND:
        base = _merge_gaussians(a, b)
    else:
        base = a if a.numbers["snapshots"] > b.numbers["snapshots"] else b
        base = replace(base, tensors={name: base.tensors[name] for name in _OWN[base.kind]})
    counts = {
        name: sum(part.numbers.get(name, 0) for part in (a, b))
        for name in {**a.numbers, **b.numbers}
        if name.startswith(_SUMS)
    }
    tensors = {**base.tensors, **_sums(a, b), **sample_coherence.merged_factors(a.tensors, b.tensors)}
    return replace(base, tensors=tensors, numbers={**base.numbers, **counts})


def _sums(a: Distribution, b: Distribution) -> dict[str, torch.Tensor]:
    sums = {name: tensor for name, tensor in a.tensors.items() if name.startswith(_SUMS)}
    for name, tensor in b.tensors.items():
        if name in sums:
            sums[name] = (sums[name].double() + tensor.double()).to(tensor.dtype)
        elif name.startswith(_SUMS):
            sums[name] = tensor
    return sums


def _merge_gaussians(a: Distribution, b: Distribution) -> Distribution:
    one, other = (_as(gaussian.from_distribution(part), torch.float64) for part in (a, b))
    kept = [part.factor.shape[0] for part in (one, other) if part.factor is not None]
    both = gaussian.merge(one, other, rank=max([_LEAST_RANK, *kept]))
    amax = _latest_beside_latest(one.amax, other.amax)
    return gaussian.to_distribution(_as(replace(both, amax=amax), torch.float32))


def _as(found: gaussian.Gaussian, dtype: torch.dtype) -> gaussian.Gaussian:
    return replace(
        found,
        mean=found.mean.to(dtype),
        square=found.square.to(dtype),
        amax=found.amax.to(dtype),
        scatter=None if found.scatter is None else found.scatter.to(dtype),
        factor=None if found.factor is None else found.factor.to(dtype),
    )


def _latest_beside_latest(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.shape[0] < b.shape[0]:
        a, b = b, a
    return torch.cat([a[: a.shape[0] - b.shape[0]], torch.maximum(a[a.shape[0] - b.shape[0] :], b)])
