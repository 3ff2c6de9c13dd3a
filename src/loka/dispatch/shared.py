"""Which linear layers that read one tensor run as one: quality admits them, speed decides.

What chains and stacks of cross layers leave of a group may run as one where every site keeps the budget's
limits under the kernels that it would share, and where that was timed: faster than hp by `min_speedup`, than
the same layers one by one under the same kernels, and than what the plan's sites would make of them. It
spends no NE beyond what its sites were granted. A chain gives way to a group where both were timed and the
group, with what the sites of the chain's other layers save, saves more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from loka.core.budget import Budget
from loka.core.plan import ChainDecision, CrossDecision, Decision
from loka.core.recipe import Gemm
from loka.core.report import HP, Measurement, Report, SiteReport, site_name
from loka.core.shared_input import SharedInput
from loka.core.shared_plan import SharedDecision
from loka.core.timing import TIE
from loka.dispatch.chains import Objection, kept_apart, saved_by_sites, slower_than_sites, too_slow
from loka.dispatch.decision import decision_of
from loka.dispatch.ne_budget import cost_of
from loka.nn.shared_kernels import apart_name, comparable, shared_kernels, shared_name


class Shared(NamedTuple):
    """The groups to form, the decisions of their sites, the chains that give way to them, and why other
    groups are not formed."""

    groups: dict[str, SharedDecision]
    sites: dict[str, Decision]
    given_way: tuple[str, ...]
    notes: tuple[str, ...]


def decide_shared(
    report: Report,
    budget: Budget,
    decisions: Mapping[str, Decision],
    chains: Mapping[str, ChainDecision],
    crosses: Mapping[str, CrossDecision],
    objects: Objection,
) -> Shared:
    """`decisions` are those of the sites by themselves, `chains` and `crosses` what is formed."""
    formed: dict[str, SharedDecision] = {}
    sites: dict[str, Decision] = {}
    notes: list[str] = []
    left = dict(chains)
    for group in report.shared if budget.chains != "never" else ():
        never = {path for decided in crosses.values() for path in decided.stack.linears}
        never |= {path for path in group.linears if kept_apart(path, report, budget, decisions)}
        rivals = {name: d for name, d in left.items() if set(d.chain.linears) & set(group.linears)}
        taken = {path for rival in rivals.values() for path in rival.chain.linears}
        part, found = _try(group, never | taken, report, budget, decisions, objects)
        if rivals and budget.chains == "measured" and budget.ne is None:
            full, instead = _try(group, never, report, budget, decisions, objects)
            if full and isinstance(instead, _Formed):
                more = _saved(instead.decided) + saved_by_sites(taken - {*full.linears}, decisions)
                rest = saved_by_sites({*full.linears} - taken, decisions)
                rest = _saved(found.decided) if isinstance(found, _Formed) else rest
                if more > rest + sum(_saved(rival) for rival in rivals.values()):
                    part, found = full, instead
                    notes += [f"chain at {name} gives way to the shared input {full.name}" for name in rivals]
                    left = {name: d for name, d in left.items() if name not in rivals}
        if part is None:
            continue  # a layer by itself shares nothing
        if not isinstance(found, _Formed):
            notes.append(f"{part.name} read one tensor and run by themselves: {found}")
            continue
        formed[part.name] = found.decided
        for site in _sites(part, report):
            name = found.kernels[site.problem.gemm]
            rejected = {**decisions[site.name].rejected}
            rejected.pop(name, None)
            sites[site.name] = decision_of(site, name, f"runs as one with {_others(part, site)}", rejected)
    return Shared(formed, sites, tuple(name for name in chains if name not in left), tuple(notes))


class _Formed(NamedTuple):
    decided: SharedDecision
    kernels: dict[Gemm, str]


def _try(
    group: SharedInput,
    without: Collection[str],
    report: Report,
    budget: Budget,
    decisions: Mapping[str, Decision],
    objects: Objection,
) -> tuple[SharedInput | None, _Formed | str]:
    part = group.without(without)
    part = part and comparable(part, report.sites)
    return part, _decide(part, report, budget, decisions, objects) if part else ""


def _saved(decided: ChainDecision | SharedDecision) -> float:
    assert decided.microseconds is not None  # only what was timed is compared
    assert decided.hp_microseconds is not None
    return decided.hp_microseconds.value - decided.microseconds.value


def _decide(
    group: SharedInput,
    report: Report,
    budget: Budget,
    decisions: Mapping[str, Decision],
    objects: Objection,
) -> _Formed | str:
    kernels, why = shared_kernels(group, report.sites)
    if why is not None:
        return why
    spent = 0.0
    for site in _sites(group, report):
        name = kernels[site.problem.gemm]
        why = objects(site.measurements[name], budget, site.problem.gemm)
        if why is not None:
            return f"{site.name}: {name}: {why}"
        spent += cost_of(site, name) - cost_of(site, decisions[site.name].candidate)
    if budget.ne is not None and spent > 0:
        return "their NE is better spent elsewhere"
    times = report.shared_times.get(group.name, {})
    measured = times.get(shared_name(kernels), Measurement())
    hp = times.get(HP, Measurement())
    if measured.unsupported:
        return measured.unsupported
    if budget.chains == "measured":
        if not times:
            return "not timed; Budget(chains='always') forms them on their errors alone"
        why = (
            too_slow(measured, hp, budget)
            or _no_faster(measured, times.get(apart_name(kernels)))
            or slower_than_sites(group.linears, measured, hp, decisions)
        )
        if why is not None:
            return why
    decided = SharedDecision(
        group=group,
        reason="fastest as one" if measured.microseconds else "not timed; errors are within the budget",
        microseconds=measured.microseconds,
        hp_microseconds=hp.microseconds,
        speedup=measured.speedup,
    )
    return _Formed(decided, kernels)


def _no_faster(measured: Measurement, apart: Measurement | None) -> str | None:
    """Why running as one gains nothing over the same kernels one by one, or None."""
    assert measured.speedup is not None  # or it had been too slow
    if apart is None or apart.speedup is None:
        return None
    if measured.speedup.value >= apart.speedup.value * (1 + TIE):
        return None
    return f"{measured.speedup}x, where the same kernels one by one have {apart.speedup}x"


def _sites(group: SharedInput, report: Report) -> list[SiteReport]:
    names = [site_name(path, gemm) for path in group.linears for gemm in Gemm]
    return [report.sites[name] for name in names if name in report.sites]


def _others(group: SharedInput, site: SiteReport) -> str:
    return ", ".join(path for path in group.linears if path != site.path)
