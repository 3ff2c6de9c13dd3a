"""Which chains and stacks of cross layers run as a whole: quality decides which recipe may run, speed
decides among those and hp.

A recipe may run where every site of the chain keeps the budget's error limits under the recipe that
stands for it (core/chain_recipe.py), less what the chain's own recipe loses beyond that. It does run
where the whole chain is faster than hp by `min_speedup`, and faster than what the plan's sites would
make of it. Under a budget of NE it is the knapsack that weighs it against its sites
(dispatch/ne_budget.py). All of it happens inside of core/fusion.py's switch alone; else everything is left to
its sites.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from loka.core.budget import Budget, total_effect
from loka.core.chain import Chain
from loka.core.chain_recipe import ChainRecipe, chain_recipe_named
from loka.core.cross_record import CrossStack, Whole
from loka.core.error import Estimate
from loka.core.fusion import NOT_PLANNED, fusion_forced
from loka.core.plan import ChainDecision, CrossDecision, Decision
from loka.core.recipe import Gemm
from loka.core.report import HP, Measurement, Report, SiteReport, site_name
from loka.nn import cross
from loka.nn.chain import objection, pointless
from loka.nn.chain_kernels import inner_kernels
from loka.nn.linears import is_prediction

Objection = Callable[[Measurement, Budget, Gemm], str | None]
NOT_AMONG = "not timed: Settings.chain_recipes says which recipes are"


def decide_chains(
    report: Report,
    budget: Budget,
    decisions: Mapping[str, Decision],
    objects: Objection,
    *,
    granted: Mapping[str, str] | None = None,
) -> tuple[dict[str, ChainDecision], dict[str, CrossDecision], tuple[str, ...]]:
    """The chains and stacks to form, and why each other one is left to its sites.

    Args:
        decisions: of the sites by themselves. A forced one, or one that the budget keeps in hp,
            keeps its layer out of any chain.
        objects: why the budget does not admit a measurement, or None.
        granted: under a budget of NE: the recipe of each chain or stack that it is spent on.
    """
    chains: dict[str, ChainDecision] = {}
    crosses: dict[str, CrossDecision] = {}
    notes = []
    asked = budget.chains == "always" or (budget.chains == "measured" and report.chain_times)
    if asked and not fusion_forced():
        notes.append(NOT_PLANNED)
    for whole in wholes_of(report, budget):
        decision = _decide(whole, report, budget, decisions, objects, granted)
        if isinstance(decision, ChainDecision):
            chains[whole.name] = decision
        elif isinstance(decision, CrossDecision):
            crosses[whole.name] = decision
        else:
            kind = "chain at" if isinstance(whole, Chain) else "stack of cross layers at"
            notes.append(f"{kind} {whole.name} stays in parts: {decision}")
    return chains, crosses, tuple(notes)


def wholes_of(report: Report, budget: Budget) -> list[Whole]:
    """The chains and stacks that `budget` may form; none outside of `forced_fusion`."""
    if budget.chains == "never" or not fusion_forced():
        return []
    return [*(chain for chain in report.chains if not chain.lone), *report.crosses]


def whole_effect(whole: Whole, recipe: ChainRecipe, report: Report) -> Estimate | None:
    """The predicted increase of NE under `recipe`, summed over its `output` GEMMs; None if one is unknown."""
    found = []
    for path in whole.linears:
        site = report.sites.get(site_name(path, Gemm.OUTPUT))
        effects = [
            measured.errors["ne"]
            for name, measured in (site.measurements.items() if site else ())
            if _of_recipe(name, recipe.errors[Gemm.OUTPUT]) and "ne" in measured.errors
        ]
        if not effects:
            return None
        found.append(effects[0])
    return total_effect(found)


def admitted_recipes(
    whole: Whole,
    report: Report,
    budget: Budget,
    decisions: Mapping[str, Decision],
    objects: Objection,
) -> tuple[dict[str, Measurement], dict[str, str]]:
    """By recipe within the budget: how the whole was measured under it; and why another is not, or "" and why
    none can be.

    The comparison with its own sites is left to the caller.
    """
    reason = next((why for p in whole.linears if (why := kept_apart(p, report, budget, decisions))), None)
    if reason is None and isinstance(whole, Chain):
        reason = objection(whole)
    if reason is not None:
        return {}, {"": reason}
    times = report.chain_times.get(whole.name, {})
    if budget.chains == "measured" and not times:
        return {}, {"": "it was not timed; Budget(chains='always') forms it on its errors alone"}
    refused: dict[str, str] = {}
    admitted: dict[str, Measurement] = {}
    for name in budget.chain_recipes:
        recipe = chain_recipe_named(name)
        why = _recipe_objection(whole, recipe)
        why = why or _inadmissible(whole, recipe, report, budget, objects)
        measured = times.get(recipe.candidate)
        if why is None and measured is not None and measured.unsupported:
            why = measured.unsupported
        if why is None and budget.chains == "measured":
            why = NOT_AMONG if measured is None else too_slow(measured, times.get(HP), budget)
        if why is not None:
            refused[name] = why
        else:
            admitted[name] = measured or Measurement()
    return admitted, refused


def _decide(
    whole: Whole,
    report: Report,
    budget: Budget,
    decisions: Mapping[str, Decision],
    objects: Objection,
    granted: Mapping[str, str] | None,
) -> ChainDecision | CrossDecision | str:
    admitted, refused = admitted_recipes(whole, report, budget, decisions, objects)
    times = report.chain_times.get(whole.name, {})
    options: list[tuple[float, str, ChainRecipe]] = []
    for name, measured in admitted.items():
        why = None
        if granted is not None:
            why = None if granted.get(whole.name) == name else "its NE is better spent elsewhere"
            if why and measured.microseconds and HP in times:
                why = slower_than_sites(whole.linears, measured, times[HP], decisions) or why
        elif budget.chains == "measured":
            why = slower_than_sites(whole.linears, measured, times[HP], decisions)
        if why is not None:
            refused[name] = why
            continue
        # What was timed goes before what was not.
        value = measured.microseconds.value if measured.microseconds else math.inf
        options.append((value, name, chain_recipe_named(name)))
    if not options:
        told = [f"{name}: {refused[name]}" for name in _telling(whole, refused)]
        return refused.get("") or "; ".join(told)
    _, name, recipe = min(options, key=lambda option: option[0])  # ties: the budget's own order
    measured = admitted[name]
    fields: dict[str, Any] = {
        "recipe": name,
        "candidates": inner_kernels(whole, recipe, report.sites),
        "reason": "fastest as a whole"
        if measured.microseconds
        else "not timed; its errors are within the budget",
        "microseconds": measured.microseconds,
        "hp_microseconds": times.get(HP, Measurement()).microseconds,
        "speedup": measured.speedup,
        "ne": whole_effect(whole, recipe, report),
    }
    if isinstance(whole, Chain):
        return ChainDecision(chain=whole, **fields)
    return CrossDecision(stack=whole, **fields)


def kept_apart(path: str, report: Report, budget: Budget, decisions: Mapping[str, Decision]) -> str | None:
    """Why a linear layer may be in no whole, or None."""
    if budget.keep_prediction and is_prediction(report.model.layers[path].out_features):
        return f"{path} is taken for a prediction layer"
    for gemm in Gemm:
        decision = decisions.get(site_name(path, gemm))
        if decision is not None and decision.reason.startswith(("forced by", "kept by")):
            return f"{decision.site} is {decision.reason}"
    if site_name(path, Gemm.OUTPUT) not in decisions:
        return f"{path} was not measured"
    return None


def _telling(whole: Whole, refused: Mapping[str, str]) -> list[str]:
    """Of the recipes refused those whose reason says something: not those that are not for such a whole."""
    names = [name for name in refused if name]
    return [n for n in names if _recipe_objection(whole, chain_recipe_named(n)) is None] or names


def _recipe_objection(whole: Whole, recipe: ChainRecipe) -> str | None:
    return cross.recipe_objection(recipe) if isinstance(whole, CrossStack) else pointless(whole, recipe)


def _inadmissible(
    whole: Whole, recipe: ChainRecipe, report: Report, budget: Budget, objects: Objection
) -> str | None:
    activations = {k.epilogue.activation for k in whole.links} if isinstance(whole, Chain) else set()
    for path in whole.linears:
        for gemm in Gemm:
            site = report.sites.get(site_name(path, gemm))
            if site is None:
                continue  # a GEMM that never runs
            lost = recipe.lost_db(gemm, activations)
            reason = _site_objection(site, recipe.errors[gemm], budget, objects, lost)
            if reason is not None:
                return f"{site.name}: {reason}"
    return None


def _site_objection(
    site: SiteReport, wanted: str, budget: Budget, objects: Objection, lost_db: float
) -> str | None:
    """None if any kernel kept the limits under the recipe `wanted`: its errors are the recipe's, but for
    `lost_db`."""
    reasons = [
        objects(_less_exact(measured, lost_db), budget, site.problem.gemm)
        for name, measured in site.measurements.items()
        if _of_recipe(name, wanted) and measured.errors
    ]
    if not reasons:
        return f"no error of {wanted} was measured, which stands for the chain's own"
    return None if None in reasons else reasons[0]


def _less_exact(measured: Measurement, db: float) -> Measurement:
    """As measured, with a `sqnr_db` that is lower by `db` and relative errors that are larger by as much."""
    if not db:
        return measured
    errors = dict(measured.errors)
    if "sqnr_db" in errors:
        was = errors["sqnr_db"]
        errors["sqnr_db"] = Estimate(was.value - db, was.low - db, was.high - db)
    if "mere" in errors:
        was, factor = errors["mere"], 10 ** (db / 20)
        errors["mere"] = Estimate(was.value * factor, was.low * factor, was.high * factor)
    return replace(measured, errors=errors)


def _of_recipe(candidate: str, recipe: str) -> bool:
    return candidate.partition("@")[0].endswith(f":{recipe}")


def too_slow(measured: Measurement | None, hp: Measurement | None, budget: Budget) -> str | None:
    """Why a whole is not faster than hp by as much as the budget asks, or None."""
    if measured is None or measured.speedup is None or measured.microseconds is None:
        return "not timed"
    if hp is None or hp.microseconds is None:
        return "hp was not timed"
    if not measured.speedup.low >= budget.min_speedup:
        return f"speed-up {measured.speedup} is below {budget.min_speedup:g}"
    return None


def slower_than_sites(
    linears: Sequence[str], measured: Measurement, hp: Measurement, decisions: Mapping[str, Decision]
) -> str | None:
    """Why a whole that is not `too_slow` is slower than its sites as `decisions` have them, or None."""
    assert measured.microseconds is not None  # or it had been too slow
    assert hp.microseconds is not None
    by_sites = hp.microseconds.value - max(saved_by_sites(linears, decisions), 0.0)
    if measured.microseconds.value > by_sites:
        return f"{measured.microseconds} us, where its sites by themselves need about {by_sites:.1f}"
    return None


def saved_by_sites(linears: Iterable[str], decisions: Mapping[str, Decision]) -> float:
    """Microseconds that the sites of `linears` by themselves save over hp."""
    saved = 0.0
    for path in linears:
        for gemm in Gemm:
            site = decisions.get(site_name(path, gemm))
            if site and site.microseconds and site.hp_microseconds:
                saved += site.hp_microseconds.value - site.microseconds.value + site.saved_us
    return saved
