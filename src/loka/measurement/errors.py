"""The error of every candidate at a layer's sites, on operands drawn from its statistics.

All candidates see the same draws and are compared with the float32 product of the same
operands (core/numerics/gemm_error.py, and for gradients core/numerics/direction.py). Draws go on until the 95
% interval of every `sqnr_db`, and of every `shrink` and `bias` of a gradient, is narrow enough.

At `output` the error "ne" stands beside them: the predicted KL/H of the candidate's recipe at this layer. It
is not drawn: it comes from the effects that the probe recorded (measurement/predicted_kl.py).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from loka.core.error import Estimate, decibels, estimate_mean
from loka.core.exceptions import first_line
from loka.core.numerics.depth import depth_error
from loka.core.numerics.direction import Fold, Turn, shrink_bias_variance
from loka.core.numerics.gemm_error import Truth, errors_of
from loka.core.problem import DTYPES, Problem
from loka.core.recipe import Gemm, Recipe
from loka.core.records.report import HP
from loka.core.records.stats import LinearStats
from loka.core.timing import is_broken
from loka.kernels.gemm.registry import candidate_named
from loka.kernels.gemm.run import run_gemm
from loka.measurement.operands import Operands, draw_operands, hot_of_input, sides
from loka.measurement.predicted_kl import predicted_kl
from loka.measurement.settings import Settings
from loka.statistics.depths import depth_histogram, operand_errors
from loka.statistics.draw import samplers
from loka.statistics.effect_depths import centre_of_input


@dataclass
class _Drawn:
    """What draws showed of a candidate at a GEMM: the values of each measure, one a draw, and turns of gradients."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)

    def estimates(self) -> dict[str, Estimate]:
        found = {measure: estimate_mean(values) for measure, values in self.samples.items()}
        return found | (shrink_bias_variance(self.turns) if self.turns else {})


_All = dict[tuple[Gemm, str], _Drawn]


@dataclass(frozen=True, kw_only=True)
class LayerErrors:
    """Errors by GEMM, candidate and measure name; failures by GEMM and candidate."""

    errors: Mapping[Gemm, Mapping[str, Mapping[str, Estimate]]]
    failures: Mapping[Gemm, Mapping[str, str]]


def draw_errors(
    layer: LinearStats,
    problems: Mapping[Gemm, Problem],
    runnable: Mapping[Gemm, Sequence[str]],
    *,
    device: torch.device,
    settings: Settings,
) -> LayerErrors:
    """Draws for the candidates in `runnable`. One that raises is a failure; the others go on.

    What "hp" raises, and an error after which CUDA is unusable, is raised.
    """
    by_name = samplers(layer.operands, device, keep_tails=settings.keep_tails)
    generator = torch.Generator(device).manual_seed(settings.seed)
    draws = _Draws(
        problems=problems,
        runnable=runnable,
        centre=centre_of_input(layer).to(device),
        hot={name: hot_of_input(layer, name, device) for names in runnable.values() for name in names},
        failures={gemm: {} for gemm in runnable},
    )
    rows = min(layer.rows, settings.rows)
    for count in itertools.count(1):
        operands = draw_operands(layer, by_name, rows, generator)
        _compare(operands, draws, device)
        if count >= settings.max_draws or (count >= settings.min_draws and _narrow(draws.drawn, settings)):
            break
    errors: dict[Gemm, dict[str, dict[str, Estimate]]] = {gemm: {} for gemm in runnable}
    for (gemm, name), kept in draws.drawn.items():
        errors[gemm][name] = kept.estimates()
    for name, measures in errors.get(Gemm.OUTPUT, {}).items():
        if name == HP:
            continue
        recipe = candidate_named(name).recipe
        if not settings.keep_tails:
            measures["sqnr_db"] = _with_tails(measures["sqnr_db"], layer, recipe, operands)
        if (effect := predicted_kl(layer, recipe)) is not None:
            measures["ne"] = effect
    return LayerErrors(errors=errors, failures=draws.failures)


