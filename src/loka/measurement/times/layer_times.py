"""Timing a layer of a report: asks the cache first, and says what stays unfinished."""

import functools
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from loka.compiler.joint_sites import ARMS
from loka.core.device import Fingerprint
from loka.core.error import Estimate
from loka.core.recipe import Gemm
from loka.core.records.report import HP, Measurement, SiteReport
from loka.core.records.stats import LinearStats
from loka.core.signature import LinearShape
from loka.core.storage.codec import encode
from loka.measurement.cache import TimesCache, sources_digest
from loka.measurement.operands import Operands, rotated_operands
from loka.measurement.settings import Settings
from loka.measurement.times.hp_call import is_odd
from loka.measurement.times.quantize_once_savings import QuantizeOnceSavings, shared_casts, time_quantize_once
from loka.measurement.times.region_times import region_key, time_region
from loka.measurement.times.site_times import SiteTimes, rivals_of, time_site

NOT_TIMED = "not timed"
CUT_SHORT = "timing cut short"
NO_MEMORY = "not timed: the GPU has too little memory"

Savings = Mapping[str, Mapping[str, Estimate]]


@dataclass(frozen=True, kw_only=True)
class Timer:
    """What timing a layer needs besides the layer. `deadline` is of `time.monotonic()`.

    `notes` receives what went wrong without stopping anything.
    """

    machine: Fingerprint
    device: torch.device
    settings: Settings
    candidates: tuple[str, ...]
    cache: TimesCache
    deadline: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline


def time_layer(
    layer: LinearStats, sites: Mapping[Gemm, SiteReport], savings: Savings | None, timer: Timer, *, stacked: bool
) -> tuple[dict[Gemm, SiteReport], Savings | None]:
    """Times the unfinished sites of a layer, and `savings` where it is None; gives back both.

    Runs out of memory or of time without raising: `SiteReport.unfinished` says so, and the
    savings stay None. `stacked`: as of `time_site`.
    """
    operands = functools.cache(
        functools.partial(rotated_operands, layer, device=timer.device, seed=timer.settings.seed)
    )
    timed = {
        gemm: _time_site(site, layer, operands, timer, stacked) if site.unfinished else site
        for gemm, site in sites.items()
    }
    if savings is None and not timer.late and not any(site.unfinished for site in timed.values()):
        savings = _time_quantize_once(timed, layer, operands, timer)
    return timed, savings


def cell_key(
    layer: LinearStats, shape: LinearShape, timer: Timer, arms: Collection[str], *, chained: bool
) -> dict[str, Any]:
    """Under which the cache keeps a layer's times in regions; equal for layers that take equally long."""
    return {**_key(layer, timer), **region_key(layer, shape, arms, chained=chained), "stacked": shape.stacked}


def time_in_region(
    layer: LinearStats, shape: LinearShape, timer: Timer, arms: Collection[str] = tuple(ARMS), *, chained: bool = False
) -> Mapping[str, Measurement] | None:
    """By "hp" and the `arms` in regions; None where it is too late, or there is too little memory."""
    key = cell_key(layer, shape, timer, arms, chained=chained)
    known = timer.cache.get(key, Mapping[str, Measurement])
    if known is not None or timer.late:
        return known
    try:
        found = time_region(
            layer,
            shape,
            device=timer.device,
            settings=timer.settings,
            deadline=timer.deadline,
            arms=arms,
            chained=chained,
        )
    except torch.OutOfMemoryError:
        timer.notes.append(f"a layer of {shape.in_features} x {shape.out_features} in a region: {NO_MEMORY}")
        return None
    if found is not None:
        timer.cache.put(key, found)
    return found


