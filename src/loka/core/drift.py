"""Has the data moved since a plan was made? Statistics of a later window against those of the plan.

    amax shift  = log2( max amax after / max amax before )         octaves, by operand
    rms shift   = log2( rms after / rms before )
    growth      = predicted NE effect after / before               at the recipe that the plan runs

The valve closes a layer (returns it to hp) where its FP8 GEMMs are in doubt: an operand's amax rose by
more than an octave, which is the margin of delayed scales, or its effect on NE more than doubled, beyond
the intervals of both, to more than a site's fair half of the budget. A falling amax does no harm: scales
follow. One unsafe window closes a layer; three safe ones in a row open it again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loka.core.budget import spends, total_effect
from loka.core.error import Estimate
from loka.core.exceptions import PlanMismatch
from loka.core.plan import Plan
from loka.core.recipe import SHARED
from loka.core.report import HP
from loka.core.stats import OPERANDS, Distribution, Stats
from loka.core.table import format_table


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When the valve closes a layer, and after how many safe windows it opens it again.

    `ne` is the budget that effects are small against where the plan has none.
    """

    amax_octaves: float = 1.0
    growth: float = 2.0
    reopen_after: int = 3
    ne: float = 1e-4


@dataclass(frozen=True, kw_only=True)
class Shift:
    """Of one operand, in octaves; None where one of the windows does not tell."""

    amax: float | None
    rms: float | None


@dataclass(frozen=True, kw_only=True)
class LayerDrift:
    """One layer. `recipe` is what its `output` GEMM runs by, None in hp; effects are those of that recipe.
    `unsafe` says why the valve should close it; empty where it is safe, or all in hp."""

    path: str
    recipe: str | None
    shifts: Mapping[str, Shift]
    before: Estimate | None
    after: Estimate | None
    unsafe: tuple[str, ...]

    @property
    def growth(self) -> float | None:
        if self.before is None or self.after is None or not self.before.value > 0:
            return None
        return self.after.value / self.before.value


@dataclass(frozen=True, kw_only=True)
class Drift:
    """All layers of a plan. `total` is what the plan costs now, as far as it is known."""

    layers: Mapping[str, LayerDrift]
    total: Estimate | None
    budget: float | None

    @property
    def unsafe(self) -> frozenset[str]:
        return frozenset(path for path, layer in self.layers.items() if layer.unsafe)

    @property
    def over_budget(self) -> bool:
        return self.budget is not None and self.total is not None and spends(self.total) > self.budget

    def __str__(self) -> str:
        header = (
            "layer",
            "output runs",
            "input",
            "weight",
            "grad_output",
            "NE before",
            "NE now",
            "growth",
            "valve",
        )
        rows = []
        for layer in self.layers.values():
            rows.append(
                (
                    layer.path,
                    layer.recipe or HP,
                    *(_octaves(layer.shifts.get(operand)) for operand in OPERANDS),
                    f"{layer.before.value:.1e}" if layer.before else "-",
                    f"{layer.after.value:.1e}" if layer.after else "-",
                    f"{layer.growth:.2f}x" if layer.growth is not None else "-",
                    "CLOSE: " + "; ".join(layer.unsafe) if layer.unsafe else "",
                )
            )
        lines = [
            "Shift of amax (of rms), in octaves, and of the predicted increase of NE",
            format_table(header, rows),
        ]
        if self.total is not None:
            state = (
                f": {'ABOVE' if self.over_budget else 'within'} the budget of {self.budget:g}"
                if self.budget
                else ""
            )
            lines.append(f"the plan now costs NE +{self.total}{state}")
        return "\n".join(lines)


def drift(plan: Plan, after: Stats, *, before: Stats | None = None, limits: Limits | None = None) -> Drift:
    """How `after` differs from what `plan` was made from.

    Args:
        before: the statistics behind the plan; without them only effects on NE are compared, with those
            that the plan carries.

    Raises:
        PlanMismatch: statistics of another model; the differences are listed.
    """
    limits = limits or Limits()
    for which, stats in (("before", before), ("after", after)):
        differences = stats.model.differences(plan.model) if stats is not None else []
        if differences:
            raise PlanMismatch(
                f"the statistics `{which}` are not of the model of this plan",
                why=differences,
                way_out="compare windows of one model, with the same mods",
            )
    recipes = plan.output_recipes
    negligible = (plan.budget.ne or limits.ne) / (2 * max(len(recipes), 1))
    layers = {}
    for path in after.layers:
        layers[path] = _layer(path, plan, recipes, before, after, limits, negligible)
    now = [layer.after for layer in layers.values() if layer.after is not None]
    return Drift(layers=layers, total=total_effect(now) if now else None, budget=plan.budget.ne)


