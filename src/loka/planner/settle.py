"""A layer's decisions once its share of the budget is granted: what runs, and why each other candidate lost."""

import math
from collections.abc import Mapping
from dataclasses import replace

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
    """Decides the sites of one layer, its `output` GEMM among what costs no more than `granted`, by limit."""
    fixed, within = dict(layer.fixed), {gemm: dict(each) for gemm, each in layer.options.items()}
    rejected = {gemm: dict(each) for gemm, each in layer.rejected.items()}
    dear: dict[Gemm, dict[str, str]] = {gemm: {} for gemm in Gemm}
    for site in layer.sites:
        gemm = site.problem.gemm
        if is_forced(fixed.get(gemm)):
            continue
        for name in [fixed[gemm].candidate] if gemm in fixed else list(within.get(gemm, ())):
            spends = _beyond(site, name, limits, granted)
            if not spends:
                continue
            if gemm in fixed:
                reason = f"{spends} is better spent elsewhere"
                fixed[gemm] = no_candidate(site, budget, {**fixed[gemm].rejected, name: reason})
            else:
                del within[gemm][name]
                dear[gemm][name] = spends
    if not within:
        return [fixed[site.problem.gemm] for site in layer.sites]
    too_dear = {
        str(region.arm): spends for region in layer.regions if (spends := _region(layer, region, limits, granted))
    }
    affordable = layer
    if any(dear.values()) or too_dear:
        affordable = replace(layer, options=within, regions=[r for r in layer.regions if r.arm not in too_dear])
    choice = best_of(affordable.allowed)
    for region in layer.regions:
        if region.arm != choice.arm:
            arm = str(region.arm)
            why = f"speed-up in a region {region.region}, below what is chosen or {budget.min_speedup:g}"
            if arm in too_dear and region in layer.allowed and _saves(region, choice):
                why = f"{too_dear[arm]} is better spent elsewhere"
            for reasons in rejected.values():
                reasons[arm] = why
    for gemm, names in dear.items():
        for name, spends in names.items():
            if any(c.arm is None and c.options[gemm].name == name and _saves(c, choice) for c in layer.allowed):
                rejected[gemm][name] = f"{spends} is better spent elsewhere"
    if choice.region is not None:
        return [in_region(site, choice, rejected[site.problem.gemm]) for site in layer.sites]
    return [
        _with_layer(fixed[gemm], choice, rejected.get(gemm, {}))
        if (gemm := site.problem.gemm) in fixed
        else _chosen(site, choice, layer, budget, rejected[gemm], dear[gemm])
        for site in layer.sites
    ]


def no_candidate(
    site: SiteReport, budget: Budget, rejected: Mapping[str, str], why: str = "no candidate is within the budget"
) -> Decision:
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


def _beyond(site: SiteReport, name: str, limits: Limits, granted: Cost) -> str:
    """What a candidate spends of a limit beyond what its layer was granted, in words; "" where it does not."""
    cost, measured = cost_of(site, name, limits), site.measured(name)
    if fits(cost, granted) or measured is None:
        return ""
    part = next(p for p, mine, theirs in zip(limits, cost, granted, strict=True) if mine > theirs)
    return f"KL/H{f' of {part}' if part else ''} {measured.kl_of(part)}"


def _region(layer: Layer, region: Choice, limits: Limits, granted: Cost) -> str:
    """The same of a layer in a region."""
    each = (_beyond(site, region.options[site.problem.gemm].name, limits, granted) for site in layer.sites)
    return next(filter(None, each), "")


def _saves(choice: Choice, chosen: Choice) -> bool:
    return choice.microseconds < chosen.microseconds and not tied(chosen, choice)


def _with_layer(decision: Decision, choice: Choice, rejected: Mapping[str, str]) -> Decision:
    """A decision that stood before, with what its layer saves and why that is in no region."""
    saved = choice.saved_at(decision.problem.gemm)
    return replace(decision, saved_us=saved, rejected={**rejected, **decision.rejected})


def _chosen(
    site: SiteReport, choice: Choice, layer: Layer, budget: Budget, rejected: dict[str, str], dear: Mapping[str, str]
) -> Decision:
    """`dear`: what candidates spend beyond what was granted."""
    gemm = site.problem.gemm
    name, options = choice.options[gemm].name, layer.options[gemm]
    others, tied_with = dict[str, float](), list[str]()
    why = "no candidate is within the budget"
    for other, option in options.items():
        if other in (name, HP, *rejected):
            continue
        instead = combine({**choice.options, gemm: option}, layer.savings)
        speedup = speedup_of(instead, gemm, options[HP])
        if other not in dear:
            others[other] = instead.microseconds
        if not speedup.low >= budget.min_speedup:
            rejected[other] = f"speed-up {speedup} is below {budget.min_speedup:g}"
        elif other in dear:
            rejected[other] = f"{dear[other]} for no less time"
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
    if option.time.value >= own.time.value:
        return f"slower: {option.time} us"
    more = instead.microseconds - choice.microseconds
    return f"slower: {option.time} us, but {more:.1f} us more of the layer, where less is shared"


def _shares(choice: Choice, gemm: Gemm) -> str:
    parts = [
        f"{tensor} with {other} ({choice.saved[tensor].value:.1f} us saved)"
        for tensor, ((first, _), (second, _)) in SHARED_OPERANDS.items()
        if tensor in choice.saved and gemm in (first, second)
        for other in ((second,) if gemm is first else (first,))
    ]
    return f"; shares the quantization of {', '.join(parts)}" if parts else ""


def _closest(site: SiteReport, runnable: list[str]) -> str | None:
    def rank(name: str) -> tuple[float, str]:
        measured = site.measurements[name]
        if measured.microseconds:
            return measured.microseconds.value, name
        sqnr = measured.errors["sqnr_db"].value
        return (math.inf if math.isnan(sqnr) else -sqnr), name

    return min(runnable, key=rank) if runnable else None
