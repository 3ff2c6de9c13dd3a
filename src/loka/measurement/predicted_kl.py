"""What a recipe at a layer's `output` GEMM is predicted to cost the model: KL/H, which needs no labels."""

import math
from collections.abc import Iterable, Mapping

from loka.compiler.joint_sites import ARMS
from loka.core.error import Estimate
from loka.core.numerics.effect import Effect, joint_loss
from loka.core.recipe import RECIPES, Casts, Recipe, recipe_in
from loka.core.records.parts import WHOLE, tasks_in
from loka.core.records.stats import LinearStats, Stats
from loka.statistics.effect_casts import CASTS
from loka.statistics.effect_depths import depth_loss

REGION_RECIPES = tuple(recipe_in(output) for output, *_ in ARMS.values())


def predicted_kl(layer: LinearStats, recipe: Recipe) -> Estimate | None:
    """KL/H (absolute: 1e-4 is 0.01 %) of quantizing this layer's `output` GEMM alone, with its 95 % interval.

    Effects of several layers add up. Of casts that were not tried while probing the histograms
    tell, with the interval that sampling left at this layer; not of centred or hot ones. None where
    the recipe has no `output` GEMM, or nothing is known of the layer (`LinearStats.no_effect` says why) or of
    these casts.
    """
    if recipe.output is None:
        return None
    effect = _effect(layer, recipe)
    if effect is not None:
        found = effect.kl()
        return found if math.isfinite(found.value) else None
    left = recipe.output[0]
    if left.centred or left.hot:  # histograms are by the means and columns of their samples, not by a plan's
        return None
    value = depth_kl(layer, recipe.output)
    if value is None:
        return None
    estimates = [effect.kl() for effect in layer.effects.values()]
    factor = max((e.high / e.value for e in estimates if e.value > 0), default=1.0)
    return Estimate(value, value / factor, value * factor)


def predicted_kl_by_part(layer: LinearStats, recipe: Recipe) -> dict[str, Estimate]:
    """The same of single tasks and segments (core/records/parts.py), by name; without those of which these
    casts were not tried: histograms are of all rows and tasks together."""
    found: dict[str, Estimate] = {}
    for part, effects in layer.effects_by_part.items():
        effect = _tried(effects, recipe) if recipe.output is not None else None
        if effect is not None and math.isfinite(effect.kl().value):
            found[part] = effect.kl()
    return found


def region_kl(layer: LinearStats, recipes: Iterable[str]) -> dict[str, dict[str, Estimate]]:
    """KL/H of `recipes` that regions run at `output`, by recipe and part; without those of which nothing is known.

    Kernels race by recipes of the same time and SQNR, whose KL/H is another.
    """
    found: dict[str, dict[str, Estimate]] = {}
    for name in recipes:
        whole, by_part = predicted_kl(layer, RECIPES[name]), predicted_kl_by_part(layer, RECIPES[name])
        if whole is not None or by_part:
            found[name] = {**({} if whole is None else {WHOLE: whole}), **by_part}
    return found


def tasks_together(stats: Stats) -> list[str]:
    """A note where KL/H is of several tasks that nobody named: one may lose what another hides."""
    effects = [effect for layer in stats.layers.values() for effect in layer.effects.values()]
    most = max((len(effect.probabilities) for effect in effects), default=0)
    if most < 2 or tasks_in(stats.parts):
        return []
    return [
        f"KL/H is that of {most} tasks together, the sum of their losses over that of their entropies: name "
        "them to the probe for the KL/H of each (renew_effects(..., tasks=...); docs/segments.md)"
    ]


def joint_kl(layers: Mapping[str, LinearStats], chosen: Mapping[str, Recipe]) -> float | None:
    """KL/H of quantizing several layers together: the sum of their effects, but for what their errors do
    to all samples alike. Those shifts of the logit add before they are squared (core/numerics/effect.py).

    `chosen` maps layers to the recipe of their `output` GEMM. None where an effect is not known.
    """
    effects = []
    for path, recipe in chosen.items():
        effect = _effect(layers[path], recipe)
        if effect is None or not effect.entropy > 0:
            return None
        effects.append(effect)
    return joint_loss(effects) / effects[0].entropy if effects else 0.0


def _effect(layer: LinearStats, recipe: Recipe) -> Effect | None:
    return _tried(layer.effects, recipe)


def _tried(effects: Mapping[str, Effect], recipe: Recipe) -> Effect | None:
    names = [recipe.name, *(name for name, casts in CASTS.items() if casts == recipe.output)]
    return next((effects[name] for name in names if name in effects), None)


def depth_kl(layer: LinearStats, casts: Casts) -> float | None:
    """KL/H from sensitivity-weighted depth histograms alone (statistics/effect_depths.py); None without
    them."""
    loss = depth_loss(layer, casts)
    entropy = next((effect.entropy for effect in layer.effects.values()), 0.0)
    return None if loss is None or not entropy > 0 else loss / entropy