def valve(history: Sequence[Drift], *, limits: Limits | None = None) -> frozenset[str]:
    """The layers to hold in hp after these windows, oldest first."""
    limits = limits or Limits()
    safe: dict[str, int] = {}
    for window in history:
        for path in window.layers:
            if path in window.unsafe:
                safe[path] = 0
            elif path in safe:
                safe[path] += 1
    return frozenset(path for path, windows in safe.items() if windows < limits.reopen_after)


def effects_of(stats: Stats) -> dict[str, dict[str, Estimate]]:
    """Layer -> recipe -> predicted increase of NE, where it is known."""
    found: dict[str, dict[str, Estimate]] = {}
    for path, layer in stats.layers.items():
        estimates = {name: effect.ne() for name, effect in layer.effects.items()}
        found[path] = {name: e for name, e in estimates.items() if math.isfinite(e.value)}
    return found


def _layer(
    path: str,
    plan: Plan,
    recipes: Mapping[str, str],
    before: Stats | None,
    after: Stats,
    limits: Limits,
    negligible: float,
) -> LayerDrift:
    then = before.layers.get(path) if before is not None else None
    shifts = {}
    for operand, learnt in after.layers[path].operands.items():
        earlier = then.operands.get(operand) if then else None
        if operand in OPERANDS and earlier is not None:
            shifts[operand] = Shift(
                amax=_ratio(_amax(learnt), _amax(earlier)), rms=_ratio(_rms(learnt), _rms(earlier))
            )
    recipe = recipes.get(path)
    old = new = None
    if recipe is not None:
        new = _effect(after, path, recipe)
        old = _effect(before, path, recipe) if before is not None else None
        planned = plan.decisions.get(f"{path}/output")
        if old is None and planned is not None and path not in plan.inside:
            old = planned.ne
    unsafe = []
    for operand in _low_operands(path, plan):
        shift = shifts.get(operand)
        if shift is not None and shift.amax is not None and shift.amax > limits.amax_octaves:
            unsafe.append(f"amax of {operand} rose by {shift.amax:.1f} octaves")
    if old is not None and new is not None:
        grown = new.value > limits.growth * old.value and new.low > old.high
        if grown and spends(new) > negligible:
            unsafe.append(f"its effect on NE grew {new.value / max(old.value, 1e-300):.1f} times")
    return LayerDrift(path=path, recipe=recipe, shifts=shifts, before=old, after=new, unsafe=tuple(unsafe))


def _effect(stats: Stats, path: str, recipe: str) -> Estimate | None:
    effect = stats.layers[path].effects.get(recipe) if path in stats.layers else None
    found = effect.ne() if effect is not None else None
    return found if found is not None and math.isfinite(found.value) else None


def _low_operands(path: str, plan: Plan) -> list[str]:
    """The operands of the layer that some GEMM takes in FP8."""
    if path in plan.inside:
        return list(OPERANDS)
    candidates = plan.candidates(path)
    return [name for name in OPERANDS if any(candidates[gemm] != HP for gemm, _ in SHARED[name])]


def _amax(learnt: Distribution) -> float | None:
    """The largest |x| of the window; of a weight, that of its mean."""
    values = learnt.tensors.get("amax", learnt.tensors.get("mean"))
    return float(values.abs().max()) if values is not None and values.numel() else None


def _rms(learnt: Distribution) -> float | None:
    mean, square = learnt.tensors.get("mean"), learnt.tensors.get("square")
    if mean is None:
        return None
    energy = float(mean.double().square().mean())
    if square is not None:  # of a Gaussian: the scatter's diagonal
        count = learnt.numbers.get("count", 0)
        if not count:
            return None
        energy += float(square.double().mean()) / count
    return math.sqrt(energy)


def _ratio(after: float | None, before: float | None) -> float | None:
    if after is None or before is None or not (after > 0 and before > 0):
        return None
    return math.log2(after / before)


def _octaves(shift: Shift | None) -> str:
    if shift is None or shift.amax is None:
        return "-"
    return f"{shift.amax:+.2f} ({shift.rms:+.2f})" if shift.rms is not None else f"{shift.amax:+.2f}"
