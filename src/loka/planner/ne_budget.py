"""Spending `Budget.ne`: what each layer's `output` GEMM may cost the model in KL/H.

    effect of a plan = sum over FP8 output GEMMs of their predicted KL/H

The effects of sites add up (docs/budget.md), so one limit for the model is a knapsack over its layers
(planner/knapsack.py). A layer's ways are its allowed choices of all three GEMMs, the best one for each
effect its `output` GEMM can have; gradients have none, and keep their own rules. Of times within the noise
the one that costs less KL/H is taken. Without times a GEMM's multiplications stand for them, halved in FP8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loka.core.budget import Budget, upper_bound
from loka.core.recipe import Gemm
from loka.core.records.plan import Decision, known_effect
from loka.core.records.report import HP, Report, SiteReport
from loka.planner.knapsack import Way, spend
from loka.planner.layer_choice import Choice, Layer, allowed_choices, best_of, tied

WAY_OUT = "probe its effect (docs/ne.md), or plan with ne=None, on error alone"


@dataclass(frozen=True, kw_only=True)
class Granted:
    """`layers`: what the `output` GEMM of each may spend."""

    layers: Mapping[str, float]
    notes: tuple[str, ...]


def grant(report: Report, budget: Budget, layers: Mapping[str, Layer]) -> Granted:
    """Spends `budget.ne` over `layers`."""
    assert budget.ne is not None
    taken = spend({path: _layer_ways(path, layer, budget) for path, layer in layers.items()}, budget.ne)
    spent = sum(way.effect for way in taken.values())
    notes = tuple(report.unknown_effects())
    if spent > budget.ne * (1 + 1e-9):
        notes += (f"what was forced spends {spent:.2g} of KL/H by itself, above the budget of {budget.ne:g}",)
    return Granted(layers={path: taken[path].effect for path in layers}, notes=notes)


def cost_of(site: SiteReport, name: str) -> float:
    """What `name` spends at `site`: nothing in hp, for a gradient, or where it is not known or not finite
    (then only force admits it, and the plan counts what its sum lacks)."""
    measured = site.measured(name)
    if name == HP or site.problem.gemm is not Gemm.OUTPUT or measured is None:
        return 0.0
    effect = known_effect(measured.errors.get("ne"))
    return upper_bound(effect) if effect is not None else 0.0


def is_forced(decision: Decision | None) -> bool:
    return decision is not None and decision.reason.startswith("forced by")


def _layer_ways(path: str, layer: Layer, budget: Budget) -> list[Way]:
    """The best choice for each effect that `output` can have, where spending more also saves time."""
    output = next((site for site in layer.sites if site.problem.gemm is Gemm.OUTPUT), None)
    decided = layer.fixed.get(Gemm.OUTPUT)
    spent = cost_of(output, decided.candidate) if output and decided else 0.0
    if not layer.options:
        if output is None or decided is None or decided.candidate == HP or is_forced(decided):
            return [Way(item=path, name=HP, time=0.0, effect=spent)]
        work = _work(output)
        return [
            Way(item=path, name=HP, time=2 * work, effect=0.0),
            Way(item=path, name=decided.candidate, time=work, effect=spent),
        ]
    allowed = allowed_choices(
        layer.options,
        layer.savings,
        min_speedup=budget.min_speedup,
        fixed=set(layer.fixed),
        region=layer.region,
    )
    levels: dict[float, list[Choice]] = {}
    for choice in allowed:
        option = choice.options.get(Gemm.OUTPUT)
        cost = cost_of(output, option.name) if output and option else spent
        levels.setdefault(cost, []).append(choice)
    ways: list[Way] = []
    last: Choice | None = None
    for cost in sorted(levels):
        best = best_of(levels[cost])
        if last is None or (best.microseconds < last.microseconds and not tied(last, best)):
            names = " ".join(option.name for option in best.options.values())
            ways.append(Way(item=path, name=names, time=best.microseconds, effect=cost))
            last = best
    return ways


def _work(site: SiteReport) -> float:
    return float(site.problem.m * site.problem.n * site.problem.k)
