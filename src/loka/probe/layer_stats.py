"""The statistics of a layer that a running probe keeps, and how they become a record and come back from one."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch

from loka.core.exceptions import LokaError
from loka.core.numerics.centring import centre_of
from loka.core.numerics.effect import Effect
from loka.core.records.stats import OPERANDS, Distribution, LinearStats, Stats
from loka.core.signature import ModelSignature
from loka.probe.refusals import refuse_other_model
from loka.statistics import gaussian, matrix_normal
from loka.statistics.depths import Depths, depths_of, with_depths
from loka.statistics.effect_depths import NOTHING, PREFIX, Learnt, Tables
from loka.statistics.sample_coherence import Picked, Samples, merge_samples, samples_in, samples_of, with_samples
from loka.statistics.tails import (
    Cross,
    Tails,
    cross_in,
    cross_of,
    merge_cross,
    merge_tails,
    tails_in,
    tails_of,
    with_tails,
)

_SEEN = ("order", "rows", "calls", "dtype", "weight_dtype", "needs_input_grad", "needs_weight_grad", "over_tokens",
         "reads")  # fmt: skip


@dataclass
class RunningLayerStats:
    """The statistics of one layer so far: the streams of its three operands.

    `depths` are the operands' depth histograms (statistics/depths.py), by operand; `tails` and `cross` what
    draws keep beside the moments (statistics/tails.py), and `samples` where these have several rows
    (statistics/sample_coherence.py).
    """

    order: int
    rows: int = 0
    calls: int = 0
    dtype: str = ""
    weight_dtype: str = ""
    needs_input_grad: bool = False
    needs_weight_grad: bool = False
    over_tokens: bool = False
    reads: tuple[str, ...] = ()
    input: gaussian.Gaussian | None = None
    weight: matrix_normal.MatrixNormal | None = None
    grad_output: gaussian.Gaussian | None = None
    depths: dict[str, Depths] = field(default_factory=dict)
    tails: dict[str, Tails] = field(default_factory=dict)
    cross: Cross | None = None
    samples: Samples | None = None


def add_tails(layer: RunningLayerStats, operand: str, rows: torch.Tensor, known: torch.Tensor | None = None) -> None:
    """Of sampled `rows` [m, K]; `known` are the input's values in the same rows of a gradient."""
    found = tails_of(rows)
    before = layer.tails.get(operand)
    layer.tails[operand] = found if before is None else merge_tails(before, found)
    if known is not None:
        cross = cross_of(known, rows)
        layer.cross = cross if layer.cross is None else merge_cross(layer.cross, cross)


def add_samples(layer: RunningLayerStats, picked: Picked | None, grads: torch.Tensor) -> None:
    """Of the samples that were `picked` in a call, by its gradient [rows, N]."""
    if picked is not None:
        found = samples_of(picked.values, grads[picked.rows], all_rows=picked.all_rows)
        layer.samples = found if layer.samples is None else merge_samples(layer.samples, found)


@dataclass(frozen=True)
class Site:
    """A layer with what probe/model_effects/sensitivity.py learnt of it; `no_effect` also says why effects
    are old."""

    stats: RunningLayerStats
    effects: dict[str, Effect]
    tables: Tables
    no_effect: str


def learnt_so_far(layer: RunningLayerStats) -> Learnt:
    """What centred recipes would take off its input."""
    found = layer.input
    return NOTHING if found is None else Learnt(centre_of(found.mean, found.square / max(found.count, 1)))


def with_sites(stats: Stats, sites: Mapping[str, Site], not_clicks: Callable[[], str]) -> Stats:
    """`stats` with the records of `sites` as its layers, on the CPU; those are no longer skipped. `not_clicks`: what
    the loss of training says of its labels, which a thread that saves asks for by itself."""
    layers = {
        path: with_effects(to_record(site.stats), site.effects, site.tables, site.no_effect)
        for path, site in sites.items()
    }
    skipped = {path: reason for path, reason in stats.skipped.items() if path not in layers}
    return replace(stats, layers=layers, skipped=skipped, not_clicks=not_clicks())


