"""Planning: for every site, the fastest candidate that the budget admits, with the reasons.

A candidate must be supported, keep the error limits at the safe end of its interval, and be
faster than hp by `min_speedup` at the safe end of its interval. Among those the fastest wins;
those whose time intervals overlap the fastest's are tied with it, and ties go to the first
name, so that every rank and every run decides alike. Where nothing was timed, the candidate
with the smallest error wins. Everything else stays in hp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from loka.core.budget import Budget
from loka.core.exceptions import NoKernelFits, UnknownName
from loka.core.plan import Decision, Plan
from loka.core.report import HP, Measurement, Report, SiteReport
from loka.core.signature import ModelSignature
from loka.kernels.registry import require_supported
from loka.nn.linears import is_prediction


def plan(report: Report, budget: Budget | None = None, *, force: Mapping[str, str] | None = None) -> Plan:
    """Decides every site of `report` within `budget`. Needs no GPU and no model.

    Args:
        report: from `measure`, perhaps on another machine; the plan will fit that machine.
        budget: limits; `Budget()` by default.
        force: for debugging: pattern of sites ("mlp.*/output", "*") -> candidate or "hp".
            A forced candidate bypasses the budget, not legality. The first match counts.

    Raises:
        NoKernelFits: a forced candidate cannot run its site, or a site has no candidate and
            the budget says `on_miss="raise"`.
        UnknownName: a pattern in `force` or `budget.keep` that matches no site.
    """
    budget = budget or Budget()
    force = dict(force or {})
    _check_patterns(report, {"force": tuple(force), "keep": budget.keep})
    decisions = {
        name: _decide(site, report.model, budget, force, timed=report.timed)
        for name, site in report.sites.items()
    }
    notes = [f"{path} stays in hp: {reason}" for path, reason in report.skipped.items()]
    if not report.complete:
        notes.append("the report is incomplete; sites not yet measured stay in hp")
    return Plan(
        model=report.model,
        machine=report.machine,
        budget=budget,
        timed=report.timed,
        decisions=decisions,
        notes=tuple(notes),
    )


def _matches(site: SiteReport, pattern: str) -> bool:
    return fnmatchcase(site.name, pattern) or fnmatchcase(site.path, pattern)


def _check_patterns(report: Report, patterns: Mapping[str, tuple[str, ...]]) -> None:
    for where, several in patterns.items():
        for pattern in several:
            if not any(_matches(site, pattern) for site in report.sites.values()):
                raise UnknownName(
                    f"{where}: no site matches {pattern!r}", way_out=f"one of {', '.join(report.sites)}"
                )


def _decide(
    site: SiteReport, model: ModelSignature, budget: Budget, force: Mapping[str, str], *, timed: bool
) -> Decision:
    for pattern, candidate in force.items():
        if _matches(site, pattern):
            if candidate != HP:
                require_supported(candidate, site.problem)
            return _decision(site, candidate, f"forced by {pattern!r}", {})
    kept = _kept(site, model, budget)
    if kept is not None:
        return _decision(site, HP, kept, {})
    rejected, admitted = {}, {}
    for name, measured in site.measurements.items():
        if name == HP:
            continue
        reason = _objection(measured, budget)
        if reason is None:
            admitted[name] = measured
        else:
            rejected[name] = reason
    if not admitted:
        return _no_candidate(site, budget, rejected)
    chosen, why, lost = _best(admitted, timed=timed)
    rejected.update(lost)
    return replace(
        _decision(site, chosen, why, rejected), runner_up=_runner_up(admitted, chosen, timed=timed)
    )


def _kept(site: SiteReport, model: ModelSignature, budget: Budget) -> str | None:
    for pattern in budget.keep:
        if _matches(site, pattern):
            return f"kept by the budget ({pattern!r})"
    outputs = model.layers[site.path].out_features
    if budget.keep_prediction and is_prediction(outputs):
        return f"{outputs} outputs: taken for a prediction layer"
    return None


def _objection(measured: Measurement, budget: Budget) -> str | None:
    """Why the budget does not admit a candidate, or None. A NaN error is never admitted."""
    if measured.unsupported:
        return measured.unsupported
    sqnr, relative = measured.errors["sqnr_db"], measured.errors["mere"]
    if budget.min_sqnr_db is not None and not sqnr.low >= budget.min_sqnr_db:
        return f"sqnr_db {sqnr} is below {budget.min_sqnr_db:g}"
    if budget.max_mere is not None and not relative.high <= budget.max_mere:
        return f"mere {relative} is above {budget.max_mere:g}"
    if sqnr.value != sqnr.value:
        return "its result holds NaN"
    if measured.speedup is not None and not measured.speedup.low >= budget.min_speedup:
        return f"speed-up {measured.speedup} is below {budget.min_speedup:g}"
    return None


def _best(admitted: Mapping[str, Measurement], *, timed: bool) -> tuple[str, str, dict[str, str]]:
    """The winner, why it won, and why each other admitted candidate lost."""
    if timed:
        times = {name: m.microseconds for name, m in admitted.items() if m.microseconds}
        fastest = min(times, key=lambda name: times[name].value)
        tied = sorted(name for name, time in times.items() if time.low <= times[fastest].high)
        chosen = tied[0]
        lost = {
            name: f"tied with {chosen}, which comes first by name" if name in tied else f"slower: {time} us"
            for name, time in times.items()
            if name != chosen
        }
        return chosen, "fastest within the budget" + _ties(tied), lost
    errors = {name: m.errors["sqnr_db"] for name, m in admitted.items()}
    best = max(sorted(errors), key=lambda name: errors[name].value)
    tied = sorted(name for name, error in errors.items() if error.high >= errors[best].low)
    chosen = tied[0]
    lost = {
        name: f"tied with {chosen}, which comes first by name" if name in tied else f"less exact: {error} dB"
        for name, error in errors.items()
        if name != chosen
    }
    return chosen, "smallest error; not timed" + _ties(tied), lost


def _ties(tied: list[str]) -> str:
    return f" (tied with {len(tied) - 1} more)" if len(tied) > 1 else ""


def _runner_up(admitted: Mapping[str, Measurement], chosen: str, *, timed: bool) -> str:
    def rank(name: str) -> float:
        time = admitted[name].microseconds
        return time.value if timed and time else -admitted[name].errors["sqnr_db"].value

    others = [name for name in admitted if name != chosen]
    return min(others, key=rank) if others else HP


def _no_candidate(site: SiteReport, budget: Budget, rejected: Mapping[str, str]) -> Decision:
    if budget.on_miss == "raise":
        raise NoKernelFits(
            f"{site.name}  ({site.problem})",
            why=[f"{name}  {reason}" for name, reason in rejected.items()],
            way_out='keep it in hp (Budget(on_miss="keep")), or lower min_sqnr_db or min_speedup',
        )
    runnable = [name for name, m in site.measurements.items() if name != HP and not m.unsupported]
    reason = "no candidate is within the budget" if runnable else "no candidate can run here"
    closest = _closest(site, runnable)
    if closest:
        reason = f"{reason}; {closest}: {rejected[closest]}"
    return _decision(site, HP, reason, rejected)


def _closest(site: SiteReport, runnable: list[str]) -> str | None:
    """The candidate a user would ask about: the fastest, or the most exact where none was timed."""

    def rank(name: str) -> float:
        measured = site.measurements[name]
        if measured.microseconds:
            return measured.microseconds.value
        return -measured.errors["sqnr_db"].value

    return min(runnable, key=rank) if runnable else None


def _decision(site: SiteReport, candidate: str, reason: str, rejected: Mapping[str, str]) -> Decision:
    measured = site.measurements.get(candidate, Measurement())
    hp = site.measurements.get(HP, Measurement())
    return Decision(
        path=site.path,
        problem=site.problem,
        candidate=candidate,
        reason=reason,
        sqnr_db=measured.errors.get("sqnr_db"),
        mere=measured.errors.get("mere"),
        microseconds=measured.microseconds,
        hp_microseconds=hp.microseconds,
        speedup=measured.speedup,
        rejected=rejected,
    )
