"""What a user of a single kernel library would run: the baselines that a plan over all libraries is compared with.

A candidate is admitted at a site if `plan` would take it were it the only one, so the rules of the budget hold for a
single library too. The fastest of the admitted candidates wins.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from loka.core.budget import Budget
from loka.core.records.report import HP, Measurement, Report
from loka.kernels.gemm.registry import candidate_named, is_candidate
from loka.planner.plan import plan


def library_of(candidate: str) -> str:
    """Of a candidate that a report measured; none, "", of one that LoKA no longer has."""
    if candidate == HP:
        return HP
    return candidate_named(candidate).kernel.library if is_candidate(candidate) else ""


def libraries_of(report: Report) -> tuple[str, ...]:
    """The libraries with a candidate that ran at some site, sorted; no emulation."""
    names = {
        name
        for site in report.sites.values()
        for name, measured in site.measurements.items()
        if name != HP and not measured.unsupported and is_candidate(name) and not candidate_named(name).kernel.emulates
    }
    return tuple(sorted({library_of(name) for name in names}))


def only_library(report: Report, library: str) -> Report:
    """The report as if there were no other library, whose layers run in no regions either."""
    return _only(replace(report, region_times={}), lambda name: library_of(name) == library)


def fastest_of_library(report: Report, library: str, budget: Budget, *, everywhere: bool) -> dict[str, str]:
    """For each site, the fastest candidate of `library` that `budget` admits there, or "hp"; needs times.

    `everywhere`: a candidate that keeps the error limits of the budget runs wherever it can, also where it is slower
    than hp.
    """
    fastest: dict[str, tuple[float, str]] = {}
    names = {name for site in report.sites.values() for name in site.measurements}
    apart = replace(report, quantize_once_savings={}, region_times={})  # each site by itself
    for name in sorted(names):
        if library_of(name) != library:
            continue
        alone = _only(apart, name.__eq__)
        for site, decision in plan(_without_times(alone) if everywhere else alone, budget).decisions.items():
            speedup = report.sites[site].measurements[name].speedup if decision.candidate == name else None
            if speedup is not None:
                entry = (-speedup.value, name)
                fastest[site] = min(fastest.get(site, entry), entry)
    return {site: fastest[site][1] if site in fastest else HP for site in report.sites}


def _without_times(report: Report) -> Report:
    return _with_measurements(
        report, lambda measured: {n: replace(m, microseconds=None, speedup=None) for n, m in measured.items()}
    )


def _only(report: Report, keep: Callable[[str], bool]) -> Report:
    return _with_measurements(report, lambda measured: {n: m for n, m in measured.items() if n == HP or keep(n)})


def _with_measurements(
    report: Report, change: Callable[[Mapping[str, Measurement]], Mapping[str, Measurement]]
) -> Report:
    sites = {name: replace(site, measurements=change(site.measurements)) for name, site in report.sites.items()}
    return replace(report, sites=sites)
