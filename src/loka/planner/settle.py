"""A layer's decisions once its share of the budget is granted: what runs, and why each other candidate lost."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from loka.core.budget import Budget
from loka.core.exceptions import NoKernelFits
from loka.core.recipe import SHARED_OPERANDS, Gemm
from loka.core.records.plan import Decision
from loka.core.records.report import HP, SiteReport
from loka.planner.choice.layer_choice import Choice, Layer, Option, best_of, combine, speedup_of, tied
from loka.planner.choice.limits import Cost, Limits, cost_of, fits
from loka.planner.choice.ne_budget import is_forced
from loka.planner.choice.untimed import ties
from loka.planner.decision import decision_of
from loka.planner.regions import in_region


def settle(layer: Layer, budget: Budget, limits: Limits, granted: Cost) -> list[Decision]:
    """Decides the sites of one layer, in their order, among what costs no more than `granted`.

    Args:
        limits: parts of the loss that the budget limits; empty where it limits none.
        granted: what the layer's `output` GEMM may cost, by limit, in KL/H.

    Raises NoKernelFits where no candidate is left and the budget says `on_miss="raise"`.
    """
    affordable = _within_grant(layer, budget, limits, granted)
    if not layer.options:  # all GEMMs were decided before
        return [affordable.fixed[site.problem.gemm] for site in layer.sites]
    choice = best_of(affordable.layer.allowed)
    rejected = _rejected(layer, affordable, choice, budget)
    if choice.region is not None:
        return [in_region(site, choice, rejected[site.problem.gemm]) for site in layer.sites]
    decisions = []
    for site in layer.sites:
        gemm = site.problem.gemm
        if gemm in affordable.fixed:
            decisions.append(_with_layer(affordable.fixed[gemm], choice, rejected.get(gemm, {})))
        else:
            decisions.append(_chosen(site, choice, layer, budget, rejected[gemm], affordable.over[gemm]))
    return decisions


@dataclass(frozen=True)
class _Affordable:
    """What of a layer costs no more than it was granted, and what each thing that costs more spends, in words.

    Attributes:
        layer: with those options and regions alone.
        fixed: the decisions that stood before; a GEMM whose candidate costs more stays in hp.
        over: by GEMM, candidates that cost more.
        regions_over: by arm, the same of the layer in a region.
    """

    layer: Layer
    fixed: Mapping[Gemm, Decision]
    over: Mapping[Gemm, Mapping[str, str]]
    regions_over: Mapping[str, str]


def _within_grant(layer: Layer, budget: Budget, limits: Limits, granted: Cost) -> _Affordable:
    fixed, options = dict(layer.fixed), {gemm: dict(each) for gemm, each in layer.options.items()}
    over: dict[Gemm, dict[str, str]] = {gemm: {} for gemm in Gemm}
    for site in layer.sites:
        gemm = site.problem.gemm
        if is_forced(fixed.get(gemm)):
            continue
        for name in [fixed[gemm].candidate] if gemm in fixed else list(options.get(gemm, ())):
            excess = _beyond_grant(site, name, limits, granted)
            if not excess:
                continue
            if gemm in fixed:
                reason = f"{excess} is better spent elsewhere"
                fixed[gemm] = no_candidate(site, budget, {**fixed[gemm].rejected, name: reason})
            else:
                del options[gemm][name]
                over[gemm][name] = excess
    regions_over = {
        str(region.arm): excess
        for region in layer.regions
        if (excess := _region_beyond_grant(layer, region, limits, granted))
    }
    left = layer  # itself where nothing costs too much: its allowed choices are known already
    if any(over.values()) or regions_over:
        left = replace(layer, options=options, regions=[r for r in layer.regions if r.arm not in regions_over])
    return _Affordable(left, fixed, over, regions_over)


def _rejected(layer: Layer, affordable: _Affordable, choice: Choice, budget: Budget) -> dict[Gemm, dict[str, str]]:
    """By GEMM, why candidates and regions other than the `choice` lost, as far as that can be said of the layer.

    "Better spent elsewhere" is said only of what would save time here: of anything else the budget is not the reason.
    """
    rejected = {gemm: dict(each) for gemm, each in layer.rejected.items()}
    for region in layer.regions:
        if region.arm != choice.arm:
            arm = str(region.arm)
            why = f"speed-up in a region {region.region}, below what is chosen or {budget.min_speedup:g}"
            if arm in affordable.regions_over and region in layer.allowed and _saves(region, choice):
                why = f"{affordable.regions_over[arm]} is better spent elsewhere"
            for reasons in rejected.values():
                reasons[arm] = why
    for gemm, names in affordable.over.items():
        for name, excess in names.items():
            if any(c.arm is None and c.options[gemm].name == name and _saves(c, choice) for c in layer.allowed):
                rejected[gemm][name] = f"{excess} is better spent elsewhere"
    return rejected


def no_candidate(
    site: SiteReport, budget: Budget, rejected: Mapping[str, str], why: str = "no candidate is within the budget"
) -> Decision:
    """The site in hp, with the reason and the candidate that came closest.

    Raises NoKernelFits where the budget says `on_miss="raise"`.
    """
    if budget.on_miss == "raise":
        raise NoKernelFits(
            f"{site.name}  ({site.problem})",
            why=[f"{name}  {reason}" for name, reason in rejected.items()],
            way_out='keep it in hp (Budget(on_miss="keep")), or lower min_sqnr_db or min_speedup',
        )
    asked = [name for name in site.measurements if name != HP]
    runnable = [name for name in asked if not site.measurements[name].unsupported]
    if not runnable:
        why = "no candidate can run here" if asked else "no candidate was measured"
    closest = _closest(site, runnable)
    return decision_of(site, HP, f"{why}; {closest}: {rejected[closest]}" if closest else why, rejected)


def _beyond_grant(site: SiteReport, name: str, limits: Limits, granted: Cost) -> str:
    """Says what a candidate spends of the first limit of which it spends more than granted; "" where of none."""
    cost, measured = cost_of(site, name, limits), site.measured(name)
    if fits(cost, granted) or measured is None:
        return ""
    part = next(p for p, mine, theirs in zip(limits, cost, granted, strict=True) if mine > theirs)
    return f"KL/H{f' of {part}' if part else ''} {measured.kl_of(part)}"


def _region_beyond_grant(layer: Layer, region: Choice, limits: Limits, granted: Cost) -> str:
    """The same of a layer in a region: what the first of its GEMMs that spends more than granted spends."""
    each = (_beyond_grant(site, region.options[site.problem.gemm].name, limits, granted) for site in layer.sites)
    return next(filter(None, each), "")


def _saves(choice: Choice, chosen: Choice) -> bool:
    """Whether `choice` is faster than the one that was chosen, by more than a tie."""
    return choice.microseconds < chosen.microseconds and not tied(chosen, choice)


def _with_layer(decision: Decision, choice: Choice, rejected: Mapping[str, str]) -> Decision:
    """A decision that stood before, with what its layer saves and why that is in no region."""
    saved = choice.saved_at(decision.problem.gemm)
    return replace(decision, saved_us=saved, rejected={**rejected, **decision.rejected})


def _chosen(
    site: SiteReport, choice: Choice, layer: Layer, budget: Budget, rejected: dict[str, str], over: Mapping[str, str]
) -> Decision:
    """The site's decision by the layer's choice. `rejected` gets the reason of every other candidate.

    `over`: what candidates that cost more than granted spend, in words.
    """
    gemm = site.problem.gemm
    name, options = choice.options[gemm].name, layer.options[gemm]
    others, tied_with = dict[str, float](), list[str]()
    why = "no candidate is within the budget"
    for other, option in options.items():
        if other in (name, HP, *rejected):
            continue
        instead = combine({**choice.options, gemm: option}, layer.savings)
        speedup = speedup_of(instead, gemm, options[HP])
        if other not in over:
            others[other] = instead.microseconds
        if not speedup.low >= budget.min_speedup:
            rejected[other] = f"speed-up {speedup} is below {budget.min_speedup:g}"
        elif other in over:
            rejected[other] = f"{over[other]} for no less time"
        elif (name == HP or name < other) and tied(instead, choice) and tied(choice, instead):
            tied_with.append(other)
            rejected[other], why = f"tied with {name}, which comes first", _NO_GAIN
        elif instead.microseconds < choice.microseconds:
            rejected[other] = f"faster than {name}, but another GEMM of the layer would not earn its place"
        else:
            rejected[other], why = _slower(option, instead, choice.options[gemm], choice), _NO_GAIN
    if name == HP:
        return no_candidate(site, budget, rejected, why)
    reason = "fastest within the budget" + ties(tied_with) + _shares(choice, gemm)
    decision = decision_of(site, name, reason, rejected)
    runner_up = min(others, key=lambda other: (others[other], other), default=HP)
    return replace(decision, runner_up=runner_up, saved_us=choice.saved_at(gemm))


_NO_GAIN = "no candidate saves time"


def _slower(option: Option, instead: Choice, own: Option, choice: Choice) -> str:
    """Why `option` lost to `own`, the option chosen: by its own time or by that of the layer, which is `instead`."""
    if option.time.value >= own.time.value:
        return f"slower: {option.time} us"
    more = instead.microseconds - choice.microseconds
    return f"slower: {option.time} us, but {more:.1f} us more of the layer, where less is shared"


def _shares(choice: Choice, gemm: Gemm) -> str:
    """With which GEMMs of the layer this one shares the quantization of a tensor, and what that saves; "" if none."""
    parts = [
        f"{tensor} with {other} ({choice.saved[tensor].value:.1f} us saved)"
        for tensor, ((first, _), (second, _)) in SHARED_OPERANDS.items()
        if tensor in choice.saved and gemm in (first, second)
        for other in ((second,) if gemm is first else (first,))
    ]
    return f"; shares the quantization of {', '.join(parts)}" if parts else ""


def _closest(site: SiteReport, runnable: list[str]) -> str | None:
    """The fastest of the candidates or, where none was timed, the most exact one."""

    def rank(name: str) -> tuple[float, str]:
        measured = site.measurements[name]
        if measured.microseconds:
            return measured.microseconds.value, name
        sqnr = measured.errors["sqnr_db"].value
        return (math.inf if math.isnan(sqnr) else -sqnr), name

    return min(runnable, key=rank) if runnable else None
