"""Has the data moved since a plan was made? Statistics of a later window against those of the plan.

    amax shift  = mean log2 amax after - mean log2 amax before     octaves, by operand, over batches. What moves all
                                                                   gradients alike, as the scale of a loss or a
                                                                   batch of other size does, is none of grad_output
    rms shift   = log2( rms after / rms before )
    growth      = predicted KL/H after / before                    at the recipe that the plan runs

The drift guard closes a layer (returns it to hp) where its FP8 GEMMs are in doubt: an operand's amax rose by
more than an octave, and surely rose (a batch's largest number of a heavy tail differs by octaves from the next one's;
Welch's t), or its KL/H more than doubled, beyond the intervals of both, to more than a
site's fair half of the budget. So is a centred layer whose means lie off those that are taken away, and one whose
hot columns are others now. A window's own effects are those of the means and columns that it would choose itself; what
a layer costs by those of the plan is more:

    now  = effect of the window * left * (1 + off)
    off  = error by the plan's means / by the window's, less 1     core/records/recipe_drift.py
    left = error with the plan's columns / with the hottest now

A falling amax does no harm: scales follow. One unsafe window closes a layer;
three safe ones in a row open it again. A window that does not tell the effect of an FP8 layer, or did not
see it, is no sign that all is well: such layers are `unknown`.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from loka.core.budget import known_effect, total_effect, upper_bound
from loka.core.error import Estimate, student_t_95
from loka.core.exceptions import DataRefused, PlanMismatch, require_kind
from loka.core.numerics.effect import OTHER_PARTS
from loka.core.recipe import SHARED_OPERANDS
from loka.core.records.parts import joined_alike, lost_together
from loka.core.records.plan import Plan, require_plan
from loka.core.records.recipe_drift import columns_left, off_centre
from loka.core.records.report import HP
from loka.core.records.stats import OPERANDS, Distribution, Stats
from loka.core.signature import MODEL_OPTIONS
from loka.core.table import format_table

GRADIENT = "grad_output"
_WINDOW = "statistics of a window: loka.Stats.load(folder)"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When the drift guard closes a layer, and after how many safe windows it opens it again.

    `ne` is the budget that effects are small against where the plan has none. `centre`: the share that means
    which moved may add to the error of a centred recipe; columns of a hot one may leave `growth` times what the
    hottest would.
    """

    amax_octaves: float = 1.0
    growth: float = 2.0
    reopen_after: int = 3
    ne: float = 1e-4
    centre: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Shift:
    """Of one operand, in octaves; None where one of the windows does not tell. `chance`: half of the 95 % interval
    of `amax`, 0 where both windows have one batch."""

    amax: float | None
    rms: float | None
    chance: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LayerDrift:
    """One layer. `recipe` is what its `output` GEMM runs by, None in hp; effects are those of that recipe.
    `unsafe` says why the drift guard should close it; empty where it is safe, or all in hp. `unknown` says
    why the window does not tell what it costs now; empty where it does, and where no GEMM of it is in FP8."""

    path: str
    recipe: str | None
    shifts: Mapping[str, Shift]
    before: Estimate | None
    after: Estimate | None
    unsafe: tuple[str, ...]
    unknown: str = ""

    @property
    def growth(self) -> float | None:
        if self.before is None or self.after is None or not self.before.value > 0:
            return None
        return self.after.value / self.before.value

    @property
    def tells(self) -> bool:
        """Whether that it is not unsafe says anything. Ranges alone do where its effect was never known."""
        return not self.unknown or (self.before is None and bool(self.shifts))