@dataclass(frozen=True, kw_only=True)
class _Draws:
    """What all draws of a layer share, and what they showed so far: `drawn`, `failures` and the `folds` of gradients.

    `centre`: m [K] of centred recipes. `hot`: by candidate, the columns of a hot recipe.
    """

    problems: Mapping[Gemm, Problem]
    runnable: Mapping[Gemm, Sequence[str]]
    centre: torch.Tensor
    hot: Mapping[str, torch.Tensor | None]
    failures: dict[Gemm, dict[str, str]]
    drawn: _All = field(default_factory=dict)
    folds: dict[Gemm, Fold] = field(default_factory=dict)


def _compare(operands: Operands, draws: _Draws, device: torch.device) -> None:
    """Runs every candidate that has not failed on one draw, and adds its errors against the float32 product."""
    for gemm, names in draws.runnable.items():
        a, b = sides(gemm, operands)
        truth = _truth(gemm, a.float() @ b.float().t(), draws.folds)
        for name in names:
            if name in draws.failures[gemm]:
                continue
            try:
                dtype, centre = DTYPES[draws.problems[gemm].dtype], _centre(name, draws.centre)
                out = run_gemm(name, a, b, gemm=gemm, dtype=dtype, centre=centre, hot=draws.hot[name])
                found, turn = errors_of(out, truth)
            except Exception as error:  # libraries raise what they like
                error.add_note(f"while the error of {name} was drawn for {draws.problems[gemm]}")
                if name == HP or is_broken(device):
                    raise
                draws.failures[gemm][name] = first_line(error)
                draws.drawn.pop((gemm, name), None)
                continue
            kept = draws.drawn.setdefault((gemm, name), _Drawn())
            for measure, value in found.items():
                kept.samples.setdefault(measure, []).append(value)
            kept.turns += [turn] if turn else []


def _centre(name: str, centre: torch.Tensor) -> torch.Tensor | None:
    """What the candidate takes off its input: `centre` where its recipe is centred."""
    return centre if name != HP and candidate_named(name).recipe.centred else None


def _with_tails(sqnr_db: Estimate, layer: LinearStats, recipe: Recipe, drawn: Operands) -> Estimate:
    """The SQNR of a recipe on operands with the tails that were learnt, where `drawn` operands have none.

    Integers lose more of operands with tails, by their depth histograms: 9 dB of lognormal rows. FP8 rounds all depths
    alike, so its SQNR stays.
    """
    if recipe.output is None or not recipe.output[0].format.uniform:
        return sqnr_db
    cast = replace(recipe.output[0], centred=False)  # centres move no tail, and have no histograms
    learnt = operand_errors(layer, Gemm.OUTPUT, replace(recipe, output=(cast, cast)))
    gaussian = (depth_error(depth_histogram(drawn[name], cast.granularity), cast.format) for name in learnt)
    less = decibels(*(sum(error.relative for error in errors) for errors in (gaussian, learnt.values())))
    if not math.isfinite(less):
        return sqnr_db
    return sqnr_db.mapped(lambda level: level - less)


def _truth(gemm: Gemm, product: torch.Tensor, folds: dict[Gemm, Fold]) -> Truth:
    """Rows are examples but in grad_weight; all draws of a gradient are folded alike."""
    if gemm is not Gemm.OUTPUT and gemm not in folds:
        rows, columns = product.shape
        folds[gemm] = Fold(rows, columns, mean_row=gemm is Gemm.GRAD_INPUT, device=product.device)
    return Truth(product, by_row=gemm is not Gemm.GRAD_WEIGHT, fold=folds.get(gemm))


def _narrow(drawn: _All, settings: Settings) -> bool:
    """Whether the interval of every `sqnr_db`, and of every gradient's `shrink` and `bias`, is narrow enough."""
    low = [kept for (_, name), kept in drawn.items() if name != HP]
    decibels = (estimate_mean(kept.samples["sqnr_db"]) for kept in low)
    if any(e.high - e.low > 2 * settings.interval_db for e in decibels):
        return False
    turned = (shrink_bias_variance(kept.turns) for kept in low if kept.turns)
    shares = (found[name] for found in turned for name in ("shrink", "bias"))
    return not any(e.high - e.low > 2 * settings.interval_share for e in shares if math.isfinite(e.value))
