"""What a user of one kernel library would run: the rivals of a plan over all of them.

A candidate is admitted at a site if `plan` would take it were it the only one, so the budget's
rules hold for a library as they do for the choice. Among those admitted the fastest wins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from loka.core.budget import Budget
from loka.core.report import HP, Report
from loka.dispatch.plan import plan
from loka.kernels.registry import candidate_named


def library_of(candidate: str) -> str:
    """Whose kernel a candidate is; "hp" for high precision."""
    return HP if candidate == HP else candidate_named(candidate).kernel.library


def libraries_of(report: Report) -> tuple[str, ...]:
    """The libraries with a candidate that ran at some site, sorted; no emulation."""
    names = {
        name
        for site in report.sites.values()
        for name, measured in site.measurements.items()
        if name != HP and not measured.unsupported and not candidate_named(name).kernel.emulates
    }
    return tuple(sorted({library_of(name) for name in names}))


def only_library(report: Report, library: str) -> Report:
    """The report as if there were no other library."""
    return _only(report, lambda name: library_of(name) == library)


def fastest_of_library(report: Report, library: str, budget: Budget) -> dict[str, str]:
    """Site -> the fastest candidate of `library` that `budget` admits there, or "hp"; needs times.

    With `min_speedup=0` it is what the library runs wherever it can, slower than hp or not.
    """
    fastest: dict[str, tuple[float, str]] = {}
    names = {name for site in report.sites.values() for name in site.measurements}
    for name in sorted(names):
        if library_of(name) != library:
            continue
        alone = plan(_only(report, name.__eq__), budget)
        for site, decision in alone.decisions.items():
            if decision.candidate != HP and decision.speedup is not None:
                entry = (-decision.speedup.value, name)
                fastest[site] = min(fastest.get(site, entry), entry)
    return {site: fastest[site][1] if site in fastest else HP for site in report.sites}


def _only(report: Report, keep: Callable[[str], bool]) -> Report:
    sites = {
        path: replace(site, measurements={n: m for n, m in site.measurements.items() if n == HP or keep(n)})
        for path, site in report.sites.items()
    }
    return replace(report, sites=sites)