def _time_site(
    site: SiteReport, layer: LinearStats, operands: Callable[[], list[Operands]], timer: Timer, stacked: bool
) -> SiteReport:
    """The site with times of every candidate that can run, out of the cache or a race.

    Where time or memory ran out, `unfinished` says so. `operands` makes them, and is not called for what is cached.
    """
    # An earlier attempt, cut short, may have pinned an algorithm: search again.
    measured = {_asked(name, timer): m for name, m in site.measurements.items()}
    names = [name for name, m in measured.items() if not m.unsupported]
    problem = encode(site.problem)
    key = {**_key(layer, timer), "problem": problem, "candidates": sorted(names), "stacked": stacked}
    if is_odd(site.problem):  # times of before know bf16 without padding alone
        key["hp"] = "padded where that is faster"
    times = timer.cache.get(key, SiteTimes)
    if times is None:
        if timer.late:
            return site
        try:
            times = time_site(
                operands(),
                site.problem,
                names,
                device=timer.device,
                settings=timer.settings,
                rivals=rivals_of({name: measured[name].errors for name in names}),
                deadline=timer.deadline,
                kept_weight=layer.kept_weight,
                stacked=stacked,
            )
        except torch.OutOfMemoryError:
            return replace(site, unfinished=NO_MEMORY)
        if not times.cut_short and not _short_of_memory(times.failures):
            timer.cache.put(key, times)
    return _with_times(site, measured, times)


def _with_times(site: SiteReport, measured: Mapping[str, Measurement], times: SiteTimes) -> SiteReport:
    """The site with `times` in what was `measured` before, by candidate; a pinned algorithm goes by its own name."""
    measurements: dict[str, Measurement] = {}
    for name, found in measured.items():
        actual = times.pinned.get(name, name)
        if name in times.failures and not _short_of_memory({name: times.failures[name]}):
            found = Measurement(unsupported=f"cannot be timed: {times.failures[name]}")
        elif actual in times.timings:
            timing = times.timings[actual]
            found = replace(found, microseconds=timing.microseconds, speedup=timing.speedup, rounds=timing.rounds)
        measurements[actual] = found
    unfinished = CUT_SHORT if times.cut_short else None
    if _short_of_memory(times.failures):  # says nothing about the kernel: it is tried again
        unfinished = NO_MEMORY
    return replace(site, measurements=measurements, unfinished=unfinished)


def _asked(name: str, timer: Timer) -> str:
    """The candidate that was asked for: "kernel:recipe" of "kernel:recipe@3", a pinned algorithm of it."""
    return name if name == HP or name in timer.candidates else name.partition("@")[0]


def _time_quantize_once(
    sites: Mapping[Gemm, SiteReport], layer: LinearStats, operands: Callable[[], list[Operands]], timer: Timer
) -> Savings | None:
    """What is saved by quantizing a tensor once for two GEMMs; None where time or memory ran out."""
    problems = {gemm: site.problem for gemm, site in sites.items()}
    names = {gemm: [name for name, m in site.measurements.items() if not m.unsupported] for gemm, site in sites.items()}
    wanted = {
        tensor: [{cast.name: list(sides) for cast, sides in casts.items()} for casts in both]
        for tensor, both in shared_casts(problems, names).items()
    }
    if not wanted:
        return {}
    sides = [encode(problem) for problem in problems.values()]
    key = {**_key(layer, timer), "sharing": wanted, "problems": sides}
    times = timer.cache.get(key, QuantizeOnceSavings)
    if times is None:
        try:
            times = time_quantize_once(
                operands(), problems, names, device=timer.device, settings=timer.settings, deadline=timer.deadline
            )
        except torch.OutOfMemoryError:
            return None
        if times.cut_short:
            return None
        if not _short_of_memory(times.failures):
            timer.cache.put(key, times)
    path = next(iter(sites.values())).path
    timer.notes.extend(f"{path}: quantizing {what} failed: {why}" for what, why in times.failures.items())
    return times.saved


def _key(layer: LinearStats, timer: Timer) -> dict[str, Any]:
    """What every time in the cache depends on, beside what was timed."""
    settings = timer.settings
    return {
        "machine": encode(timer.machine),
        "sources": sources_digest(),
        "rounds": [settings.max_rounds, settings.search_rounds, settings.quantize_once_rounds],
        "tie": settings.tie,
        "seed": settings.seed,
        "dtype": layer.dtype,
        "weight_dtype": layer.weight_dtype,
        **({"kept_weight": True} if layer.kept_weight else {}),
    }


def _short_of_memory(failures: Mapping[str, str]) -> bool:
    """Another time the GPU may have more to give."""
    return any("OutOfMemory" in reason for reason in failures.values())
