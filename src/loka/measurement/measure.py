"""The offline half of Probe: error and time of every candidate at every site.

Of each layer the errors (measurement/errors.py); on a GPU then the times of its sites
(measurement/times/site_times.py) and what shared quantization saves
(measurement/times/quantize_once_savings.py). The largest first (measurement/queue.py), until everything is
done or the time is up. The report is saved on the way, and measuring again goes on with what is missing. Who
asks first where FP8 is safe measures errors only.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from loka.compiler.joint_sites import ARMS
from loka.core.device import default_device, device_named, fingerprint, has_graphs
from loka.core.error import Estimate
from loka.core.exceptions import LokaError, first_line, require_kind
from loka.core.problem import Problem
from loka.core.progress import Track, untracked
from loka.core.recipe import Gemm
from loka.core.records.report import HP, REGION_INT8, Measurement, Report, SiteReport, site_name
from loka.core.records.stats import LinearStats, Stats
from loka.core.storage.alone import alone_with
from loka.core.storage.codec import encode
from loka.core.storage.files import canonical
from loka.core.timing import is_broken
from loka.kernels.gemm.registry import all_candidates, candidate_named
from loka.measurement.cache import TimesCache, sources_digest
from loka.measurement.errors import draw_errors
from loka.measurement.operands import hot_of_input
from loka.measurement.predicted_kl import REGION_RECIPES, predicted_kl_by_part, region_kl, tasks_together
from loka.measurement.queue import jobs_of
from loka.measurement.resume import ERRORS_ONLY, continue_from
from loka.measurement.settings import Settings
from loka.measurement.sites import gemms_of, problem_of
from loka.measurement.times.compile_ahead import compile_ahead
from loka.measurement.times.layer_times import NOT_TIMED, Timer, cell_key, time_in_region, time_layer
from loka.measurement.times.region_ahead import Cell, compile_regions_ahead
from loka.measurement.times.region_times import unfit
from loka.statistics.effect_depths import centre_of_input

_UNTIMED = "nothing was timed, as errors only were asked for; measure again without that to time"
_KEPT = "weights are quantized once, as loka.serve keeps them; a converted model takes longer in each call"
_SAVING_SHARE = 20  # saving a large report may take a twentieth of the time


def measure(
    stats: Stats,
    *,
    device: torch.device | str | None = None,
    candidates: Sequence[str] | None = None,
    settings: Settings | None = None,
    errors_only: bool = False,
    out: Path | str | None = None,
    cache: Path | str | None = None,
    time_limit: float | None = None,
    track: Track | None = None,
) -> Report:
    """Measures every candidate at every site of `stats`.

    Args:
        stats: from `Probe.stats()` or `Stats.load`.
        device: where to measure; the GPU if there is one. Times are taken on GPUs only.
        candidates: names to measure; by default all but those measured on request only
            (`Candidate.on_request`), without emulation where a GPU is used.
        settings: how finely.
        errors_only: no times, on a GPU either. Such a report is complete, and `plan` decides by errors.
        out: report file, written as layers are done. If it holds an unfinished measurement of
            the same statistics on the same machine, that one is continued: one of errors only gets
            its times when they are asked for, and one that was to have times keeps those it has.
        cache: folder of times measured before, on this machine and with these kernels.
        time_limit: seconds after which no further layer is begun, and a race under way ends
            after its batch. `Report.notes` says what is missing; call again to go on.
        track: wraps the loops over what is to do, for a progress bar.

    Raises:
        UnknownName: a candidate that does not exist.
        LokaError: no step was sampled, so nothing was learnt; a time limit below 0, or nan; a GPU that torch does
            not see.
        InUse: another process measures into `out`.
    """
    require_kind(stats, Stats, "stats", way_out="probe.stats() of a Probe, or loka.Stats.load(folder)")
    if not stats.layers:
        raise LokaError(
            "these statistics hold no layer to measure",
            why=[f"{path}: {reason}" for path, reason in stats.skipped.items()],
            way_out="probe a step with gradients enabled, of layers whose weights are parameters (docs/sites.md)",
        )
    if time_limit is not None and not time_limit >= 0:
        raise LokaError(f"time_limit is {time_limit}; seconds, 0 or more", way_out="leave it out for no limit")
    deadline = None if time_limit is None else time.monotonic() + time_limit
    device = device_named(default_device() if device is None else device, f"device={device}")
    settings = settings or Settings()
    names = _candidates(candidates, device)
    timed = has_graphs(device) and not errors_only
    untimed = {ERRORS_ONLY: True} if errors_only and has_graphs(device) else {}
    report = Report(
        model=stats.model,
        machine=fingerprint(device),
        stats_digest=stats.digest(),
        settings={**encode(settings), "candidates": list(names), "sources": sources_digest(), **untimed},
        sites={},
        skipped=dict(stats.skipped),
        coverage=stats.coverage,
        final_rate=stats.final_rate,
        no_effect={path: layer.no_effect for path, layer in stats.layers.items() if layer.no_effect},
        parts=dict(stats.parts),
        reads={path: layer.reads for path, layer in stats.layers.items() if layer.reads},
        not_clicks=stats.not_clicks,
        alike=dict(stats.alike),
        complete=False,
    )
    path = Path(out) if out is not None else None
    with contextlib.nullcontext() if path is None else alone_with(path, "measuring into"):
        if path is not None:
            report = _with_region_kl(continue_from(path, report), stats)
        timer = Timer(
            machine=report.machine,
            device=device,
            settings=settings,
            candidates=names,
            cache=TimesCache(Path(cache) if cache is not None else None),
            deadline=deadline,
        )
        work = _Work(stats=stats, timer=timer, time_limit=time_limit, out=path, report=report)
        try:
            jobs = jobs_of(stats, timed=timed)
            if timed:
                _compile_ahead(work, track or untracked)
                _compile_regions_ahead(work, [*dict.fromkeys(job.path for job in jobs)], track or untracked)
            for job in (track or untracked)(jobs, "measuring", len(jobs)):
                _DO[job.kind](work, job.path)
        finally:
            work.save(now=True)
    return work.report


def _candidates(names: Sequence[str] | None, device: torch.device) -> tuple[str, ...]:
    if isinstance(names, str):
        raise LokaError(f"candidates is {names!r}; it must be a list of names", way_out=f"candidates=[{names!r}]")
    if names is not None:
        return tuple(candidate_named(name).name for name in names if name != HP)
    emulate = device.type == "cpu"
    return tuple(c.name for c in all_candidates() if not c.on_request and (emulate or not c.kernel.emulates))


@dataclass(kw_only=True)
class _Work:
    stats: Stats
    timer: Timer
    time_limit: float | None
    out: Path | None
    report: Report
    _saved: float = field(default=-float("inf"))
    _seconds: float = 0.0

    def save(self, *, now: bool = False) -> None:
        """Saves, unless the last time was a moment ago: reports of a thousand layers take a second."""
        began = time.monotonic()
        if self.out is None and not now:
            return
        if not now and began - self._saved < _SAVING_SHARE * self._seconds:
            return
        self.report = self._noted()
        if self.out is not None:
            self.report.save(self.out)
        self._saved = time.monotonic()
        self._seconds = self._saved - began

    @property
    def wants_times(self) -> bool:
        return has_graphs(self.timer.device) and not self.report.settings.get(ERRORS_ONLY)

    def _noted(self) -> Report:
        report = self.report
        missing: dict[str, list[str]] = {}
        ordered: dict[str, SiteReport] = {}
        for path, layer in self.stats.layers.items():
            gemms, _ = gemms_of(path, layer)
            sites = [site_name(path, gemm) for gemm in gemms]
            ordered.update((name, report.sites[name]) for name in sites if name in report.sites)
            unmeasured = [name for name in sites if name not in report.sites]
            if unmeasured:
                missing.setdefault("not measured", []).extend(unmeasured)
            for name in sites:
                if name in report.sites and (reason := report.sites[name].unfinished):
                    missing.setdefault(reason, []).append(name)
            if self.wants_times and sites and path not in report.quantize_once_savings:
                missing.setdefault("shared quantization not timed", []).append(path)
            if self.wants_times and sites and _untimed_in_regions(self, path):
                missing.setdefault("not timed in a region", []).append(path)
        notes = [f"{reason}: {', '.join(where)}" for reason, where in missing.items()]
        if missing and self.timer.late:
            notes.insert(0, f"the time limit of {self.time_limit:g} s was reached; measure again to go on")
        if any(layer.kept_weight for layer in self.stats.layers.values()):
            notes.append(_KEPT)
        notes += [_UNTIMED] if self.report.settings.get(ERRORS_ONLY) else []
        notes += [*dict.fromkeys([*self.timer.notes, *self.timer.cache.notes])]
        notes += tasks_together(self.stats)
        notes += [f"{path}: {rows}" for path, rows in self.stats.left_out().items()]
        return replace(report, sites=ordered, notes=tuple(notes), complete=not missing)


def _compile_ahead(work: _Work, track: Track) -> None:
    problems: dict[Problem, None] = {}
    for path, layer in work.stats.layers.items():
        for gemm in gemms_of(path, layer)[0]:
            site = work.report.sites.get(site_name(path, gemm))
            if site is None or site.unfinished:
                problems[problem_of(path, layer, work.report, gemm)] = None
                drawn = replace(layer, rows=min(layer.rows, work.timer.settings.rows))
                problems[problem_of(path, drawn, work.report, gemm)] = None
    compile_ahead(tuple(problems), work.timer.candidates, track)


def _compile_regions_ahead(work: _Work, paths: list[str], track: Track) -> None:
    timer, cells = work.timer, dict[bytes, Cell]()
    for path in paths:
        layer, shape, arms = work.stats.layers[path], work.report.model.layers[path], _arms(work, path)
        for chained in _untimed_in_regions(work, path):
            key = cell_key(layer, shape, timer, arms, chained=chained)
            if not timer.cache.get(key, Mapping[str, Measurement]) and unfit(layer, shape) is None:
                cells.setdefault(canonical(key), (layer, shape, arms, chained))
    draws = map(functools.partial(_draw, work), paths)
    timer.notes.extend(compile_regions_ahead([*cells.values()], timer.device, timer.deadline, track, draws))


def _draw(work: _Work, path: str) -> None:
    if work.timer.late:
        return
    report, layer = work.report, work.stats.layers[path]
    sites, skipped = _draw_layer(path, layer, report, work.timer)
    if work.wants_times:
        sites = {name: replace(site, unfinished=NOT_TIMED) for name, site in sites.items()}
    work.report = replace(report, sites={**report.sites, **sites}, skipped={**report.skipped, **skipped})
    if not sites:
        return
    if any(candidate_named(name).recipe.centred for name in work.timer.candidates):
        centre = tuple(centre_of_input(layer).tolist())
        if any(centre):
            work.report = replace(work.report, centres={**work.report.centres, path: centre})
    known = {name: hot_of_input(layer, name) for name in work.timer.candidates}
    hot = {candidate_named(n).recipe.name: tuple(c.tolist()) for n, c in known.items() if c is not None}
    if hot:
        work.report = replace(work.report, hot_columns={**work.report.hot_columns, path: hot})
    work.save()


def _draw_layer(
    path: str, layer: LinearStats, report: Report, timer: Timer
) -> tuple[dict[str, SiteReport], dict[str, str]]:
    gemms, skipped = gemms_of(path, layer)
    gemms = [gemm for gemm in gemms if site_name(path, gemm) not in report.sites]
    if not gemms:
        return {}, skipped
    problems = {gemm: problem_of(path, layer, report, gemm) for gemm in gemms}
    runnable: dict[Gemm, list[str]] = {}
    refused: dict[Gemm, dict[str, str]] = {}
    for gemm, problem in problems.items():
        reasons = {
            name: _no_difference(name, layer) or _unsupported(name, problem, timer.device) for name in timer.candidates
        }
        runnable[gemm] = [HP, *(name for name, reason in reasons.items() if reason is None)]
        refused[gemm] = {name: reason for name, reason in reasons.items() if reason is not None}
    drawn = draw_errors(layer, problems, runnable, device=timer.device, settings=timer.settings)
    sites = {}
    for gemm, problem in problems.items():
        measurements = {
            name: Measurement(errors=found, kl_by_part=_by_part(layer, gemm, name))
            for name, found in drawn.errors[gemm].items()
        }
        for name, reason in {**refused[gemm], **drawn.failures[gemm]}.items():
            measurements[name] = Measurement(unsupported=reason)
        site = SiteReport(path=path, problem=problem, measurements=measurements)
        sites[site.name] = _site_with_region_kl(site, layer)
    return sites, skipped


def _with_region_kl(report: Report, stats: Stats) -> Report:
    """One of an earlier version has none, or that of another recipe."""
    sites = {name: _site_with_region_kl(site, stats.layers[site.path]) for name, site in report.sites.items()}
    return replace(report, sites=sites)


def _site_with_region_kl(site: SiteReport, layer: LinearStats) -> SiteReport:
    if site.problem.gemm is not Gemm.OUTPUT:
        return site
    raced = replace(site, region_kl={})
    return replace(raced, region_kl=region_kl(layer, [r for r in REGION_RECIPES if not raced.kl_of_recipe(r)]))


def _by_part(layer: LinearStats, gemm: Gemm, name: str) -> dict[str, Estimate]:
    if gemm is not Gemm.OUTPUT or name == HP:
        return {}
    return predicted_kl_by_part(layer, candidate_named(name).recipe)


def _no_difference(name: str, layer: LinearStats) -> str | None:
    """Why a centred or hot candidate is no other than the one without, at this layer; None where it is."""
    recipe = candidate_named(name).recipe
    if recipe.centred and not bool(centre_of_input(layer).any()):
        return "no column's mean exceeds half its standard deviation: there is nothing to centre"
    if recipe.hot and hot_of_input(layer, name) is None:
        return "which columns are hot is not known: no effect on KL/H was probed"
    return None


def _unsupported(name: str, problem: Problem, device: torch.device) -> str | None:
    candidate = candidate_named(name)
    reason = candidate.unsupported(problem)
    if reason is not None or candidate.kernel.emulates:
        return reason
    evidence = _self_check(name, problem.gemm, device)
    return f"self-check: {evidence}" if evidence else None


def _self_check(name: str, gemm: Gemm, device: torch.device) -> str | None:
    from loka.kernels.gemm.self_check import self_check

    try:
        evidence = self_check(name, gemm=gemm, device=device)
    except AssertionError as error:  # it knows no problem of this candidate, which must not pass unchecked
        return first_line(error)
    if evidence and is_broken(device):
        raise RuntimeError(f"CUDA is unusable after the self-check of {name} for {gemm}: {evidence}")
    return evidence


def _time(work: _Work, path: str) -> None:
    """Also when it is late: what another layer of the shape took is known."""
    layer, report = work.stats.layers[path], work.report
    sites = {
        gemm: report.sites[site_name(path, gemm)]
        for gemm in gemms_of(path, layer)[0]
        if site_name(path, gemm) in report.sites
    }
    savings = report.quantize_once_savings.get(path)
    if not sites or (savings is not None and not any(site.unfinished for site in sites.values())):
        return
    stacked = report.model.layers[path].stacked
    timed, savings = time_layer(layer, sites, savings, work.timer, stacked=stacked)
    all_savings = report.quantize_once_savings
    if savings is not None:
        all_savings = {**all_savings, path: savings}
    work.report = replace(
        report,
        sites={**report.sites, **{site.name: site for site in timed.values()}},
        quantize_once_savings=all_savings,
    )
    work.save()


def _time_region(work: _Work, path: str) -> None:
    if not any(site.path == path for site in work.report.sites.values()):
        return
    layer, shape = work.stats.layers[path], work.report.model.layers[path]
    for chained in _untimed_in_regions(work, path):
        found = time_in_region(layer, shape, work.timer, _arms(work, path), chained=chained)
        if found is None:
            continue
        report = work.report
        if chained:
            work.report = replace(report, times_in_chains={**report.times_in_chains, path: found})
        else:
            work.report = replace(report, region_times={**report.region_times, path: found})
        work.save()


def _untimed_in_regions(work: _Work, path: str) -> list[bool]:
    """Of a layer's times in regions, those that are missing: by itself, in a chain (True)."""
    report, layer = work.report, work.stats.layers[path]
    missing = [] if path in report.region_times else [False]
    linked = layer.reads or any(path in reads for reads in report.reads.values())
    # Each of a chain's layers has a gradient for its input.
    if linked and path not in report.times_in_chains and (layer.needs_input_grad or not layer.needs_weight_grad):
        missing.append(True)
    return missing


def _arms(work: _Work, path: str) -> list[str]:
    """Of a cell. Without its errors a plan could not choose INT8."""
    output, integers = work.report.sites.get(site_name(path, Gemm.OUTPUT)), ARMS[REGION_INT8][0]
    known = integers in work.timer.candidates if output is None else output.stand_in(integers) is not None
    return [arm for arm in ARMS if arm != REGION_INT8 or known]


_DO: Mapping[str, Callable[[_Work, str], None]] = {"errors": _draw, "times": _time, "region": _time_region}
