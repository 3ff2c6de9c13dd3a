"""What a budget limits: which parts of the model's loss, and what each candidate spends there.

    limit        of whom
    Budget.ne    the whole model; where the probe was told tasks, each of them
    segments     one segment of rows, of each task there

A limit on a part whose KL/H is not known, or not well enough, is refused: no number stands for it.
"""

import math
from collections.abc import Mapping

from loka.compiler.joint_sites import ARMS
from loka.core.budget import Budget, known_effect, upper_bound
from loka.core.error import Estimate
from loka.core.exceptions import EffectUnknown, UnknownName
from loka.core.recipe import Gemm, recipe_in
from loka.core.records.parts import WHOLE, lost_together, part_name, segments_in, tasks_in
from loka.core.records.plan import Plan
from loka.core.records.report import HP, REGION, Measurement, Report, SiteReport

WAY_OUT = "probe its effect (docs/ne.md), or plan with ne=None, on error alone"

Limits = Mapping[str, float]
"""Parts, by name, and what each may spend."""
Cost = tuple[float, ...]
"""What a candidate spends of each limit, in their order."""


def limits_of(budget: Budget, report: Report) -> dict[str, float]:
    """The parts that `budget` limits in this report; one, the whole model, where it has a single number.

    Raises:
        UnknownName: a task or segment that the report has not, or a task without a limit.
        EffectUnknown: a part whose KL/H is not known well enough; it says how many rows are missing.
    """
    tasks, segments = tasks_in(report.parts), segments_in(report.parts)
    found: dict[str, float] = {}
    if isinstance(budget.ne, Mapping):
        _require_names("ne", budget.ne, tasks, way_out=_TASKS)
        absent = [task for task in tasks if task not in budget.ne]
        if absent:
            raise UnknownName(
                f"ne has no limit for {', '.join(absent)}",
                way_out=f"name every task: {', '.join(tasks)}; a large number lets one spend what it likes",
            )
        found |= {task: budget.ne[task] for task in tasks}
    elif budget.ne is not None:
        found |= dict.fromkeys(tasks or (WHOLE,), budget.ne)
    _require_names("segments", budget.segments, segments, way_out=_SEGMENTS)
    for segment, limit in budget.segments.items():
        found |= {part_name(task, segment): limit for task in tasks or ("",)}
    wrong = {name: report.parts[name].unsupported for name in found if name in report.parts}
    why = [f"{name}: {reason}" for name, reason in wrong.items() if reason]
    if why:
        raise EffectUnknown("the budget limits KL/H where it is not known well enough", why=why, way_out=_MORE_ROWS)
    return found


_TASKS = (
    "give their names to the probe, renew_effects(..., tasks=(...)); `loka probe` takes them from the schema. A model "
    "of one logit has one limit, a number"
)
_SEGMENTS = "name the rows' segments to the probe: renew_effects(..., segments=...), loka probe --segment"
_MORE_ROWS = (
    "probe more rows of it (more --data or --rows; renew_effects(batches, segment_rows=)), join it with "
    "another segment, allow a wider interval (segment_width=), or leave its limit out"
)


def _require_names(field: str, given: Mapping[str, float], known: tuple[str, ...], *, way_out: str) -> None:
    strange = [name for name in given if name not in known]
    if strange:
        raise UnknownName(
            f"{field}: the report knows no KL/H of {', '.join(map(repr, strange))}",
            why=[f"it knows that of {', '.join(map(repr, known))}" if known else "it knows none by name"],
            way_out=way_out,
        )


def cost_of(site: SiteReport, name: str, limits: Limits) -> Cost:
    """What `name` spends at `site` of each limit: nothing in hp, for a gradient, or where it is not known or
    not finite (then only force admits it, and the plan counts what its sum lacks)."""
    measured = site.measured(name)
    if name == HP or site.problem.gemm is not Gemm.OUTPUT or measured is None:
        return (0.0,) * len(limits)
    effects = (known_effect(measured.kl_of(part)) for part in limits)
    return tuple(upper_bound(effect) if effect is not None else 0.0 for effect in effects)


def fits(cost: Cost, granted: Cost) -> bool:
    return all(mine <= theirs for mine, theirs in zip(cost, granted, strict=True))