@dataclass(frozen=True, kw_only=True)
class Drift:
    """All layers of a plan. `total` is what the plan costs now by the sum; layers whose effect now is unknown count
    with the one before, as far as there is one. `together` is the upper end of what they lose by the correlations of
    what they change, which a plan is held to as well; 0 where that is the sum. Pairs that the later window does not
    name count as before."""

    layers: Mapping[str, LayerDrift]
    total: Estimate | None
    budget: float | None
    together: float = 0.0

    @property
    def unsafe(self) -> frozenset[str]:
        return frozenset(path for path, layer in self.layers.items() if layer.unsafe)

    @property
    def unknown(self) -> tuple[str, ...]:
        """The FP8 layers of which this window does not tell what they cost."""
        return tuple(path for path, layer in self.layers.items() if layer.unknown)

    @property
    def over_budget(self) -> bool:
        if self.budget is None or self.total is None:
            return False
        return max(upper_bound(self.total), self.together) > self.budget

    def __str__(self) -> str:
        header = (
            "layer",
            "output runs",
            "input",
            "weight",
            "grad_output",
            "KL/H before",
            "KL/H now",
            "growth",
            "drift guard",
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
        lines = ["Shift of amax (of rms), in octaves, and of the predicted KL/H", format_table(header, rows)]
        if self.total is not None:
            state = (
                f": {'ABOVE' if self.over_budget else 'within'} the budget of {self.budget:g}" if self.budget else ""
            )
            planned = (
                ", what is unknown as before" if any(self.layers[path].after is None for path in self.unknown) else ""
            )
            alike = f", {self.together:.2g} at most by the correlations of its layers" if self.together else ""
            lines.append(f"the plan now costs KL/H {self.total}{alike}{planned}{state}")
        lines += [f"unknown: {path}: {self.layers[path].unknown}" for path in self.unknown]
        return "\n".join(lines)


def drift(plan: Plan, after: Stats, *, before: Stats | None = None, limits: Limits | None = None) -> Drift:
    """How `after` differs from what `plan` was made from.

    Args:
        before: the statistics behind the plan; without them only effects on KL/H are compared, with those
            that the plan carries.

    Raises:
        PlanMismatch: statistics of another model; the differences are listed.
        DataRefused: statistics of no sampled step.
    """
    limits = limits or Limits()
    require_plan(plan)
    require_kind(after, Stats, "after", way_out=_WINDOW)
    require_kind(before, Stats | None, "before", way_out=_WINDOW)
    for which, stats in (("before", before), ("after", after)):
        differences = stats.model.differences(plan.model) if stats is not None else []
        if differences:
            raise PlanMismatch(
                f"the statistics `{which}` are not of the model of this plan",
                why=differences,
                way_out=f"compare windows of one model, built alike ({MODEL_OPTIONS})",
            )
        if stats is not None and stats.sampled_steps == 0:
            raise DataRefused(
                f"the statistics `{which}` say nothing",
                why=[f"no step of {stats.steps} was sampled"],
                way_out="probe more steps, or sample more often: --every 1",
            )
    recipes = plan.output_recipes
    negligible = (plan.kl_limit or limits.ne) / (2 * max(len(recipes), 1))
    shifts = {path: _shifts(path, before, after) for path in plan.model.layers}
    alike_moved, layers = _moved_alike(shifts), {}
    for path, own in shifts.items():
        moved = alike_moved.get(path, 0.0)
        layers[path] = _layer(path, plan, recipes, before, after, limits, negligible, own, moved)
    now = {path: cost for path in recipes if (cost := layers[path].after or layers[path].before) is not None}
    alike = joined_alike(after.alike, before.alike if before is not None else {}, (1, 0))
    return Drift(
        layers=layers,
        total=total_effect(now.values()) if now else None,
        budget=plan.kl_limit,
        together=lost_together(alike, recipes, now),
    )


def drift_guard(history: Sequence[Drift], *, limits: Limits | None = None) -> frozenset[str]:
    """The layers to hold in hp after these windows, oldest first."""
    limits = limits or Limits()
    safe: dict[str, int] = {}
    for window in history:
        for path in window.layers:
            if path in window.unsafe:
                safe[path] = 0
            elif path in safe and window.layers[path].tells:
                safe[path] += 1
    return frozenset(path for path, windows in safe.items() if windows < limits.reopen_after)


def effects_of(stats: Stats) -> dict[str, dict[str, Estimate]]:
    """Layer -> recipe -> predicted KL/H, where it is known."""
    found: dict[str, dict[str, Estimate]] = {}
    for path, layer in stats.layers.items():
        estimates = {name: effect.kl() for name, effect in layer.effects.items()}
        found[path] = {name: e for name, e in estimates.items() if known_effect(e) is not None}
    return found


def _layer(
    path: str,
    plan: Plan,
    recipes: Mapping[str, str],
    before: Stats | None,
    after: Stats,
    limits: Limits,
    negligible: float,
    shifts: Mapping[str, Shift],
    alike_moved: float,
) -> LayerDrift:
    learnt_now = after.layers[path].operands if path in after.layers else {}
    recipe = recipes.get(path)
    old = new = None
    if recipe is not None:
        new = _effect(after, path, recipe)
        old = _effect(before, path, recipe) if before is not None else None
        planned = plan.decisions.get(f"{path}/output")
        if old is None and planned is not None:
            old = known_effect(planned.kl)
    given, weight = learnt_now.get("input"), learnt_now.get("weight")
    off = off_centre(plan.centres.get(path, ()), recipe, given, weight)
    left = columns_left(plan.hot_columns.get(path, ()), recipe, given)
    if new is not None:
        new = new.mapped(lambda each: left * (1 + off) * each if each else each)
    low = _low_operands(path, plan)
    unsafe = _rises(low, shifts, limits, alike_moved)
    if old is not None and new is not None:
        grown = new.value > limits.growth * old.value and new.low > old.high
        if grown and upper_bound(new) > negligible:
            unsafe.append(f"its KL/H grew {new.value / max(old.value, 1e-300):.1f} times")
    if off > limits.centre:
        unsafe.append(f"means moved from those that are taken off: they add {off:.0%} to its error; plan again")
    if left > limits.growth:
        unsafe.append(f"its hot columns are others now: they leave {left:.1f} times the error; plan again")
    return LayerDrift(
        path=path,
        recipe=recipe,
        shifts=shifts,
        before=old,
        after=new,
        unsafe=tuple(unsafe),
        unknown=_untold(path, recipe, new, after) if low else "",
    )


def _rises(operands: Sequence[str], shifts: Mapping[str, Shift], limits: Limits, alike_moved: float) -> list[str]:
    """Which amaxes of `operands` rose too far. What gradients of all layers moved alike, as the loss falls, counts for
    none of them."""
    found = []
    for operand in operands:
        shift = shifts.get(operand)
        if shift is None or shift.amax is None:
            continue
        rose = shift.amax - (alike_moved if operand == GRADIENT else 0.0)
        if rose > limits.amax_octaves and rose > shift.chance:
            than = f" more than all others ({alike_moved:+.1f})" if rose != shift.amax else ""
            found.append(f"amax of {operand} rose by {rose:.1f} octaves{than}")
    return found


def _shifts(path: str, before: Stats | None, after: Stats) -> dict[str, Shift]:
    """Of the operands that both windows tell of a layer."""
    if before is None or path not in before.layers or path not in after.layers:
        return {}
    then, now = before.layers[path].operands, after.layers[path].operands
    return {name: _shift(now[name], then[name]) for name in OPERANDS if name in then and name in now}


def _moved_alike(shifts: Mapping[str, Mapping[str, Shift]]) -> dict[str, float]:
    """By layer the median over the others of what the amax of their gradients moved by, in octaves; of one alone, its
    own."""
    told = {path: own[GRADIENT].amax for path, own in shifts.items() if GRADIENT in own}
    found = {path: moved for path, moved in told.items() if moved is not None}
    others = {path: [moved for other, moved in found.items() if other != path] or [found[path]] for path in found}
    return {path: statistics.median(moved) for path, moved in others.items()}


def _untold(path: str, recipe: str | None, now: Estimate | None, after: Stats) -> str:
    """Why `after` does not tell what an FP8 layer costs now; empty where it does."""
    if path not in after.layers:
        return f"not seen in this window{_because(after.skipped.get(path))}"
    rows = after.layers[path].left_out()
    if recipe is None:  # gradients alone are in FP8, and those have no effect to know
        return rows
    reason = after.layers[path].no_effect
    if now is None:
        return f"this window has no effect of {recipe} on KL/H{_because(reason)}"
    # Beside this effect: why the latest steps did not refresh it; not, why those of other recipes went.
    return reason.removeprefix(OTHER_PARTS).removeprefix("; ") or rows


def _because(reason: str | None) -> str:
    return f": {reason}" if reason else ""


def _effect(stats: Stats, path: str, recipe: str) -> Estimate | None:
    effect = stats.layers[path].effects.get(recipe) if path in stats.layers else None
    return known_effect(effect.kl()) if effect is not None else None


def _low_operands(path: str, plan: Plan) -> list[str]:
    candidates = plan.candidates(path)
    return [name for name in OPERANDS if any(candidates[gemm] != HP for gemm, _ in SHARED_OPERANDS[name])]


def _shift(learnt: Distribution, earlier: Distribution) -> Shift:
    now, then = _amaxes(learnt), _amaxes(earlier)
    rms = _ratio(_rms(learnt), _rms(earlier))
    if not (len(now) and len(then)):
        return Shift(amax=None, rms=rms)
    chance, long = 0.0, max(now, then, key=len)
    if len(long) > 1:  # one batch differs as those of the other window do
        parts = [float((each if len(each) > 1 else long).var()) / len(each) for each in (now, then)]
        squares = sum(part**2 / (max(len(each), 2) - 1) for part, each in zip(parts, (now, then), strict=True))
        freedom = sum(parts) ** 2 / squares if squares and min(len(now), len(then)) > 1 else len(long) - 1
        chance = student_t_95(int(freedom)) * math.sqrt(sum(parts)) if squares else 0.0
    return Shift(amax=float(now.mean() - then.mean()), rms=rms, chance=chance)


def _amaxes(learnt: Distribution) -> torch.Tensor:
    """log2 of the largest |x| of each batch that has any but zeros; of a weight, of its mean alone."""
    batches, mean = learnt.tensors.get("amax"), learnt.tensors.get("mean")
    found = batches if batches is not None or mean is None else mean[None]
    if found is None or not found.numel():
        return torch.empty(0, device="cpu")
    largest = found.abs().double().reshape(len(found), -1).amax(dim=1)
    return largest[largest > 0].log2()


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
