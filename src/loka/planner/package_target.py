"""Planning for a package that runs without loka: `output` GEMMs among aten's kernels, and what others would save.

A package answers requests, so it runs no gradient. A report of training steps has their GEMMs too: a layer planned
by all three may take an `output` that is slower than hp, for what it saves the others. So they are left out, and with
them the times of such a layer in a region, which hold its gradients.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from loka.core.budget import Budget
from loka.core.recipe import Gemm
from loka.core.records.plan import Decision, Plan
from loka.core.records.report import HP, REGION, Measurement, Report, SiteReport
from loka.kernels.gemm.registry import candidate_named

_OF_STEPS = (
    "the report is of training steps, and a package runs `output` GEMMs alone: their times here include quantizing "
    "the weights, which a package keeps in FP8, and times in regions, which include gradients, are left out. "
    "`loka measure STATS --inference 1` measures what a package runs"
)


def plan_package(
    report: Report, budget: Budget | None, *, force: Mapping[str, str] | None, decide: Callable[..., Plan]
) -> Plan:
    """`decide` on `output` GEMMs, among what can go into a package. The plan notes each site that would otherwise run
    another candidate, the time of all `output` GEMMs both ways and in hp where it was measured, and a report that is
    not for inference."""
    served = _forward(report)
    sites = {name: _packaged(site) for name, site in served.sites.items()}
    made = decide(replace(served, sites=sites), budget, force=force)
    free = decide(served, budget, force=force)
    of_steps = [_OF_STEPS] if len(served.sites) < len(report.sites) else []
    return replace(made, target="package", notes=(*made.notes, *_costs(made, free), *of_steps))


def _forward(report: Report) -> Report:
    """What of a report is of `output` GEMMs alone."""
    trained = {site.path for site in report.sites.values() if site.problem.gemm is not Gemm.OUTPUT}
    with_gradients = {REGION: Measurement(unsupported="timed with its gradients, which a package does not run")}
    return replace(
        report,
        sites={name: site for name, site in report.sites.items() if site.problem.gemm is Gemm.OUTPUT},
        quantize_once_savings={},
        region_times={path: with_gradients if path in trained else t for path, t in report.region_times.items()},
        times_in_chains={path: times for path, times in report.times_in_chains.items() if path not in trained},
    )


def _packaged(site: SiteReport) -> SiteReport:
    found = {}
    for name, measured in site.measurements.items():
        reason = None if name == HP or measured.unsupported else candidate_named(name).unpackaged
        found[name] = measured if reason is None else replace(measured, unsupported=reason)
    return replace(site, measurements=found)


def _costs(made: Plan, free: Plan) -> list[str]:
    notes = ["for a package: `output` GEMMs alone, by candidates that run without loka"]
    for name, decision in made.decisions.items():
        other = free.decisions[name]
        if other.candidate != decision.candidate:
            notes.append(f"{name} would run {other.candidate} in Python, and runs {decision.candidate}")
    if made.timed:
        here, there = (sum(map(_microseconds, plan.decisions.values())) for plan in (made, free))
        hp = sum(d.hp_microseconds.value for d in made.decisions.values() if d.hp_microseconds)
        notes.append(
            f"`output` GEMMs of the package take {here:.0f} us, in Python they would take {there:.0f} us, "
            f"and {hp:.0f} us in hp"
        )
    return notes


def _microseconds(decision: Decision) -> float:
    taken = decision.microseconds or decision.hp_microseconds
    return 0.0 if taken is None else taken.value