def over_limits(measured: Measurement, limits: Limits) -> str | None:
    """Why a candidate cannot be admitted by what it spends alone, or None."""
    for part, limit in limits.items():
        effect, of = measured.kl_of(part), f" of {part}" if part else ""
        if effect is None:
            return f"its KL/H{of} is not known; {WAY_OUT}"
        if not upper_bound(effect) <= limit:
            return f"KL/H{of} +{effect} is above all that the sum of layers may spend, {limit:g}"
    return None


def without_own_kl(site: SiteReport, name: str, limits: Limits) -> str | None:
    """Why what a region runs at `output` cannot be held against `limits`, where a like recipe could; or None."""
    alike, own = site.stand_in(name), site.measured(name)
    if site.problem.gemm is not Gemm.OUTPUT or alike is None or own is None:
        return None
    if not any(own.kl_of(part) is None and alike.kl_of(part) is not None for part in limits):
        return None
    return f"the report does not hold the KL/H of {recipe_in(name)}, which a region runs; {_MEASURE_AGAIN}"


_MEASURE_AGAIN = "measure again (`loka measure STATS --out REPORT`), and where that does not tell it, probe again"


def regions_without_kl(report: Report, limits: Limits) -> list[str]:
    """A note where layers were timed in regions, and nothing says what those cost in KL/H."""
    name = ARMS[REGION][0]
    paths = [
        site.path
        for site in report.sites.values()
        if site.path in report.region_times and without_own_kl(site, name, limits)
    ]
    return [f"in no region, as KL/H is not known there: {', '.join(paths)}; {_MEASURE_AGAIN}"] if paths else []


def share_spent(cost: Cost, limits: Limits) -> float:
    """Of the limit that it spends most of; of a single one what it spends."""
    if len(cost) == 1:
        return cost[0]
    return max(
        (mine / limit if limit else (0.0 if not mine else float("inf")))
        for mine, limit in zip(cost, limits.values(), strict=True)
    )


def lost_alike(plan: Plan, report: Report, part: str) -> float:
    """The upper end of what the layers of `plan` lose of `part` together; 0 where that is their sum."""
    alike = report.parts[part].alike if part in report.parts else report.alike
    return lost_together(alike, plan.output_recipes, _known(plan, part))


def spent_of(plan: Plan, report: Report, part: str) -> float:
    """What a limit on `part` is compared with: what its layers lose by the sum, or together where that is more."""
    return max(charged_alone(plan, part), lost_alike(plan, report, part))


def charged_alone(plan: Plan, part: str) -> float:
    """The upper end of what its layers lose of `part` by the sum."""
    return math.fsum(map(upper_bound, _known(plan, part).values()))


def other_than_the_sum(plan: Plan, report: Report, part: str, limit: float) -> str:
    """A note where the layers of `plan` lose more or less together than the sum, which is what a plan keeps to
    where it is more; "" else."""
    lost, charged = lost_alike(plan, report, part), charged_alone(plan, part)
    if not lost or (abs(lost - charged) <= 0.1 * charged and lost <= limit):
        return ""
    named, said = f"{part}: " if part else "", "within" if lost <= limit else "ABOVE"
    return (
        f"{named}by the correlations of what they change, layers in eight bits lose {lost:.2g} of KL/H together at "
        f"most, where the sum says {charged:.2g}; {said} its limit of {limit:g}"
    )


def beyond_second_order(plan: Plan, limits: Limits) -> list[str]:
    """Notes where `plan` loses so much that predictions, which are of second order, come out too small."""
    lost = {part: kl for part in limits or (WHOLE,) if (kl := plan.kl_of(part)) and kl.value > _SECOND_ORDER}
    return [
        f"{part}{': ' * bool(part)}a KL/H of {kl.value:.2g} is beyond second order: above about {_SECOND_ORDER:g} "
        "a model loses more than predicted, by a factor of 2 and more, and intervals do not hold (docs/ne.md)"
        for part, kl in lost.items()
    ]


_SECOND_ORDER = 0.05  # a prediction of 0.122 [0.115, 0.129] lost 0.282


def _known(plan: Plan, part: str) -> dict[str, Estimate]:
    return {d.path: effect for d in plan.decisions.values() if (effect := known_effect(d.kl_of(part)))}