def bytes_of(sites: Iterable[Site]) -> dict[str, int]:
    """How many bytes the tensors take, by operand, and for "effects"."""
    total = dict.fromkeys((*OPERANDS, "effects"), 0)
    for site in sites:
        for operand in OPERANDS:
            layer = site.stats
            kept = (getattr(layer, operand), layer.depths.get(operand), layer.tails.get(operand))
            total[operand] += sum(map(_bytes, kept))
        total["grad_output"] += _bytes(site.stats.cross) + _bytes(site.stats.samples)
        total["effects"] += _bytes(site.tables)
    return total


def _bytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_bytes, value.values()))
    if is_dataclass(value):
        return sum(_bytes(getattr(value, field.name)) for field in fields(value))
    return 0


def refuse(stats: Stats, model: ModelSignature, *, full_covariance: int) -> None:
    """Raises PlanMismatch or LokaError where a probe of `model` cannot continue from `stats`."""
    refuse_other_model(stats, model)
    for path, layer in stats.layers.items():
        if layer.kept_weight:
            raise LokaError(
                "these statistics are for inference, and a Probe goes on with training",
                way_out="resume from what stats.for_inference() was called on",
            )
        for operand, found in layer.operands.items():
            kept_in_full = "scatter" in found.tensors
            if found.kind == gaussian.KIND and kept_in_full != (found.tensors["mean"].shape[0] <= full_covariance):
                raise LokaError(
                    f"{path}, {operand}: these statistics were kept with another full_covariance "
                    f"than {full_covariance}",
                    way_out="resume with the value of the first run",
                )


def to_record(layer: RunningLayerStats) -> LinearStats:
    """On the CPU, without effects."""
    operands = {}
    if layer.input is not None:
        operands["input"] = _with_tails(layer, "input", gaussian.to_distribution(layer.input))
    if layer.weight is not None:
        operands["weight"] = matrix_normal.to_distribution(layer.weight)
    if layer.grad_output is not None:
        found = gaussian.to_distribution(layer.grad_output)
        found = _with_tails(layer, "grad_output", found, layer.cross)
        operands["grad_output"] = with_samples(found, layer.samples)
    return LinearStats(
        **_seen(layer),
        operands={
            name: with_depths(distribution, layer.depths.get(name, {})).to("cpu")
            for name, distribution in operands.items()
        },
    )


def _with_tails(
    layer: RunningLayerStats, operand: str, distribution: Distribution, cross: Cross | None = None
) -> Distribution:
    tails = layer.tails.get(operand)
    return distribution if tails is None else with_tails(distribution, tails, cross)


def with_effects(layer: LinearStats, effects: dict[str, Effect], tables: Tables, no_effect: str) -> LinearStats:
    """`layer` with what probe/model_effects/sensitivity.py learnt of it."""
    operands = dict(layer.operands)
    for name, table in tables.items():
        operand, _, tensor = name.partition("/")
        tensors = {**operands[operand].tensors, tensor: table.cpu()}
        operands[operand] = replace(operands[operand], tensors=tensors)
    return replace(layer, operands=operands, effects=effects, no_effect=no_effect)


def without_effects(layer: LinearStats, reason: str) -> LinearStats:
    """`layer` without effects and their histograms; `reason` says why."""
    operands = {
        name: replace(d, tensors={n: t for n, t in d.tensors.items() if not n.startswith(PREFIX)})
        for name, d in layer.operands.items()
    }
    return replace(layer, operands=operands, effects={}, no_effect=reason, effects_by_part={})


def _seen(layer: RunningLayerStats | LinearStats) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in _SEEN}


def from_record(layer: LinearStats, device: torch.device) -> RunningLayerStats:
    """To go on from; effects are restored by their owner."""
    operands = {name: found.to(device) for name, found in layer.operands.items()}
    return RunningLayerStats(
        **_seen(layer),
        input=gaussian.from_distribution(operands["input"]) if "input" in operands else None,
        weight=matrix_normal.from_distribution(operands["weight"]) if "weight" in operands else None,
        grad_output=(gaussian.from_distribution(operands["grad_output"]) if "grad_output" in operands else None),
        depths={name: depths_of(found) for name, found in operands.items()},
        tails={name: tails for name, found in operands.items() if (tails := tails_in(found)) is not None},
        cross=cross_in(operands["grad_output"]) if "grad_output" in operands else None,
        samples=samples_in(operands["grad_output"]) if "grad_output" in operands else None,
    )
