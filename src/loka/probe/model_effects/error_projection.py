"""What the errors of all recipes change at a linear layer's output, and effects from that, in few operations.

    s_ir = sum over the rows of sample i of  (g W^_r) . (x^_r - x) + (g (W^_r - W)) . x

for the gradient g of one scalar (probe/model_effects/sensitivity.py says of which, and why it is written so).
Recipes differ by their scales: what they quantize, multiply and sum is stacked.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from loka.core.numerics.centring import centre_of_rows, subtract
from loka.core.numerics.effect import Effect
from loka.core.numerics.hot_columns import hottest, in_units
from loka.core.numerics.reference import TINY, scale_of
from loka.core.recipe import Cast, Casts, Format
from loka.statistics.depth_scales import sample_scales, sides_of
from loka.statistics.effect_depths import NOTHING, Learnt

_PART = 1 << 24  # elements of stacked weights, and of stacked rows, at a time
_LOOKED_AT = 1 << 18  # elements of the input


def changes_of(
    given: torch.Tensor,
    weight: torch.Tensor,
    grads: torch.Tensor,
    rows: torch.Tensor,
    casts: Sequence[Casts],
    learnt: Learnt = NOTHING,
) -> torch.Tensor:
    """s [m, casts] float32 of the samples whose rows in `given` [T, K] and `grads` [T, N] are `rows` [m, n].

    Scales are those of the whole `given` and `weight` [N, K], as `core.reference.quantize` takes them.
    Centred casts take what is `learnt` off, else the means of these rows: the same formula of x - m. Hot ones add
    residuals of the columns that are learnt, else of those of these rows.
    """
    if any(left.centred or left.hot for left, _ in casts):
        return _by_operand(given, weight, grads, rows, casts, learnt)
    m, n = rows.shape
    changes = torch.zeros(m, len(casts), device=weight.device)
    full = weight.float()
    for some in _parts(len(casts), weight.numel()):
        weights = [pair[1] for pair in casts[some]]
        low_weight = _quantized(weight, weight, None, weights)
        moved = low_weight - full
        for part in _parts(m, n * given.shape[1] * len(weights)):
            at = rows[part].flatten()
            x, g = given[at], grads[at].float()
            error = _quantized(given, x, at, [pair[0] for pair in casts[some]])
            x = x.float()
            error = torch.matmul(g, low_weight).mul_(error.sub_(x))
            error = error.addcmul_(torch.matmul(g, moved), x).sum(dim=2)
            changes[part, some] = error.view(len(weights), -1, n).sum(dim=2).t()
    return changes


def _by_operand(
    given: torch.Tensor,
    weight: torch.Tensor,
    grads: torch.Tensor,
    rows: torch.Tensor,
    casts: Sequence[Casts],
    learnt: Learnt,
) -> torch.Tensor:
    """`changes_of` where some casts are centred or hot: casts that differ in nothing else are computed once."""
    changes = torch.empty(len(rows), len(casts), device=weight.device)
    for centred in (False, True):
        alike = [at for at, (left, _) in enumerate(casts) if left.centred == centred]
        bare = [(_bare(casts[at][0]), _bare(casts[at][1])) for at in alike]
        if not alike:
            continue
        centre = learnt.centre if learnt.centre is not None or not centred else centre_of_rows(given)
        operand = subtract(given, centre) if centred and centre is not None else given
        distinct = list(dict.fromkeys(bare))
        found = changes_of(operand, weight, grads, rows, distinct)
        changes[:, alike] = found[:, [distinct.index(pair) for pair in bare]]
        for at in alike:
            if casts[at][0].hot:
                columns = learnt.hottest(casts[at][0], given.device)
                changes[:, at] += _given_back(operand, weight, grads, rows, casts[at], columns)
    return changes


def _bare(cast: Cast) -> Cast:
    return replace(cast, centred=False, hot=0)


def _given_back(
    given: torch.Tensor,
    weight: torch.Tensor,
    grads: torch.Tensor,
    rows: torch.Tensor,
    casts: Casts,
    columns: torch.Tensor | None,
) -> torch.Tensor:
    """[m]: the sum over a sample's rows of (g Q(W)_H) . r_x + (g r_W) . Q(x)_H."""
    at = rows.flatten()
    x, g = given[at], grads[at].float()
    if columns is None:
        columns = hot_of_rows(given, weight, g, casts[0].hot)
    low_x, left_x = _with_residuals(x, columns, casts[0])
    low_weight, left_weight = _with_residuals(weight, columns, casts[1])
    back = torch.matmul(g, low_weight).mul_(left_x) + torch.matmul(g, left_weight).mul_(low_x)
    return back.view(*rows.shape, -1).sum(dim=(1, 2))


