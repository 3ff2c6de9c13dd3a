"""Racing what a plan chose once more, on fresh draws and fresh rounds, against given rivals.

The fastest of 25 was also the luckiest of 25: its time in the report is too good. Here a few
arms race again and all stay to the end, so every comparison has all its rounds. They race at
each site as `measure` times it, and over the three GEMMs of a layer, with the quantization that
they share, as a site runs them in training.
"""

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from loka.core.error import Estimate, exactly
from loka.core.numerics.centring import restore, subtract
from loka.core.progress import Track, untracked
from loka.core.recipe import Gemm
from loka.core.records.gemm_bench import CHOICE, Contest, joined, parted
from loka.core.records.report import HP, Report, SiteReport, site_name
from loka.core.records.stats import LinearStats, Stats
from loka.core.timing import Race, median_interval, time_interleaved
from loka.kernels.gemm.registry import candidate_named
from loka.kernels.quantize.side import new_health
from loka.measurement.operands import Operands, any_columns, rotated_operands, with_weight_cast
from loka.measurement.times.compile_ahead import compile_ahead
from loka.measurement.times.site_times import site_call

Arms = Mapping[str, Mapping[str, str]]
"""Arm -> site "path/gemm" -> "hp" or a candidate; "choice" among the arms."""

Call = Callable[[], Any]


def confirm(
    stats: Stats,
    report: Report,
    *,
    site_arms: Arms,
    layer_arms: Arms,
    device: torch.device,
    rounds: int,
    seed: int,
    done: Mapping[str, Contest] | None = None,
    deadline: float | None = None,
    track: Track | None = None,
    save: Callable[[Mapping[str, Contest]], None] | None = None,
) -> dict[str, Contest]:
    """Contests by site "path/gemm" and by layer path, of the layers in `report`.

    Args:
        site_arms: what each arm runs at a site by itself.
        layer_arms: what each arm runs there when the three GEMMs share quantization.
        rounds: of each race; only one that hp leads clearly may end sooner.
        seed: of the draws; another than the measurement's.
        done: contests of an earlier call, not raced again.
        deadline: of `time.monotonic()`; after it no layer is begun.
        save: called after each layer with everything so far.
    """
    contests = dict(done or {})
    paths = [path for path in stats.layers if path not in contests]
    if device.type == "cuda":
        left = {name: site.problem for name, site in report.sites.items() if site.path in set(paths)}
        names = {arm[name] for arm in (*site_arms.values(), *layer_arms.values()) for name in left}
        compile_ahead(tuple(dict.fromkeys(left.values())), sorted(names), track or untracked)
    for path in track(paths, "confirming", len(paths)) if track else paths:
        if deadline is not None and time.monotonic() >= deadline:
            break
        sites = {gemm: report.sites[site_name(path, gemm)] for gemm in Gemm if site_name(path, gemm) in report.sites}
        try:
            if len(sites) == len(Gemm):
                layer = stats.layers[path]
                stacked = report.model.layers[path].stacked
                contests.update(_layer(path, layer, sites, site_arms, layer_arms, device, rounds, seed, stacked))
            else:
                contests[path] = Contest(arms={}, failures={HP: "not measured"})
        except torch.OutOfMemoryError:
            contests[path] = Contest(arms={}, failures={HP: "the GPU has too little memory"})
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the next layer's operands have other sizes
        if save is not None:
            save(contests)
    return contests


def _layer(
    path: str,
    layer: LinearStats,
    sites: Mapping[Gemm, SiteReport],
    site_arms: Arms,
    layer_arms: Arms,
    device: torch.device,
    rounds: int,
    seed: int,
    stacked: bool,
) -> dict[str, Contest]:
    """The contests of the three sites and, last, of the layer: its presence says all are there."""
    sets = rotated_operands(layer, device=device, seed=seed)
    contests = {}
    for site in sites.values():
        arms = {HP: HP, **{arm: runs[site.name] for arm, runs in site_arms.items()}}
        calls: dict[str, Call] = {}
        for name in arms.values():
            calls[name] = site_call(name, sets, site.problem, kept_weight=layer.kept_weight, stacked=stacked)
        contests[site.name] = _race(arms, calls, device, rounds, seed)
    arms = {HP: HP}
    for arm, runs in layer_arms.items():
        arms[arm] = joined({gemm.value: runs[site.name] for gemm, site in sites.items()})
    calls = {name: layer_call(name, sets) for name in dict.fromkeys(arms.values())}
    if stacked:
        calls = {name: call if name == HP else _copied(call) for name, call in calls.items()}
    contests[path] = _race(arms, calls, device, rounds, seed)
    return contests


def _copied(call: Callable[[], Sequence[torch.Tensor]]) -> Call:
    return lambda: [each.clone() for each in call()]


def layer_call(names: str, sets: Sequence[Operands]) -> Call:
    """Forward and backward of a layer by the candidates of `joined`. hp gets its weight cast for free."""
    from loka.nn.site_ops import layer_pass

    parts = parted(names)
    candidates = (parts[0], parts[0], parts[0]) if len(parts) == 1 else (parts[0], parts[1], parts[2])
    turn = itertools.cycle([with_weight_cast(s) if names == HP else s for s in sets])
    health = new_health(sets[0]["input"].device)
    centred = candidates[0] != HP and candidate_named(candidates[0]).recipe.centred
    hot = any_columns(candidates[0], health.device)
    centre = torch.zeros(sets[0]["input"].shape[1], device=health.device) if centred else None

    def call() -> object:
        operands = next(turn)
        x, weight = operands["input"], operands["weight"]
        if centre is None:
            return layer_pass(x, weight, operands["grad_output"], health, candidates, hot)
        y, dx, dw = layer_pass(subtract(x, centre), weight, operands["grad_output"], health, candidates, hot)
        # With respect to m W^T too: what autograd adds to dW.
        return (restore(y, centre, weight), dx, dw.addr(operands["grad_output"].sum(dim=0).to(dw), centre.to(dw)))

    return call


def _race(arms: Mapping[str, str], calls: Mapping[str, Call], device: torch.device, rounds: int, seed: int) -> Contest:
    # With tie=0 nothing but a lead of hp over everyone is ever decided: the rounds are fixed
    # beforehand, so the intervals are those of a test that nobody stopped when it looked good.
    found = time_interleaved(calls, baseline=HP, device=device, keep=list(calls), tie=0.0, max_rounds=rounds, seed=seed)
    return Contest(
        arms=arms,
        timings=found.timings,
        versus={arm: ratio for arm, name in arms.items() if arm != CHOICE and (ratio := _ratio(found, name, arms))},
        failures=found.failures,
    )


def _ratio(found: Race, name: str, arms: Mapping[str, str]) -> Estimate | None:
    """The time of `name` over that of the choice, in the rounds of both; None where either has no times."""
    choice = arms[CHOICE]
    if name == choice and name in found.samples:
        return exactly(1.0)
    if name not in found.samples or choice not in found.samples:
        return None
    paired = zip(found.samples[name], found.samples[choice], strict=True)
    return median_interval([math.log(theirs / ours) for theirs, ours in paired]).mapped(math.exp)
