"""Planning for a package that runs without loka: among aten's kernels, and what others would have saved."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from loka.core.budget import Budget
from loka.core.records.plan import Decision, Plan
from loka.core.records.report import HP, Report, SiteReport
from loka.kernels.gemm.registry import candidate_named


def plan_package(
    report: Report, budget: Budget | None, *, force: Mapping[str, str] | None, decide: Callable[..., Plan]
) -> Plan:
    """`decide` among what can go into a package. The plan notes each site that would otherwise run another
    candidate, and the time of all GEMMs both ways where it was measured."""
    sites = {name: _packaged(site) for name, site in report.sites.items()}
    made = decide(replace(report, sites=sites), budget, force=force)
    free = decide(report, budget, force=force)
    return replace(made, notes=(*made.notes, *_costs(made, free)))


def _packaged(site: SiteReport) -> SiteReport:
    found = {}
    for name, measured in site.measurements.items():
        reason = None if name == HP else candidate_named(name).unpackaged
        found[name] = measured if reason is None else replace(measured, unsupported=reason)
    return replace(site, measurements=found)


def _costs(made: Plan, free: Plan) -> list[str]:
    notes = ["for a package: candidates that run without loka alone"]
    for name, decision in made.decisions.items():
        other = free.decisions[name]
        if other.candidate != decision.candidate:
            notes.append(f"{name} would run {other.candidate} in Python, and runs {decision.candidate}")
    if made.timed:
        here, there = (sum(map(_microseconds, plan.decisions.values())) for plan in (made, free))
        notes.append(f"GEMMs of the package take {here:.0f} us, in Python they would take {there:.0f} us")
    return notes


def _microseconds(decision: Decision) -> float:
    taken = decision.microseconds or decision.hp_microseconds
    return 0.0 if taken is None else taken.value - decision.saved_us
