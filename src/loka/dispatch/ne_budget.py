"""Spending `Budget.ne`: what each layer's `output` GEMM, and each chain, may cost the model in NE.

    effect of a plan = sum over FP8 output GEMMs of their predicted increase of NE

The effects of sites add up (docs/budget.md), so one limit for the model is a knapsack over its layers
(dispatch/knapsack.py). A layer's ways are its allowed choices of all three GEMMs, the best one for each
effect its `output` GEMM can have; gradients have none, and keep their own rules. A chain or a stack of
cross layers is one item with the layers inside of it: as a whole, or in parts. Of times within the noise
the one that costs less NE is taken. Without times a GEMM's multiplications stand for them, halved in FP8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loka.core.budget import Budget, spends
from loka.core.chain_recipe import chain_recipe_named
from loka.core.cross_record import Whole
from loka.core.plan import Decision, known_effect
from loka.core.recipe import Gemm
from loka.core.report import HP, Report, SiteReport
from loka.core.timing import TIE
from loka.dispatch.chains import Objection, admitted_recipes, whole_effect, wholes_of
from loka.dispatch.joint import Choice, Layer, allowed_choices, best_of, tied
from loka.dispatch.knapsack import Way, pareto, spend, together

WAY_OUT = "probe its effect (docs/ne.md), or plan with ne=None, on error alone"


@dataclass(frozen=True, kw_only=True)
class Granted:
    """`layers`: what the `output` GEMM of each may spend; `wholes`: the recipe of each chain or stack that
    runs as a whole."""

    layers: Mapping[str, float]
    wholes: Mapping[str, str]
    notes: tuple[str, ...]


def grant(
    report: Report,
    budget: Budget,
    layers: Mapping[str, Layer],
    free: Mapping[str, Decision],
    objects: Objection,
) -> Granted:
    """Spends `budget.ne` over `layers`. `free` are the decisions as they would be without that limit."""
    assert budget.ne is not None
    ways = {path: _layer_ways(path, layer, budget) for path, layer in layers.items()}
    items: dict[str, list[Way]] = dict(ways)
    wholes = {}
    for whole in wholes_of(report, budget):
        as_one = _whole_ways(whole, report, budget, ways, free, objects)
        if as_one:
            wholes[whole.name] = whole
            for path in whole.linears:
                del items[path]
            members = [ways[path] for path in whole.linears]
            items[whole.name] = [
                *as_one,
                *together(whole.name, members, offset=_around(whole, report, layers)),
            ]
    taken = spend(items, budget.ne)
    formed = {name: way.name for name, way in taken.items() if name in wholes and not way.parts}
    granted = {leaf.item: leaf.effect for way in taken.values() for leaf in way.leaves()}
    for name in formed:  # the decisions inside say what the sites would make of the same effect
        members_of = {path: ways[path] for path in wholes[name].linears}
        granted.update({path: way.effect for path, way in spend(members_of, taken[name].effect).items()})
    spent = sum(way.effect for way in taken.values())
    notes = tuple(report.unknown_effects())
    if spent > budget.ne * (1 + 1e-9):
        notes += (f"what was forced spends {spent:.2g} of NE by itself, above the budget of {budget.ne:g}",)
    return Granted(layers={path: granted[path] for path in layers}, wholes=formed, notes=notes)


def cost_of(site: SiteReport, name: str) -> float:
    """What `name` spends at `site`: nothing in hp, for a gradient, or where it is not known or not finite
    (then only force admits it, and the plan counts what its sum lacks)."""
    if name == HP or site.problem.gemm is not Gemm.OUTPUT or name not in site.measurements:
        return 0.0
    effect = known_effect(site.measurements[name].errors.get("ne"))
    return spends(effect) if effect is not None else 0.0


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
        layer.options, layer.sharing, min_speedup=budget.min_speedup, fixed=set(layer.fixed)
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


def _whole_ways(
    whole: Whole,
    report: Report,
    budget: Budget,
    ways: Mapping[str, list[Way]],
    free: Mapping[str, Decision],
    objects: Objection,
) -> list[Way]:
    """As a whole, by each recipe within the budget. One that was not timed is taken to be a little faster
    than its parts at their fastest: Budget(chains="always") asks for it."""
    admitted, _ = admitted_recipes(whole, report, budget, free, objects)
    found: list[Way] = []
    for name, measured in admitted.items():
        effect = whole_effect(whole, chain_recipe_named(name), report)
        if effect is None:
            continue
        if measured.microseconds is not None:
            time = measured.microseconds.value
        else:
            time = sum(min(way.time for way in ways[path]) for path in whole.linears) * (1 - TIE)
        if (time, spends(effect)) not in [(way.time, way.effect) for way in found]:  # the budget's order
            found.append(Way(item=whole.name, name=name, time=time, effect=spends(effect)))
    return pareto(found)


def _around(whole: Whole, report: Report, layers: Mapping[str, Layer]) -> float:
    """What a whole takes in hp besides the GEMMs of its sites: microseconds that running in parts keeps."""
    hp = report.chain_times[whole.name][HP].microseconds if whole.name in report.chain_times else None
    if hp is None:
        return 0.0
    inside = 0.0
    for path in whole.linears:
        for site in layers[path].sites:
            time = site.measurements[HP].microseconds
            if site.problem.gemm in layers[path].options and time is not None:
                inside += time.value
    return hp.value - inside


def _work(site: SiteReport) -> float:
    return float(site.problem.m * site.problem.n * site.problem.k)
