"""Which chains and stacks of cross layers run as a whole: quality decides which recipe may run, speed
decides among those and hp.

A recipe may run where every site of the chain keeps the budget's error limits under the recipe that
stands for it (core/chain_recipe.py). It does run where the whole chain is faster than hp by
`min_speedup`, and faster than what the plan's sites would make of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from loka.core.budget import Budget
from loka.core.chain import Chain
from loka.core.chain_recipe import ChainRecipe, chain_recipe_named
from loka.core.cross_record import CrossStack, Whole
from loka.core.plan import ChainDecision, CrossDecision, Decision
from loka.core.recipe import Gemm
from loka.core.report import HP, Measurement, Report, SiteReport, site_name
from loka.nn.chain import objection
from loka.nn.chain_kernels import inner_kernels
from loka.nn.cross import recipe_objection
from loka.nn.linears import is_prediction

Objection = Callable[[Measurement, Budget], str | None]


def decide_chains(
    report: Report, budget: Budget, decisions: Mapping[str, Decision], objects: Objection
) -> tuple[dict[str, ChainDecision], dict[str, CrossDecision], tuple[str, ...]]:
    """The chains and stacks to form, and why each other one is left to its sites.

    Args:
        decisions: of the sites by themselves. A forced one, or one that the budget keeps in hp,
            keeps its layer out of any chain.
        objects: why the budget does not admit a measurement, or None.
    """
    chains: dict[str, ChainDecision] = {}
    crosses: dict[str, CrossDecision] = {}
    notes = []
    wholes: list[Whole] = [] if budget.chains == "never" else [*report.chains, *report.crosses]
    for whole in wholes:
        decision = _decide(whole, report, budget, decisions, objects)
        if isinstance(decision, ChainDecision):
            chains[whole.name] = decision
        elif isinstance(decision, CrossDecision):
            crosses[whole.name] = decision
        elif decision is not None:
            kind = "chain at" if isinstance(whole, Chain) else "stack of cross layers at"
            notes.append(f"{kind} {whole.name} stays in parts: {decision}")
    return chains, crosses, tuple(notes)


def _decide(
    whole: Whole,
    report: Report,
    budget: Budget,
    decisions: Mapping[str, Decision],
    objects: Objection,
) -> ChainDecision | CrossDecision | str | None:
    if isinstance(whole, Chain) and whole.lone:
        return None
    reason = _kept_apart(whole, report, budget, decisions)
    if reason is None and isinstance(whole, Chain):
        reason = objection(whole)
    if reason is not None:
        return reason
    times = report.chain_times.get(whole.name, {})
    if budget.chains == "measured" and not times:
        return "it was not timed; Budget(chains='always') forms it on its errors alone"
    refused: list[str] = []
    options: list[tuple[float, str, ChainRecipe]] = []
    for name in budget.chain_recipes:
        recipe = chain_recipe_named(name)
        why = recipe_objection(recipe) if isinstance(whole, CrossStack) else None
        why = why or _inadmissible(whole, recipe, report, budget, objects)
        measured = times.get(recipe.candidate)
        if why is None and measured is not None and measured.unsupported:
            why = measured.unsupported
        if why is None and budget.chains == "measured":
            why = _too_slow(whole, measured, times.get(HP), budget, decisions)
        if why is not None:
            refused.append(f"{name}: {why}")
            continue
        value = measured.microseconds.value if measured and measured.microseconds else 0.0
        options.append((value, name, recipe))
    if not options:
        return "; ".join(refused)
    _, name, recipe = min(options, key=lambda option: option[0])  # ties: the budget's own order
    measured = times.get(recipe.candidate, Measurement())
    fields: dict[str, Any] = {
        "recipe": name,
        "candidates": inner_kernels(whole, recipe, report.sites),
        "reason": "fastest as a whole"
        if measured.microseconds
        else "not timed; its errors are within the budget",
        "microseconds": measured.microseconds,
        "hp_microseconds": times.get(HP, Measurement()).microseconds,
        "speedup": measured.speedup,
    }
    if isinstance(whole, Chain):
        return ChainDecision(chain=whole, **fields)
    return CrossDecision(stack=whole, **fields)


def _kept_apart(
    whole: Whole, report: Report, budget: Budget, decisions: Mapping[str, Decision]
) -> str | None:
    for path in whole.linears:
        if budget.keep_prediction and is_prediction(report.model.layers[path].out_features):
            return f"{path} is taken for a prediction layer"
        for gemm in Gemm:
            decision = decisions.get(site_name(path, gemm))
            if decision is not None and decision.reason.startswith(("forced by", "kept by")):
                return f"{decision.site} is {decision.reason}"
        if site_name(path, Gemm.OUTPUT) not in decisions:
            return f"{path} was not measured"
    return None


def _inadmissible(
    whole: Whole, recipe: ChainRecipe, report: Report, budget: Budget, objects: Objection
) -> str | None:
    for path in whole.linears:
        for gemm in Gemm:
            site = report.sites.get(site_name(path, gemm))
            if site is None:
                continue  # a GEMM that never runs
            reason = _site_objection(site, recipe.errors[gemm], budget, objects)
            if reason is not None:
                return f"{site.name}: {reason}"
    return None


def _site_objection(site: SiteReport, wanted: str, budget: Budget, objects: Objection) -> str | None:
    """None if any kernel kept the limits under the recipe `wanted`: its errors are the recipe's."""
    reasons = [
        objects(measured, budget)
        for name, measured in site.measurements.items()
        if name.partition("@")[0].endswith(f":{wanted}") and measured.errors
    ]
    if not reasons:
        return f"no error of {wanted} was measured, which stands for the chain's own"
    return None if None in reasons else reasons[0]


def _too_slow(
    whole: Whole,
    measured: Measurement | None,
    hp: Measurement | None,
    budget: Budget,
    decisions: Mapping[str, Decision],
) -> str | None:
    if measured is None or measured.speedup is None or measured.microseconds is None:
        return "not timed"
    if hp is None or hp.microseconds is None:
        return "hp was not timed"
    if not measured.speedup.low >= budget.min_speedup:
        return f"speed-up {measured.speedup} is below {budget.min_speedup:g}"
    saved = 0.0
    for path in whole.linears:
        for gemm in Gemm:
            site = decisions.get(site_name(path, gemm))
            if site and site.microseconds and site.hp_microseconds:
                saved += site.hp_microseconds.value - site.microseconds.value + site.saved_us
    by_sites = hp.microseconds.value - max(saved, 0.0)
    if measured.microseconds.value > by_sites:
        return f"{measured.microseconds} us, where its sites by themselves need about {by_sites:.1f}"
    return None
