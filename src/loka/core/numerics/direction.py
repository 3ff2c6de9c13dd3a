"""Where FP8 turns a gradient, and what of that averages out over steps.

Draw t of T has the true gradient G_t (the float32 product) and the error D_t, on operands of its own:

    shrink    s = sum_t <D_t, G_t> / sum_t |G_t|^2        along the gradient: too short where negative
    angle     mean_t atan2(|D_t - s_t G_t|, (1 + s_t) |G_t|),   s_t = <D_t, G_t> / |G_t|^2     radians
    P_t     = D_t - s G_t                                 what turns the gradient
    bias      = mean_{t != u} <P_t, P_u> / E,    E = mean_t |G_t|^2
    variance  = mean_t |P_t|^2 / E - bias

so that mean |D|^2 / E = s^2 + bias + variance, and angle^2 is about bias + variance. Draws are
independent, so <P_t, P_u> has the mean |E P|^2 without the noise that |P_t|^2 holds: no bias is estimated as
0 on average, a little below it as often as above. Rows of a grad_input are examples, one as good as
another: its mean error is a row that they share, and |E P|^2 is their number times that row's square.

A gradient of weights is too large to keep for every draw and candidate. `Fold` keeps at most
`SIDE` x `SIDE` numbers of it, whose products have the same mean (a count sketch; Charikar, Chen and
Farach-Colton 2002). Both ends of a product are folded alike, so what is small stays small.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loka.core.error import Estimate, estimate_jackknife

SIDE = 256  # products of folded independent errors are off by at most |D_t| |D_u| / 16, typically by 1 / 256


class Fold:
    """[R, C] -> [r, c], linear, with <fold A, fold B> = <A, B> in the mean over its random signs.

    With `mean_row` rows are examples: they are added up, divided by sqrt(R).
    """

    def __init__(self, rows: int, columns: int, *, mean_row: bool, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)  # of its own: draws stay what they are
        self._mean_row = mean_row
        self._rows = None if mean_row else _signs(rows, generator, device)
        self._columns = _signs(columns, generator, device)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Of `values` [R, C] float32, flattened [r * c]."""
        if self._mean_row:
            values = values.sum(dim=0, keepdim=True) / math.sqrt(max(len(values), 1))
        values = _folded(values, self._rows)
        return _folded(values.t(), self._columns).flatten()


def _signs(side: int, generator: torch.Generator, device: torch.device) -> torch.Tensor | None:
    if side <= SIDE:
        return None
    return torch.randint(2, (side, 1), generator=generator).mul_(2).sub_(1).float().to(device)


def _folded(values: torch.Tensor, signs: torch.Tensor | None) -> torch.Tensor:
    """Row i of [R, C], with its sign, is added to row i mod SIDE."""
    if signs is None:
        return values
    signed = values * signs
    whole = len(signed) // SIDE * SIDE
    folded = signed[:whole].view(-1, SIDE, signed.shape[1]).sum(dim=0)
    folded[: len(signed) - whole] += signed[whole:]
    return folded


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Of one draw: |D|^2, <D, G>, |G|^2, and both folded."""

    energy: float
    cross: float
    signal: float
    error: torch.Tensor
    gradient: torch.Tensor


def angle_of(energy: float, cross: float, signal: float) -> float:
    """Between G + D and G in radians, from |D|^2, <D, G> and |G|^2; nan where G or G + D is zero."""
    if not signal > 0 or not math.isfinite(energy):
        return math.nan
    shrink = cross / signal
    across = math.sqrt(max(energy - shrink * cross, 0.0) / signal)
    return math.atan2(across, 1 + shrink) if across or shrink != -1 else math.nan


def shrink_bias_variance(turns: Sequence[Turn]) -> dict[str, Estimate]:
    """ "shrink", "bias" and "variance" over draws, with intervals from leaving out one draw at a time.

    nan from a single draw, or where every true gradient is zero.
    """
    numbers = torch.tensor([(t.energy, t.cross, t.signal) for t in turns], dtype=torch.float64, device="cpu")
    kept = torch.stack([torch.cat((t.error, t.gradient)) for t in turns]).double()
    errors, gradients = kept.tensor_split(2, dim=1)
    products = [(a @ b.t()).cpu() for a, b in ((errors, errors), (errors, gradients), (gradients, gradients))]
    # Of pairs t != u: the sum over u for each t, both ways round.
    pairs = torch.stack([(m + m.t()).sum(dim=1) / 2 - m.diagonal() for m in products])
    count = len(turns)
    whole = _found(numbers.sum(dim=0), pairs.sum(dim=1), count)
    rest = _found(numbers.sum(dim=0) - numbers, (pairs.sum(dim=1, keepdim=True) - 2 * pairs).t(), count - 1)
    return {
        name: estimate_jackknife(float(value), left_out.tolist())
        for name, value, left_out in zip(("shrink", "bias", "variance"), whole, rest, strict=True)
    }


def _found(sums: torch.Tensor, pairs: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """From sums over `count` draws [.., 3] and over pairs of them [.., 3]."""
    energy, cross, signal = sums.unbind(dim=-1)
    both, mixed, true = pairs.unbind(dim=-1)
    shrink = cross / signal
    turned = (energy - shrink * cross) / signal
    ways = count * (count - 1) if count > 1 else math.nan
    bias = (both - 2 * shrink * mixed + shrink.square() * true) / ways * count / signal
    return shrink, bias, turned - bias
