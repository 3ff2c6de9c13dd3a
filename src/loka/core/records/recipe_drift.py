"""What centred and hot recipes lose more by the means and columns of a plan than by those of a later window.

A window's effects are of its own means m' and hottest columns. By those of the plan, m, an error is larger by
lost(m) / lost(m'):

    w_k = sum of J_k^2 x_k^2 / (mean_k^2 + var_k),   v_k the same of A_k W_k^2          `effect_columns` of the input
    e_k = var_k + (mean_k - m_k)^2
    FP8   lost(m) = sum_k (w_k + v_k) e_k                                     errors are shares of their element
    INT8  lost(m) = E max_k (x_k - m_k)^2 sum_k w_k + (max |W| / rms W)^2 sum_k v_k e_k       a row has one step

So a noisy column that matters little hides no other, and one column that moved makes the step of all. The largest of
a row is that of Gaussian columns: heavier tails move less. Where nothing tells what columns matter, all do alike.
"""

import math
from collections.abc import Sequence

import torch

from loka.core.numerics.centring import centre_of
from loka.core.numerics.hot_columns import LEFT
from loka.core.recipe import RECIPES
from loka.core.records.stats import Distribution

_DRAWN = 64  # rows, by which the largest of a row is known to a percent or two; both sides have the same


def off_centre(
    centre: Sequence[float], recipe: str | None, learnt: Distribution | None, weight: Distribution | None
) -> float:
    """lost(m) / lost(m') - 1 of a centred `recipe`: 0 where nothing moved, or nothing is known of the input."""
    if not centre or recipe is None or learnt is None or not {"mean", "square"} <= learnt.tensors.keys():
        return 0.0
    mean = learnt.tensors["mean"].double()
    variance = learnt.tensors["square"].double() / max(learnt.numbers.get("count", 0), 1)
    table = learnt.tensors.get("effect_columns")
    matters = _matters(table, mean.square() + variance)
    casts = RECIPES[recipe].output if recipe in RECIPES else None
    integers = casts is not None and casts[0].format.uniform
    step = _crest(weight) if integers else 1.0

    def lost(m: torch.Tensor) -> float:
        energy = variance + (mean - m).square()
        own = _largest(mean - m, variance) * matters[:, 0].sum() if integers else matters[:, 0] @ energy
        return float(own + step * (matters[:, 1] @ energy))

    ours, best = lost(mean.new_tensor(centre)), lost(centre_of(mean, variance).double())
    return ours / best - 1 if best > 0 else math.inf if ours > 0 else 0.0


def columns_left(columns: Sequence[int], recipe: str | None, learnt: Distribution | None) -> float:
    """The error that these columns' residuals leave, over what those of the hottest now would: 1 as planned."""
    if learnt is None or recipe is None or not columns:
        return 1.0
    table = learnt.tensors.get("effect_columns_centred" if "_centred" in recipe else "effect_columns")
    if table is None or not table.any():
        return 1.0
    heat = table.sum(dim=1)
    taken = (heat[list(columns)].sum(), heat.topk(len(columns)).values.sum())
    ours, best = (float(heat.sum() - (1 - LEFT) * each) for each in taken)
    return ours / best


def _matters(table: torch.Tensor | None, square: torch.Tensor) -> torch.Tensor:
    """w and v [K, 2], by mean squares [K] of columns; of columns of zeros, which do not tell, those of most others."""
    known = square > 0
    if table is None or not table.any() or not known.any():
        return square.new_ones(len(square), 2)
    found = table.double() / square.where(known, 1.0).unsqueeze(1)
    return found.where(known.unsqueeze(1), found[known].median(dim=0).values)


def _largest(mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """E max_k x_k^2 of independent Gaussian columns."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    rows = torch.randn(_DRAWN, len(mean), generator=generator, device="cpu", dtype=torch.float32).to(mean.device)
    return (rows * variance.sqrt().float() + mean.float()).square().amax(dim=1).double().mean()


def _crest(weight: Distribution | None) -> float:
    """(max |W| of a row / rms W)^2, in the mean of rows; 1 where the weight is not known."""
    if weight is None or "mean" not in weight.tensors:
        return 1.0
    squares = weight.tensors["mean"].double().square()
    return float((squares.amax(dim=1).mean() / squares.mean()).nan_to_num(1.0))