def hot_of_rows(given: torch.Tensor, weight: torch.Tensor, grads: torch.Tensor, count: int) -> torch.Tensor:
    """The columns that add most to errors of samples with gradients `grads` [n, N], by energies of many rows
    of `given` [T, K]: 64 alone have some hot by chance, which flatters."""
    some = given[:: given.numel() // _LOOKED_AT + 1].float()
    energy = some.square().where(some.isfinite(), 0).mean(dim=0)
    full, g = weight.float(), grads.float()
    sensitive = torch.matmul(g, full).square() + g.square() @ full.square()
    return hottest(energy * sensitive.nan_to_num(0, 0).mean(dim=0), count)


def _with_residuals(hp: torch.Tensor, columns: torch.Tensor, cast: Cast) -> tuple[torch.Tensor, torch.Tensor]:
    """Q(hp)_H and r [R, hot] float32: what `append` writes."""
    scale = scale_of(hp.abs().amax(dim=1, keepdim=True), cast)
    v, fp8 = in_units(hp[:, columns], scale, cast.format), cast.format.dtype
    q = v.to(fp8).float()
    return q * scale, (v - q).to(fp8).float() * scale


def _parts(count: int, each: int) -> Iterator[slice]:
    step = max(_PART // max(each, 1), 1)
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))


def _quantized(
    hp: torch.Tensor, sample: torch.Tensor, picked: torch.Tensor | None, casts: Sequence[Cast]
) -> torch.Tensor:
    """`dequantize(quantize(hp, cast))` of the rows `sample` [m, K] for each cast: [casts, m, K] float32."""
    scales: dict[int, torch.Tensor] = {}
    for integers in (False, True):  # a step of INT8 is no power of two times the scale of e4m3
        alike = [at for at, cast in enumerate(casts) if cast.format.uniform == integers]
        kinds = [(sides_of(casts[at].granularity, hp.shape, transposed=False), casts[at].power_of_two) for at in alike]
        distinct = list(dict.fromkeys(kinds))
        if distinct:
            of = Format.INT8 if integers else Format.E4M3
            by_kind = dict(zip(distinct, sample_scales(hp, sample, picked, distinct, of), strict=True))
            for at, kind in zip(alike, kinds, strict=True):
                scales[at] = _scale_for(casts[at].format, by_kind[kind])
    values = sample.float()
    scaled = values.new_empty(len(casts), *values.shape)
    for at, out in enumerate(scaled):
        torch.div(values, scales[at], out=out)
    for cast_format in dict.fromkeys(cast.format for cast in casts):
        alike = [at for at, cast in enumerate(casts) if cast.format is cast_format]
        for begin, end in _runs(alike):
            run, fmax = scaled[begin:end], cast_format.max
            run.clamp_(-fmax, fmax)
            run.round_() if cast_format.uniform else run.copy_(run.to(cast_format.dtype))
    for at, out in enumerate(scaled):
        out.mul_(scales[at])
    return scaled


