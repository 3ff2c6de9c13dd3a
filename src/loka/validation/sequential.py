"""When a validation may stop early: levels for a look after every pair, which hold over all looks together.

    side(t) = 2 - 2 Phi(z / sqrt(t)),  z = Phi^-1(1 - tail / 4),  t = pairs so far / pairs planned

`side(t)` is what either side may have been wrong by with probability up to look t: nearly nothing early and
tail / 2 at the end (O'Brien and Fleming's boundary as a spending function: Lan and DeMets, Biometrika 70,
1983). The boundary c_k of look k solves

    P(|Z_1| < c_1, ..., |Z_k-1| < c_k-1, |Z_k| >= c_k) = 2 (side(t_k) - side(t_k-1))

for sums of independent normal pairs, integrated numerically look by look (Armitage, McPherson and Rowe 1969).
A look's interval has the level 1 - 2 (1 - Phi(c_k)) on Student's t (the significance-level approach, Jennison
and Turnbull 2000, section 3.8): repeated confidence intervals, all of which hold together at 1 - tail. So a
pass or a fail at any look is as good as one that was waited for.
"""

import functools
import math
from statistics import NormalDist

import torch

from loka.validation.variance import MIN_PAIRS

_POINTS = 801  # of the grid that a density lies on; 201 give the same bounds to four digits
_FEW = 0.85
"""The level is lowered by what Student's t leaves over: variances of a few pairs are used again from look
to look, and a side of 2.5 % was wrong in 2.7 to 2.9 % (200,000 simulations each of 6, 8, 12 and 16 pairs)."""
_NORMAL = NormalDist()


def look_tail(pairs: int, planned: int, tail: float) -> float:
    """1 less the level of the interval after `pairs` of `planned` pairs; looks begin at MIN_PAIRS.

    Raises ValueError for fewer planned pairs than that, and for a look beyond them.
    """
    if planned < MIN_PAIRS:
        raise ValueError(f"{planned} pairs are planned; no verdict takes fewer than {MIN_PAIRS}")
    if pairs > planned:
        raise ValueError(f"a look after {pairs} pairs, where {planned} are planned")
    if pairs < MIN_PAIRS:
        return tail  # nobody decides there; the interval is for reading
    looks = range(MIN_PAIRS, planned + 1)
    if len(looks) == 1:
        return tail
    bounds = spending_bounds(tuple(look / planned for look in looks), _FEW * tail)
    return max(2 * _NORMAL.cdf(-bounds[pairs - MIN_PAIRS]), 1e-15)


@functools.lru_cache(maxsize=256)
def spending_bounds(times: tuple[float, ...], tail: float) -> tuple[float, ...]:
    """c_k of looks at the shares `times` of the planned pairs, growing to 1."""
    found: list[float] = []
    density: tuple[torch.Tensor, torch.Tensor] | None = None  # of the sum, where no look has stopped
    before, spent = 0.0, 0.0
    for now in times:
        allowed, step = 2 * _side(now, tail), math.sqrt(now - before)
        low, high = 0.0, 40.0 * math.sqrt(now)
        for _ in range(100):
            middle = (low + high) / 2
            if _outside(density, middle, step) > allowed - spent:
                low = middle
            else:
                high = middle
        found.append(high / math.sqrt(now))
        density = _onwards(density, high, step)
        before, spent = now, allowed
    return tuple(found)


def _side(t: float, tail: float) -> float:
    return 2 - 2 * _NORMAL.cdf(_NORMAL.inv_cdf(1 - tail / 4) / math.sqrt(t))


def _outside(density: tuple[torch.Tensor, torch.Tensor] | None, bound: float, step: float) -> float:
    """P(the sum lies beyond +-bound after a normal step, and no look before stopped)."""
    if density is None:
        return 2 * _NORMAL.cdf(-bound / step)
    points, mass = density
    return 2 * float((mass * torch.special.ndtr((points - bound) / step)).sum())  # either side: both are alike


def _onwards(
    density: tuple[torch.Tensor, torch.Tensor] | None, bound: float, step: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Points inside +-bound and the probability at each (Simpson's weights) after a normal step."""
    points = torch.linspace(-bound, bound, _POINTS, dtype=torch.float64)
    weights = torch.full((_POINTS,), 2.0, dtype=torch.float64)
    weights[1::2], weights[0], weights[-1] = 4.0, 1.0, 1.0
    weights *= (points[1] - points[0]) / 3
    if density is None:
        return points, weights * _normal(points / step) / step
    old, mass = density
    here = (_normal((points[:, None] - old[None, :]) / step) / step) @ mass
    return points, weights * here


def _normal(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
