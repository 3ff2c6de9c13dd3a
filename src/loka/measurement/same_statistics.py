"""Whether statistics are those that a report was measured on, or a plan was made of."""

import math
from collections.abc import Iterable

from loka.core.error import Estimate
from loka.core.exceptions import LokaError, truncated
from loka.core.recipe import RECIPES, Gemm, recipe_in
from loka.core.records.plan import Plan
from loka.core.records.report import HP, Report
from loka.core.records.stats import Stats
from loka.measurement.predicted_kl import predicted_kl

_SAME = 1e-4  # relative: float32 sums of other machines differ by less, other batches by percents


def require_measured_on(report: Report, stats: Stats) -> None:
    """Raises LokaError for a report of other statistics. One for inference was measured on what `for_inference` made
    of them, so that its KL/H are compared, where it has any."""
    if report.stats_digest == stats.digest():
        return
    outputs = [site for site in report.sites.values() if site.problem.gemm is Gemm.OUTPUT]
    why = [f"it is of {report.stats_digest[:16]}, and these are {stats.digest()[:16]}"]
    if len(outputs) == len(report.sites):
        predicted = [
            (site.path, candidate, measured.errors["ne"])
            for site in outputs
            for candidate, measured in site.measurements.items()
            if "ne" in measured.errors
        ]
        why = _others(predicted, stats)
    if why:
        raise LokaError(
            "the report was measured on other statistics",
            why=why,
            way_out="give the statistics that it was measured on, or leave one of them out",
        )


def require_planned_from(plan: Plan, stats: Stats) -> None:
    """Raises LokaError where the KL/H that the plan carries are not those of `stats`. A plan without any does not
    tell."""
    predicted = [
        (decision.path, decision.candidate, decision.kl)
        for decision in plan.decisions.values()
        if decision.problem.gemm is Gemm.OUTPUT and decision.candidate != HP and decision.kl is not None
    ]
    if why := _others(predicted, stats):
        raise LokaError(
            "the plan was not made of the statistics to compare with",
            why=why,
            way_out="give the statistics behind the plan, or none: effects are compared with those it carries then",
        )


def _others(predicted: Iterable[tuple[str, str, Estimate]], stats: Stats) -> list[str]:
    lines = []
    for path, candidate, there in predicted:
        recipe = RECIPES.get(recipe_in(candidate))
        layer = stats.layers.get(path)
        here = predicted_kl(layer, recipe) if layer is not None and recipe is not None else None
        if recipe is not None and (here is None or not math.isclose(here.value, there.value, rel_tol=_SAME)):
            lines.append(f"{path}: {candidate} costs KL/H {there} there, and {here or 'nothing known'} by these")
    return truncated(lines, 6)