def _scale_for(cast_format: Format, scale: torch.Tensor) -> torch.Tensor:
    """From the e4m3 scale, or INT8's own: FMAX of e5m2 is a power of two as large, and scales end at the
    smallest normal."""
    if cast_format is not Format.E5M2:
        return scale
    return (scale * (Format.E4M3.max / cast_format.max)).clamp_min(TINY)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Begin and end of each run of successive ones."""
    begin = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield numbers[begin], numbers[at - 1] + 1
            begin = at


def effects_of(
    changes: Sequence[torch.Tensor],
    predicted: torch.Tensor,
    signed: torch.Tensor | None,
    clusters: torch.Tensor | None = None,
    weighing: torch.Tensor | None = None,
) -> list[list[Effect]]:
    """For each s [m, recipes] of the same samples the effect of each recipe, on the term s^2 / 2.

    `predicted` [m, T]; `signed` [m, T] takes the signs out of s (core/numerics/effect.py `pulls`), where it
    is known. `clusters` [m] int64, from 0 on, names the samples that may be alike; without it all are
    independent. `weighing` [m]: what each counts in every sum, over its mean; without it all count alike.
    A sample whose term is not finite is left out. Waits for the device once, for all of them.
    """
    if not changes:
        return []
    s = torch.stack([found.to(changes[0].device, torch.float64) for found in changes])
    terms = s.square() / 2
    finite = terms.isfinite()
    terms = terms.where(finite, 0)
    weights = finite.transpose(1, 2).double()  # [sites, recipes, m]
    weight = 0.0
    if weighing is not None:
        weight = max(float(weighing.mean()), 1e-300)
        weights = weights * weighing.to(weights) / weight
    by_row = weights.transpose(1, 2)
    sums = [weights.sum(2, keepdim=True)]
    sums += [(by_row * terms.pow(power)).sum(1).unsqueeze(2) for power in (1, 2, 3)]
    alike = weighing is None and clusters is None
    spread = weights.sum(2) if alike else _spread(terms, weights, clusters)
    sums.append(spread.unsqueeze(2))
    sums.append(weights @ predicted.to(s))
    if signed is not None:
        signs = signed.to(s)
        sums += [(by_row * s.where(finite, 0)).transpose(1, 2) @ signs, weights @ signs.square()]
    sizes = [part.shape[2] for part in sums]
    return [[_effect(line, sizes, weight) for line in site] for site in torch.cat(sums, dim=2).tolist()]


def _spread(terms: torch.Tensor, weights: torch.Tensor, clusters: torch.Tensor | None) -> torch.Tensor:
    """[sites, recipes]: of clustered or weighted `terms` [sites, m, recipes] n times what that costs.

    That is the variance of the weighted mean, by clusters of rows where they are named (Liang and Zeger 1986,
    with the factor C / (C - 1)), over that of n independent samples that weigh 1,

        sum_c (sum_i in c w_i (t_i - m))^2 / sum_i w_i (t_i - m)^2

    and at least sum_c W_c^2 / n with W_c the weight of a cluster, n / C where they are of one size: no more
    samples count than there are clusters (Kish's effective number).
    """
    count = weights.sum(2)
    kept = weights.transpose(1, 2)
    mean = (kept * terms).sum(1) / count.clamp_min(1e-300)
    rest = (terms - mean.unsqueeze(1)) * kept
    if clusters is None:
        within = (rest * (terms - mean.unsqueeze(1))).sum(1)
        cost = rest.square().sum(1) / within.where(within > 0, 1.0)
        return count * torch.maximum(cost, weights.square().sum(2) / count.clamp_min(1e-300))
    at, most = clusters.to(terms.device), int(clusters.max()) + 1
    shape = (terms.shape[0], most, terms.shape[2])
    sums = rest.new_zeros(shape).index_add_(1, at, rest)
    sizes = rest.new_zeros(shape).index_add_(1, at, kept)
    number = (sizes > 0).sum(1)
    within = (rest * (terms - mean.unsqueeze(1))).sum(1)
    cost = sums.square().sum(1) / within.where(within > 0, 1.0)
    cost = cost * number / (number - 1).clamp_min(1)
    return count * torch.maximum(cost, sizes.square().sum(1) / count.clamp_min(1e-300))


def _effect(sums: Sequence[float], sizes: Sequence[int], weight: float) -> Effect:
    """An effect from the `sums` of one site and recipe, laid end to end; `sizes` says how many numbers each has."""
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    parts = [tuple(sums[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    (count,), (total,), (squares,), (cubes,), (spread,), probabilities, *shift = parts
    if not count:
        return Effect(count=0, spread=0, total=0.0, squares=0.0, probabilities=())
    pulls, curvatures = shift or ((), ())
    assert math.isfinite(total)
    return Effect(
        count=count if count % 1 else int(count),
        spread=spread,
        total=total,
        squares=squares,
        cubes=cubes,
        probabilities=probabilities,
        pulls=pulls,
        curvatures=curvatures,
        weight=weight,
    )
