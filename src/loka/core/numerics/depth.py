"""Depth histograms: from one pass over a tensor, the error of any FP8 format, without quantizing.

An element's depth is d = log2(A / |x|), A the amax of its scale's group. A scale maps A to FMAX, so
the rounding error of x relative to x is a function of d alone:

    rho_F^2(d) = (Q_F(v) - v)^2 / v^2,   v = FMAX 2^-d         sum w (x - x^)^2 = sum_d H_w(d) rho_F^2(d)

Both formats have FMAX = 1.75 2^k. So bins are cut linearly, 16 to an octave of v, and every rounding
threshold and every FP8 number of both formats lies on an edge: in a bin all elements round to the same
number q. Beside the sum of weights each bin keeps the first two moments about its centre c,

    S0 = sum W, S1 = sum W t, S2 = sum W t^2,   t = m - c,   |x| = scale 2^e m,   W = w (scale 2^e)^2
    sum w (x - x^)^2 = (c - q)^2 S0 + 2 (c - q) S1 + S2

which is exact, where a mean of rho^2 in log-spaced bins is 0.04 dB off on average at 32 an octave, and
more where values crowd at a representable one (statistics/depths.py collects histograms, by
core/numerics/depth_tables.py). Power-of-two scales count from the amax that they round up to, another
fraction of an octave in every group, so they have histograms of their own: twice the memory (45 KB each),
and both exact.
INT8 has its thresholds half a step apart all over: bins above a tenth of the amax hold several, and the error
there is that of elements spread evenly within the bin (`_uniform_error`); below it is exact.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from loka.core.numerics.depth_tables import BINS_PER_OCTAVE, NONFINITE, ZEROS, centres, units
from loka.core.numerics.reference import quantize
from loka.core.recipe import Cast, Format, Granularity

ENERGY, RELATIVE, WEIGHTED = "energy", "relative", "weighted"
_FIRST_COLUMN = {ENERGY: 1, RELATIVE: 4, WEIGHTED: 7}


@dataclass(frozen=True)
class DepthHistogram:
    """`table` float64 [ROWS, 7 or 10]: histograms of the same kind merge by adding their tables.

    Rows: the bins from the deepest up, then TOP (an amax itself, d = 0, to float32 rounding), ZEROS,
    NONFINITE (elements of groups that a NaN or infinity spoils). Columns: the count, then three
    moments each for the squared error weighted by 1 (ENERGY), by 1 / x^2 (RELATIVE: every element
    alike), and by the given weight (WEIGHTED) where there is one.
    """

    table: torch.Tensor

    def __add__(self, other: DepthHistogram) -> DepthHistogram:
        """Raises ValueError where one of them has weights and the other none."""
        if self.table.shape != other.table.shape:
            raise ValueError("a depth histogram with weights and one without do not add up")
        return DepthHistogram(self.table + other.table)

    @property
    def weighted(self) -> bool:
        return self.table.shape[1] > _FIRST_COLUMN[WEIGHTED]


@dataclass(frozen=True, kw_only=True)
class DepthError:
    """What quantizing does to a tensor, in words of core/error.py; fractions are of all elements.

    `relative` is sum (x - x^)^2 / sum x^2 and `sqnr_db` the same in dB; `element` is the mean of
    ((x - x^) / x)^2 over nonzero elements. What is not finite counts in `nonfinite` only.
    """

    relative: float
    element: float
    underflow: float
    zeros: float
    nonfinite: float

    @property
    def sqnr_db(self) -> float:
        if math.isnan(self.relative):
            return math.nan
        return -10 * math.log10(self.relative) if self.relative > 0 else math.inf


def error_sum(histogram: DepthHistogram, format: Format, *, weighting: str = ENERGY) -> torch.Tensor:
    """sum w (x - x^)^2, float64 [], for w of `weighting` (ENERGY, RELATIVE or WEIGHTED); no waiting.

    Raises ValueError where there are no weights in this histogram.
    """
    moments = _moments(histogram, weighting)
    if format.uniform:
        return _uniform_error(moments, format)
    gap = centres(moments.device) - _rounded(format, moments.device)
    exact = gap * gap * moments[:, 0] + 2 * gap * moments[:, 1] + moments[:, 2]
    return exact.clamp_min(0).sum()


def _uniform_error(moments: torch.Tensor, format: Format) -> torch.Tensor:
    """The error of integers, u = v max / FMAX(e4m3) in steps of one. In a bin all of which rounds to one
    integer, exact; in one that holds thresholds the mean over an even spread of its elements a..b,

        1 / (b - a) integral (u - round(u))^2 du = (P(b) - P(a)) / (b - a),   P(u) = n / 12 + (u - n)^3 / 3

    with n = min(round(u), max): 1 / 12 where the bin is many steps wide.
    """
    c = centres(moments.device)
    factor = _units_of(format, moments.device)
    half = 0.5 / BINS_PER_OCTAVE
    lowest, highest = (((c + end) * factor).round() for end in (-half, half))
    exact = c - highest.clamp(max=format.max) / factor
    inside = exact * exact * moments[:, 0] + 2 * exact * moments[:, 1] + moments[:, 2]
    begin, end = (edge * factor for edge in _even_ends(moments, c))
    wide = end - begin > 1e-6 * end
    mean = (_primitive(end, format) - _primitive(begin, format)) / (end - begin).where(wide, 1)
    at = (begin + end) / 2
    point = (at - at.round().clamp(max=format.max)).square()
    spread = mean.where(wide, point) / factor.square() * moments[:, 0]
    return inside.where((lowest == highest) | (lowest >= format.max), spread).clamp_min(0).sum()


def _primitive(u: torch.Tensor, format: Format) -> torch.Tensor:
    n = u.round().clamp(max=format.max)
    return n / 12 + (u - n) ** 3 / 3


def _even_ends(moments: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Between what a bin's elements lie if spread evenly about their mean, as their variance says."""
    total = moments[:, 0]
    safe = total.where(total > 0, 1)
    mean = moments[:, 1] / safe
    width = (3 * (moments[:, 2] / safe - mean * mean)).clamp_min(0).sqrt()
    return c + mean - width, c + mean + width


