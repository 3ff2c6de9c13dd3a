"""Planning again with the effects of a later window and the times of the report: what would change."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from loka.core.error import Estimate
from loka.core.exceptions import LokaError, PlanMismatch
from loka.core.recipe import Gemm, recipe_in
from loka.core.records.parts import WHOLE, joined_alike
from loka.core.records.plan import Plan
from loka.core.records.report import HP, Report
from loka.planner.diff import PlanDiff, diff
from loka.planner.plan import plan


def with_effects(
    report: Report,
    effects: Mapping[str, Mapping[str, Estimate]],
    alike: Mapping[str, Mapping[str, float]] | None = None,
) -> Report:
    """`report` with other effects on KL/H: by layer and recipe, as `core.drift.effects_of` gives them.

    A candidate whose recipe is not in `effects` keeps its own; times and errors stay as they are. `alike`: correlations
    of layers (core/records/parts.py) in the place of the report's, pair by pair.
    """
    sites = {}
    for name, site in report.sites.items():
        measurements, in_regions = dict(site.measurements), dict(site.region_kl)
        if site.problem.gemm is Gemm.OUTPUT:
            for candidate, measured in site.measurements.items():
                recipe = recipe_in(candidate)
                effect = effects.get(site.path, {}).get(recipe)
                if candidate != HP and not measured.unsupported and effect is not None:
                    measurements[candidate] = replace(measured, errors={**measured.errors, "ne": effect})
            fresh = {recipe: effects.get(site.path, {}).get(recipe) for recipe in in_regions}
            in_regions |= {recipe: {**in_regions[recipe], WHOLE: kl} for recipe, kl in fresh.items() if kl is not None}
        sites[name] = replace(site, measurements=measurements, region_kl=in_regions)
    return replace(report, sites=sites, alike=joined_alike(alike or {}, report.alike, (1, 0)))


def replan(
    made: Plan,
    report: Report,
    effects: Mapping[str, Mapping[str, Estimate]],
    alike: Mapping[str, Mapping[str, float]] | None = None,
) -> PlanDiff:
    """What `made`'s budget, forced sites and target would decide differently now: `report` as it was against it
    `with_effects`. What `confirm` took back is not asked again.

    Raises PlanMismatch for a report of another model or machine than the plan's, LokaError for a plan with
    limits on tasks or segments.
    """
    if made.limits:
        raise LokaError(
            f"the plan has limits on {', '.join(name or 'all rows' for name in made.limits)}",
            why=["effects of a later window are those of the whole model"],
            way_out="probe with the same tasks and segments, measure, and plan from that: loka probe, "
            "loka measure, loka plan",
        )
    differences = report.model.differences(made.model) + report.machine.differences(made.machine)
    if differences:
        raise PlanMismatch(
            "this report is not the one behind the plan",
            why=differences,
            way_out="give the report that the plan was made from",
        )
    asked: dict[str, Any] = {"force": dict(made.force), "target": made.target}
    now = with_effects(report, effects, alike)
    return diff(plan(report, made.budget, **asked), plan(now, made.budget, **asked))
