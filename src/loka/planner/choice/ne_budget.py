"""Spending `Budget.ne`: what each layer's `output` GEMM may cost the model in KL/H.

    effect of a plan = sum over FP8 output GEMMs of their predicted KL/H

Effects of sites nearly add up (docs/budget.md; planner/choice/limits.py counts the rest), so one limit for the
model is a knapsack over its layers (knapsack.py), and limits on tasks and segments are one with several
(knapsack_several.py). A layer's ways are its allowed choices of all three GEMMs, the best one for each effect its
`output` GEMM can have; gradients have none, and keep their own rules. Of times within the noise the one that costs
less KL/H is taken. Without times a GEMM's FLOPs stand for them, halved in FP8.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loka.core.budget import Budget
from loka.core.recipe import Gemm
from loka.core.records.plan import Decision
from loka.core.records.report import HP, Report
from loka.planner.choice.knapsack import Way, spend
from loka.planner.choice.knapsack_several import Spent, WayByLimit, spend_several
from loka.planner.choice.layer_choice import Choice, Layer, best_of, tied
from loka.planner.choice.limits import Cost, Limits, cost_of, fits, regions_without_kl


@dataclass(frozen=True, kw_only=True)
class Granted:
    """`layers`: what the `output` GEMM of each may spend, of each limit."""

    layers: Mapping[str, Cost]
    notes: tuple[str, ...]


def grant(report: Report, budget: Budget, limits: Limits, layers: Mapping[str, Layer]) -> Granted:
    """Spends `limits` (planner/choice/limits.py) over `layers`."""
    ways = {path: _layer_ways(layer, limits) for path, layer in layers.items()}
    notes = (*report.unknown_effects(), *(regions_without_kl(report, limits) if budget.regions else ()))
    if len(limits) == 1:
        (limit,) = limits.values()
        alone = {
            path: [Way(name=way.name, time=way.time, effect=way.effects[0]) for way in several]
            for path, several in ways.items()
        }
        granted: dict[str, Cost] = {path: (way.effect,) for path, way in spend(alone, limit).items()}
    else:
        found = spend_several(ways, list(limits.values()))
        granted = {path: way.effects for path, way in found.taken.items()}
        notes += (_lost(found, ways),)
    for place, (part, limit) in enumerate(limits.items()):
        spent = math.fsum(cost[place] for cost in granted.values())
        if spent > limit * (1 + 1e-9):
            of = f" of {part}" if part else ""
            notes += (f"what was forced spends {spent:.2g} of KL/H{of} alone, above the {limit:g} left for the sum",)
    return Granted(layers={path: granted[path] for path in layers}, notes=notes)


def _lost(found: Spent, ways: Mapping[str, Sequence[WayByLimit]]) -> str:
    """What several limits may have cost the choice itself, by the bound of planner/choice/knapsack_several.py."""
    slowest = math.fsum(max(way.time for way in several) for several in ways.values())
    most, got = slowest - found.bound, slowest - found.time
    share = got / most if most > 0 else 1.0
    return (
        f"several limits: the choice saves {share:.1%} of what any choice within them could save at most "
        "(planner/choice/knapsack_several.py)"
    )


def is_forced(decision: Decision | None) -> bool:
    return decision is not None and decision.reason.startswith("forced by")


def _layer_ways(layer: Layer, limits: Limits) -> list[WayByLimit]:
    """The best choice for each effect that `output` can have, where spending more also saves time."""
    none = (0.0,) * len(limits)
    output = next((site for site in layer.sites if site.problem.gemm is Gemm.OUTPUT), None)
    decided = layer.fixed.get(Gemm.OUTPUT)
    spent = cost_of(output, decided.candidate, limits) if output and decided else none
    if not layer.options:
        if output is None or decided is None or decided.candidate == HP or is_forced(decided):
            return [WayByLimit(name=HP, time=0.0, effects=spent)]
        flops = output.problem.flops
        return [
            WayByLimit(name=HP, time=flops, effects=none),
            WayByLimit(name=decided.candidate, time=flops / 2, effects=spent),
        ]
    levels: dict[Cost, list[Choice]] = {}
    for choice in layer.allowed:
        option = choice.options.get(Gemm.OUTPUT)
        cost = cost_of(output, option.name, limits) if output and option else spent
        levels.setdefault(cost, []).append(choice)
    ways: list[WayByLimit] = []
    kept: list[tuple[Cost, Choice]] = []
    for cost in sorted(levels, key=lambda cost: (math.fsum(cost), cost)):
        best = best_of(levels[cost])
        cheaper = [choice for other, choice in kept if fits(other, cost)]
        last = min(cheaper, key=lambda choice: choice.microseconds, default=None)
        if last is None or (best.microseconds < last.microseconds and not tied(last, best)):
            names = " ".join(option.name for option in best.options.values())
            ways.append(WayByLimit(name=names, time=best.microseconds, effects=cost))
            kept.append((cost, best))
    return ways
