"""Times of the sites of a model, from stored measurements: as measured, interpolated, or not at all."""

import math
from collections.abc import Iterable, Mapping, Sequence

from loka.core.error import Estimate, around, exactly
from loka.core.recipe import Gemm
from loka.core.records.scale import Answer, LayerTimes, Origin, SiteTimes
from loka.core.timing import TIE
from loka.graph.flops import site_flops
from loka.nn.linears import is_prediction
from loka.scaling.stored import StoredLayer, StoredTimes, base_of
from loka.scaling.surface import TOGETHER, Shape, Surface, predict
from loka.scaling.trace import SiteGemms

REACH = 2.0
"""Octaves in each side within which a shape of the same kind was measured; beyond, nothing is said. Where
layers were left out, nearly all had another one so near, so of longer ways nobody knows whether intervals
hold."""

_FAR = "far from every measured shape"
_KEPT = "kept in bf16: a prediction layer"
_STACKED = "one of several weights that bf16 multiplies in one launch"
_ODD = "bf16 was measured without padding, which torch.compile adds: compiled, it gains less"

Found = Mapping[Shape, tuple[Estimate, Origin]]


def layer_times(calls: Sequence[SiteGemms], stored: StoredTimes, *, kernels: str) -> tuple[LayerTimes, ...]:
    """Of each call, from what is stored of `kernels`."""
    shapes = list(dict.fromkeys(shape for call in calls for shape in _shapes(call)))
    single = [shape for shape in shapes if shape.kind != TOGETHER]
    bf16 = _found(single, stored.bf16_points(), stored.bf16)
    gains = _found(shapes, stored.gain_points(kernels), stored.gains[kernels])
    raced = {_key(layer): layer for layer in stored.layers}
    return tuple(_layer(call, bf16, gains, raced, kernels) for call in calls)


def _shapes(call: SiteGemms) -> list[Shape]:
    kinds = [gemm.value for gemm in call.gemms]
    return [_shape(call, kind) for kind in (*kinds, *([TOGETHER] if len(kinds) == len(Gemm) else []))]


def _shape(call: SiteGemms, kind: str) -> Shape:
    return Shape(
        kind=kind,
        rows=call.rows,
        in_features=call.in_features,
        out_features=call.out_features,
        weight_dtype="float32" if call.weight_dtype == "float32" else "bfloat16",
    )


def _key(layer: StoredLayer | SiteGemms) -> tuple[object, ...]:
    return layer.rows, layer.in_features, layer.out_features, layer.weight_dtype


def _found(shapes: Sequence[Shape], points: Mapping[Shape, Estimate], surface: Surface) -> Found:
    """Without an entry where no measured shape is within reach."""
    found: dict[Shape, tuple[Estimate, Origin]] = {
        shape: (points[shape], "measured") for shape in shapes if shape in points
    }
    near = [shape for shape in shapes if shape not in found and within_reach(shape, points)]
    for shape, (mean, half) in zip(near, predict(base_of(points, surface), near), strict=True):
        found[shape] = (around(mean, half).mapped(math.exp), "interpolated")
    return found


def within_reach(shape: Shape, points: Iterable[Shape]) -> bool:
    """Whether a shape of its kind was measured, each side of which is within `REACH` octaves."""
    return any(_octaves(shape, other) <= REACH for other in points if other.kind == shape.kind)


def _octaves(one: Shape, other: Shape) -> float:
    return max(abs(math.log2(a / b)) for a, b in zip(one.sides, other.sides, strict=True))


