"""A layer as a part of a compiled region: whether the budget admits it, and the decisions that it makes."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from loka.compiler.joint_sites import ARMS
from loka.core.budget import Budget
from loka.core.recipe import Gemm
from loka.core.records.plan import IN_REGION, Decision
from loka.core.records.report import HP, REGION, Measurement, Report, SiteReport
from loka.planner.choice.layer_choice import Choice, Option, option_of, region_choice
from loka.planner.choice.limits import Limits, over_limits, without_own_kl
from loka.planner.decision import decision_of
from loka.planner.placing import times_at


def unsupported(measured: Measurement, budget: Budget, limits: Limits, gemm: Gemm) -> str | None:
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
    return None if gemm is not Gemm.OUTPUT else over_limits(measured, limits)


def regions_of(
    sites: list[SiteReport], report: Report, budget: Budget, limits: Limits, joined: Collection[str]
) -> tuple[tuple[Choice, ...], dict[str, str]]:
    """The layer in a region with its neighbours among the `joined`, by each of `ARMS` in which the budget admits
    every GEMM of it; and by arm why it cannot be in one."""
    found, reasons = [], {}
    times = times_at(report, sites[0].path, joined)
    for arm in [REGION, *(arm for arm in ARMS if arm != REGION and arm in times)]:
        made = _by_arm(arm, sites, times, budget, limits)
        if isinstance(made, Choice):
            found.append(made)
        else:
            reasons[arm] = made
    return tuple(found), reasons


def _by_arm(
    arm: str, sites: list[SiteReport], times: Mapping[str, Measurement], budget: Budget, limits: Limits
) -> Choice | str:
    if not budget.regions:
        return "the budget wants no regions"
    if arm not in times:
        return "not timed in a region"
    if times[arm].unsupported:
        return str(times[arm].unsupported)
    in_hp: dict[Gemm, Option] = {}
    for site in sites:
        name = ARMS[arm][list(Gemm).index(site.problem.gemm)]
        measured, option = site.measured(name), option_of(site, HP)
        if measured is None or option is None:
            return f"the errors of {name}, or of hp, were not measured at {site.name}"
        if reason := without_own_kl(site, name, limits) or unsupported(measured, budget, limits, site.problem.gemm):
            return f"{site.name}: {reason}"
        in_hp[site.problem.gemm] = option
    return region_choice(in_hp, times, arm) or "hp was not timed beside it"


def in_region(site: SiteReport, choice: Choice, rejected: dict[str, str]) -> Decision:
    """A GEMM of a layer that runs in a region; its time is its share of what the layer takes there."""
    assert choice.region is not None
    assert choice.arm is not None
    name = choice.options[site.problem.gemm].name
    region, hp = (choice.times[each].microseconds for each in (choice.arm, HP))
    reason = f"{IN_REGION}, where the layer and the code around it take {region} us, {hp} us in hp"
    lost = {
        other: rejected.get(other, "slower than in a region") for other in site.measurements if other not in (HP, name)
    }
    lost |= {arm: rejected[arm] for arm in ARMS if arm in rejected}
    return replace(
        decision_of(site, name, reason, lost),
        microseconds=choice.options[site.problem.gemm].time,
        speedup=choice.region,
        runner_up=HP,
    )
