"""Error measures between a result and its reference. The one measure is `sqnr_db`.

    sqnr_db = 10 log10( sum ref^2 / sum (out - ref)^2 )
    mere    = mean over ref != 0 of |out - ref| / |ref|      (the paper's metric)

`mere` is a second measure for parity with the paper: it grows with the logarithm of the
number of outputs when they are centred on zero, so nothing gates on it by default. Errors by row
and the direction of gradients are in core/numerics/gemm_error.py and core/numerics/direction.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from loka.core.storage.codec import record

# Two-sided 95 % quantiles of Student's t for 1..30 degrees of freedom (any statistics
# table, e.g. NIST/SEMATECH e-Handbook 1.3.6.7.2); beyond 30 the expansion in
# `student_t_95` is exact to four digits.
_T95 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip
Z95 = 1.959964
"""Standard errors on either side of a normal estimate that its 95 % interval spans."""


@record(row=True)
@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return self.shown(".4g")

    def mapped(self, function: Callable[[float], float]) -> Estimate:
        """The estimate of `function` of the value. `function` never falls."""
        return Estimate(function(self.value), function(self.low), function(self.high))

    def under(self, number: float) -> Estimate:
        """`number` over a positive time or ratio: the ends change places."""
        return Estimate(number / self.value, number / self.high, number / max(self.low, 1e-9))

    def shown(self, form: str, unit: str = "") -> str:
        return f"{self.value:{form}}{unit} [{self.low:{form}}, {self.high:{form}}]"


def around(value: float, half: float) -> Estimate:
    return Estimate(value, value - half, value + half)


def exactly(value: float) -> Estimate:
    return Estimate(value, value, value)


def student_t_95(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t (Cornish-Fisher expansion beyond the table)."""
    if freedom < 1:
        return math.inf
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    return expanded_t(Z95, freedom)


def expanded_t(z: float, freedom: int) -> float:
    """Student's t at the level of the normal quantile `z`, to the second order of the Cornish-Fisher expansion."""
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def estimate_mean(samples: Sequence[float]) -> Estimate:
    """Mean of independent samples with its Student-t interval (infinite for one sample)."""
    count = len(samples)
    if count == 0:
        raise ValueError("an estimate needs at least one sample")
    mean = math.fsum(samples) / count
    if count == 1 or not math.isfinite(mean):
        return Estimate(mean, -math.inf if math.isfinite(mean) else mean, math.inf)
    variance = math.fsum((sample - mean) ** 2 for sample in samples) / (count - 1)
    half = student_t_95(count - 1) * math.sqrt(variance / count)
    return around(mean, half)


def estimate_jackknife(value: float, left_out: Sequence[float]) -> Estimate:
    """`value`, computed from n >= 2 independent samples, with a 95 % interval.

    `left_out` [n] is the same computed without each of them in turn (Efron & Stein 1981: the variance
    this gives is too large on average, never too small). Infinite where one of them is not finite.
    """
    count = len(left_out)
    if count < 2 or not all(math.isfinite(one) for one in (value, *left_out)):
        return Estimate(value, -math.inf, math.inf)
    mean = math.fsum(left_out) / count
    variance = (count - 1) / count * math.fsum((one - mean) ** 2 for one in left_out)
    return around(value, student_t_95(count - 1) * math.sqrt(variance))


def decibels(noise: float, signal: float) -> float:
    """10 log10(signal / noise): inf without noise, -inf without signal, nan where either is."""
    if math.isnan(noise) or math.isnan(signal):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 and noise < math.inf else -math.inf


def sqnr_db(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Signal to quantization noise in dB: inf when equal, nan when either holds a NaN."""
    ref = reference.double()
    noise = (out.double() - ref).square().sum().item()
    return decibels(noise, ref.square().sum().item())