def _layer(
    call: SiteGemms, bf16: Found, gains: Found, raced: Mapping[tuple[object, ...], StoredLayer], kernels: str
) -> LayerTimes:
    """What eight bits give one layer: each of its GEMMs by itself, and all together.

    Args:
        bf16, gains: by shape, microseconds in bf16 and speed-ups in eight bits, and where they come from.
        raced: by what tells layers apart, those whose three GEMMs were raced together.
        kernels: which of the raced speed-ups counts.
    """
    kept = is_prediction(call.out_features)
    singles = {gemm: _shape(call, gemm.value) for gemm in call.gemms}
    known = all(shape in bf16 and (kept or shape in gains) for shape in singles.values())
    speedup: Estimate | None = None
    origin: Origin = "unknown"
    together = gains.get(_shape(call, TOGETHER))
    if known:
        times = {gemm: bf16[shape][0] for gemm, shape in singles.items()}
        apart = {gemm: gains[shape][0] for gemm, shape in singles.items() if shape in gains}
        whole = together[0] if together else None
        same = raced.get(_key(call))
        if kept:
            speedup = exactly(1.0)
        elif same is not None and kernels in same.by_sites and len(singles) == len(Gemm):
            speedup = same.by_sites[kernels]
        else:
            speedup = by_sites(times, apart, whole)
        used = [bf16[shape][1] for shape in singles.values()]
        used += [] if kept else [gains[shape][1] for shape in singles.values()]
        origin = "measured" if set(used) == {"measured"} else "interpolated"
    odd = bool(call.in_features % 8 or call.out_features % 8)
    reasons = {
        _FAR: not known,
        _KEPT: kept and known,
        _STACKED: call.stacked,
        _ODD: odd and speedup is not None and speedup.value > 1,
    }
    sites = {
        gemm.value: _site(shape, bf16.get(shape), gains.get(shape), speedup, together, kept=kept)
        for gemm, shape in singles.items()
    }
    return LayerTimes(
        path=call.path,
        rows=call.rows,
        in_features=call.in_features,
        out_features=call.out_features,
        weight_dtype=call.weight_dtype,
        flops=len(singles) * site_flops(call.rows, call.in_features, call.out_features),
        gemms=sites,
        speedup=speedup,
        origin=origin,
        why="; ".join(reason for reason, holds in reasons.items() if holds),
    )


def by_sites(bf16: Mapping[Gemm, Estimate], gains: Mapping[Gemm, Estimate], together: Estimate | None) -> Estimate:
    """The speed-up of a layer where each GEMM runs in eight bits or bf16, as is faster, or all three in eight
    bits; never below 1. The ends are where all gains lie at theirs."""
    total = sum(time.value for time in bf16.values())

    def at(pick: str) -> float:
        left = sum(time.value / max(getattr(gains[gemm], pick), 1.0) for gemm, time in bf16.items())
        return max(total / left, getattr(together, pick) if together else 1.0)

    return Estimate(at("value"), at("low"), at("high"))


def _site(
    shape: Shape,
    bf16: tuple[Estimate, Origin] | None,
    gain: tuple[Estimate, Origin] | None,
    layer: Estimate | None,
    together: tuple[Estimate, Origin] | None,
    *,
    kept: bool,
) -> SiteTimes:
    m, n, k = shape.sides
    origins = {found[1] for found in (bf16, gain) if found}
    origin: Origin = "unknown"
    if bf16 and gain:
        origin = "measured" if origins == {"measured"} else "interpolated"
    return SiteTimes(
        m=m,
        n=n,
        k=k,
        bf16=bf16[0] if bf16 else None,
        eight=_over(bf16[0], gain[0]) if bf16 and gain else None,
        speedup=gain[0] if gain else None,
        origin=origin,
        helps="no" if kept and layer else _helps(gain, layer, together),
    )


def _over(time: Estimate, gain: Estimate) -> Estimate:
    """time / gain; relative errors of the two are taken for independent."""
    value = time.value / gain.value
    below = math.hypot(math.log(time.value / time.low), math.log(gain.high / gain.value))
    above = math.hypot(math.log(time.high / time.value), math.log(gain.value / gain.low))
    return Estimate(value, value * math.exp(-below), value * math.exp(above))


def _helps(
    gain: tuple[Estimate, Origin] | None, layer: Estimate | None, together: tuple[Estimate, Origin] | None
) -> Answer:
    """By itself, or with the other two GEMMs of its layer; what at best is a tie to a planner is none."""
    if gain is None or layer is None:
        return "unknown"
    ways = [gain[0], *([together[0]] if together else [])]
    if layer.low > 1 and any(way.low > 1 for way in ways):
        return "yes"
    return "perhaps" if layer.high > 1 + TIE and any(way.high > 1 for way in ways) else "no"
