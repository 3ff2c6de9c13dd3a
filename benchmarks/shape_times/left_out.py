"""How far predictions can be trusted: leaving out each layer, then each published model as a whole."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from loka.core.error import Estimate
from loka.core.recipe import Gemm
from loka.core.records.gemm_bench import GemmBench
from loka.scaling.forecast import layer_times
from loka.scaling.stored import StoredTimes, base_of
from loka.scaling.surface import Shape, Surface, left_out
from loka.scaling.trace import SiteGemms


def tell(times: StoredTimes, races: GemmBench) -> None:
    """Errors as factors, and the share of 95 % intervals that held."""
    print("left out | quantity | shapes | median error | 95 % of errors below | held | median half-width")
    models = model_of(times, races)
    quantities: dict[str, tuple[Mapping[Shape, Estimate], Surface]] = {
        "bf16 us": (times.bf16_points(), times.bf16)
    }
    for kernels, surface in times.gains.items():
        quantities[f"gain, {kernels}"] = times.gain_points(kernels), surface
    for name, (points, surface) in quantities.items():
        _line("layer", name, points, surface, [shape.layer for shape in points])
        _line("model", name, points, surface, [models[shape.layer] for shape in points])
    print("model | layers | known | measured by sites | predicted without the model")
    held = [told for model in dict.fromkeys(models.values()) if (told := _model(model, times, races, models))]
    print(f"{sum(held)} of {len(held)} models lie in their intervals")


def model_of(times: StoredTimes, races: GemmBench) -> dict[Hashable, str]:
    """Layer -> the first model that has it; layers of a step with float32 weights are Wukong 2 GF's."""
    found: dict[Hashable, str] = {layer.shape("output").layer: "Wukong-2GF" for layer in times.layers}
    for layer in races.layers.values():
        found[layer.rows, layer.in_features, layer.out_features] = layer.uses[0].model
    return found


def _line(
    out: str, name: str, points: Mapping[Shape, Estimate], surface: Surface, groups: Sequence[Hashable]
) -> None:
    found = left_out(base_of(points, surface), groups)
    errors = [
        abs(math.log(point.value) - mean) for point, (mean, _) in zip(points.values(), found, strict=True)
    ]
    held = sum(error <= half for error, (_, half) in zip(errors, found, strict=True)) / len(errors)
    halves, ordered = sorted(half for _, half in found), sorted(errors)
    middle, late = ordered[len(ordered) // 2], ordered[int(0.95 * len(ordered))]
    print(
        f"{out} | {name} | {len(points)} | {math.exp(middle):.3f}x | {math.exp(late):.3f}x | {held:.3f} "
        f"| {math.exp(halves[len(halves) // 2]):.3f}x"
    )


def _model(model: str, times: StoredTimes, races: GemmBench, models: Mapping[Hashable, str]) -> bool | None:
    """All linear layers of a model, from measurements of others; None where none is within reach."""
    mine = {
        (layer.rows, layer.in_features, layer.out_features): sum(
            u.count for u in layer.uses if u.model == model
        )
        for layer in races.layers.values()
        if any(use.model == model for use in layer.uses)
    }
    # Float32 twins of its layers go too: they are the same shapes.
    rest = replace(
        times,
        layers=tuple(
            layer
            for layer in times.layers
            if layer.shape("output").layer not in mine and models[layer.shape("output").layer] != model
        ),
    )
    calls = [
        SiteGemms(
            path=str(shape),
            rows=shape[0],
            in_features=shape[1],
            out_features=shape[2],
            weight_dtype="bfloat16",
            gemms=tuple(Gemm),
            stacked=False,
        )
        for shape in mine
    ]
    counts = list(mine.values())
    told = layer_times(calls, rest, kernels="all")
    actual = layer_times(calls, times, kernels="all")
    known = [place for place, layer in enumerate(told) if layer.speedup]
    if not known:
        print(f"{model} | {len(calls)} | 0 | - | -")
        return None
    measured = _total([actual[place] for place in known], [counts[place] for place in known])
    predicted = _total([told[place] for place in known], [counts[place] for place in known])
    print(f"{model} | {len(calls)} | {len(known)} | {measured.value:.3f} | {predicted}")
    return predicted.low - 5e-4 <= measured.value <= predicted.high + 5e-4  # 1 is kept to four digits


def _total(layers: Sequence, counts: Sequence[int]) -> Estimate:
    weights = [layer.bf16.value * count for layer, count in zip(layers, counts, strict=True)]
    ends = [
        sum(w / getattr(layer.speedup, end) for w, layer in zip(weights, layers, strict=True))
        for end in ("value", "low", "high")
    ]
    return Estimate(*(sum(weights) / end for end in ends))