def depth_error(histogram: DepthHistogram, format: Format) -> DepthError:
    """The error of a cast to `format` with the scales that `histogram` was collected for.

    Errors are 0 for zeros alone and NaN where nothing finite was seen.
    """
    counts = histogram.table[:, 0]
    inside, flushed = counts[:ZEROS], _rounded(format, counts.device) == 0
    sums = [error_sum(histogram, format), _energy(histogram)]
    sums += [error_sum(histogram, format, weighting=RELATIVE), inside.sum(), (inside * flushed).sum()]
    sums += [counts[ZEROS], counts[NONFINITE], counts.sum()]
    noise, signal, relative, nonzero, lost, zeros, bad, elements = torch.stack(sums).tolist()
    nothing = math.nan if bad and not zeros else 0.0  # zeros are exact, and so is an empty tensor
    return DepthError(
        relative=noise / signal if nonzero else nothing,
        element=relative / nonzero if nonzero else nothing,
        underflow=lost / max(elements, 1.0),
        zeros=zeros / max(elements, 1.0),
        nonfinite=bad / max(elements, 1.0),
    )


def _energy(histogram: DepthHistogram) -> torch.Tensor:
    """sum x^2, float64 []."""
    moments = _moments(histogram, ENERGY)
    c = centres(moments.device)
    return (c * c * moments[:, 0] + 2 * c * moments[:, 1] + moments[:, 2]).sum()


def _units_of(format: Format, device: torch.device) -> torch.Tensor:
    """2^e of each row of a table's bins in steps of `format`'s own scale. Tables are filled with e4m3's scales; the
    FMAX of e5m2 is 2^7 as large, which moves every element by 7 octaves. Below an amax of 7e-34 that flatters e5m2,
    whose scale ends earlier, at float32's smallest normal."""
    return units(device) * (format.max / Format.E4M3.max)


def _moments(histogram: DepthHistogram, weighting: str) -> torch.Tensor:
    if weighting not in _FIRST_COLUMN:
        raise ValueError(f"no weighting is called {weighting!r}; one of {', '.join(_FIRST_COLUMN)}")
    if weighting == WEIGHTED and not histogram.weighted:
        raise ValueError("this depth histogram was collected without weights; give `weight` when collecting")
    first = _FIRST_COLUMN[weighting]
    return histogram.table[:ZEROS, first : first + 3]


@functools.lru_cache(maxsize=32)
def _rounded(format: Format, device: torch.device) -> torch.Tensor:
    """q of each row of a table's bins, [ZEROS] in units of its centre, by the reference's own cast."""
    cpu = torch.device("cpu")
    factor = _units_of(format, cpu)
    points, one = (centres(cpu) * factor).view(1, -1).float(), torch.ones(1, device=cpu)
    data = quantize(points, Cast(format, Granularity.TENSOR), scale=one).data
    return (data.double().view(-1) / factor).to(device)
