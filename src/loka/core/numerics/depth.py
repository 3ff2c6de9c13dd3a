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
more where values crowd at a representable one (core/numerics/depth_tables.py fills them). A margin that is no
whole number of octaves moves the thresholds into the bins; there rho^2 is averaged by quantizing 32
points of each. Power-of-two scales count from the amax that they round up to, another fraction of an
octave in every group, so they have histograms of their own: twice the memory (45 KB each), and both exact.
INT8 has its thresholds half a step apart all over: bins above a tenth of the amax hold several, and the error
there is that of elements spread evenly within the bin (`_uniform_error`); below it is exact.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from loka.core.numerics.depth_tables import BINS_PER_OCTAVE, NONFINITE, ZEROS, Operand, centres, depth_tables, units
from loka.core.numerics.reference import quantize, scale_of
from loka.core.recipe import Cast, Format, Granularity

ENERGY, RELATIVE, WEIGHTED = "energy", "relative", "weighted"
_FIRST_COLUMN = {ENERGY: 1, RELATIVE: 4, WEIGHTED: 7}
_POINTS = 32  # at which a bin is quantized where a threshold lies inside it
_LEAST_MARGIN = -4.0


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
    saturation: float
    zeros: float
    nonfinite: float

    @property
    def sqnr_db(self) -> float:
        if math.isnan(self.relative):
            return math.nan
        return -10 * math.log10(self.relative) if self.relative > 0 else math.inf


def group_amax(hp: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """The amax of each element's group, float32, of a shape that broadcasts to that of `hp` [R, C].

    For the transposed operand of a GEMM give `hp.t()` and transpose the answer. NaN and infinity pass.
    """
    rows, columns = hp.shape
    if hp.numel() == 0:
        return torch.zeros(1, 1, device=hp.device)
    magnitude = hp.detach().abs()
    if granularity is Granularity.TENSOR:
        return magnitude.amax().reshape(1, 1).float()
    if granularity is Granularity.ROW:
        return magnitude.amax(dim=1, keepdim=True).float()
    high, wide = granularity.group(rows, columns)
    padding = (0, -columns % wide, 0, -rows % high)
    blocks = torch.nn.functional.pad(magnitude, padding).unflatten(1, (-1, wide)).unflatten(0, (-1, high))
    amax = blocks.amax(dim=(1, 3)).float()
    if high > 1:
        amax = amax.repeat_interleave(high, dim=0)[:rows]
    return amax.repeat_interleave(wide, dim=1)[:, :columns]


def depth_histogram(
    hp: torch.Tensor,
    granularity: Granularity,
    *,
    power_of_two: bool = False,
    weight: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
) -> DepthHistogram:
    """The depths of `hp` [R, C], any float dtype and strides; nothing waits for the device.

    Args:
        granularity: of the scales; for columns give `hp.t()` and ROW.
        power_of_two: scales are rounded up to powers of two.
        weight: of the elements' squared errors, broadcastable to [R, C]: the squared norms of the
            other operand's columns [C] for a GEMM's output error, squared gradients for the loss.
        amax: of each element's group, broadcastable to [R, C], instead of that of `hp`: of the whole
            tensor where `hp` is a sample of rows, or of an earlier step (delayed scales): what is
            larger has a negative depth and saturates.
    """
    values = hp.detach().float()
    own = group_amax(values, granularity) if amax is None else amax.to(values)
    # e4m3 stands for both: FMAX of e5m2 is 2^7 as large, which moves every element by 7 octaves. Where
    # an amax is below 7e-34 this flatters e5m2: its scale ends earlier, at float32's smallest normal.
    scale = scale_of(own, Cast(Format.E4M3, granularity, power_of_two))
    scale = scale.where(scale.isfinite(), torch.nan).expand_as(values)
    operand = Operand(values=values, scales=[scale], weight=weight)
    return DepthHistogram(depth_tables([operand], beyond=amax is not None)[0][0])


def error_sum(
    histogram: DepthHistogram, format: Format, *, margin: float = 0.0, weighting: str = ENERGY
) -> torch.Tensor:
    """sum w (x - x^)^2, float64 [], for w of `weighting` (ENERGY, RELATIVE or WEIGHTED); no waiting.

    `margin` are octaves that the scale leaves free above the amax; negative ones saturate what
    is near it. A whole number is exact.

    Raises:
        ValueError: there are no weights in this histogram, or the margin is below -4, where elements
            that the deepest bin no longer tells apart would count.
    """
    moments = _moments(histogram, weighting)
    margin = _checked(margin)
    if format.uniform:
        return _uniform_error(moments, format, margin)
    if margin != round(margin):
        return _spread_error(moments, format, margin)
    gap = centres(moments.device) - _rounded(format, margin, moments.device)
    exact = gap * gap * moments[:, 0] + 2 * gap * moments[:, 1] + moments[:, 2]
    return exact.clamp_min(0).sum()


def _uniform_error(moments: torch.Tensor, format: Format, margin: float) -> torch.Tensor:
    """The error of integers, u = v max / FMAX(e4m3) in steps of one. In a bin all of which rounds to one
    integer, exact; in one that holds thresholds the mean over an even spread of its elements a..b,

        1 / (b - a) integral (u - round(u))^2 du = (P(b) - P(a)) / (b - a),   P(u) = n / 12 + (u - n)^3 / 3

    with n = min(round(u), max): 1 / 12 where the bin is many steps wide.
    """
    c = centres(moments.device)
    factor = units(moments.device) * (format.max / Format.E4M3.max * 2.0**-margin)
    half = torch.full_like(c, 0.5 / BINS_PER_OCTAVE)
    half[-1] = 0  # the amax is a point
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


def _spread_error(moments: torch.Tensor, format: Format, margin: float) -> torch.Tensor:
    """The error where thresholds lie inside bins: a bin's elements spread evenly about their mean, as
    wide as their variance says, and quantized at points of that."""
    begin, end = _even_ends(moments, centres(moments.device))
    even = torch.linspace(-1 + 1 / _POINTS, 1 - 1 / _POINTS, _POINTS, dtype=torch.float64, device=moments.device)
    points = ((begin + end) / 2).unsqueeze(1) + ((end - begin) / 2).unsqueeze(1) * even
    factor = (units(moments.device) * (format.max / Format.E4M3.max * 2.0**-margin)).unsqueeze(1)
    gaps = points - _quantized(points * factor, format) / factor
    return (moments[:, 0] * gaps.square().mean(dim=1)).sum()


def signal_sum(histogram: DepthHistogram, *, weighting: str = ENERGY) -> torch.Tensor:
    """sum w x^2, float64 []; for RELATIVE the number of nonzero elements. Raises as `error_sum`."""
    moments = _moments(histogram, weighting)
    c = centres(moments.device)
    return (c * c * moments[:, 0] + 2 * c * moments[:, 1] + moments[:, 2]).sum()


def depth_error(histogram: DepthHistogram, format: Format, *, margin: float = 0.0) -> DepthError:
    """The error of a cast to `format` with the scales that `histogram` was collected for.

    Errors are 0 for zeros alone and NaN where nothing finite was seen. A margin below -4 raises ValueError.
    """
    rounded = _rounded(format, _checked(margin), histogram.table.device)
    counts = histogram.table[:, 0]
    largest = torch.tensor(1.75 * 2.0 ** (8 + margin), dtype=torch.float64, device=counts.device)
    v = centres(counts.device) * units(counts.device)
    inside = counts[:ZEROS]
    sums = [error_sum(histogram, format, margin=margin), signal_sum(histogram)]
    sums += [error_sum(histogram, format, margin=margin, weighting=RELATIVE), inside.sum()]
    sums += [(inside * (rounded == 0)).sum(), (inside * (v > largest)).sum()]
    sums += [counts[ZEROS], counts[NONFINITE], counts.sum()]
    noise, signal, relative, nonzero, flushed, saturated, zeros, bad, elements = torch.stack(sums).tolist()
    nothing = math.nan if bad and not zeros else 0.0  # zeros are exact, and so is an empty tensor
    return DepthError(
        relative=noise / signal if nonzero else nothing,
        element=relative / nonzero if nonzero else nothing,
        underflow=flushed / max(elements, 1.0),
        saturation=saturated / max(elements, 1.0),
        zeros=zeros / max(elements, 1.0),
        nonfinite=bad / max(elements, 1.0),
    )


def _quantized(v: torch.Tensor, format: Format) -> torch.Tensor:
    """Q_F(v) of v [*] > 0 in units of the scale, float64, by the reference's own cast."""
    flat = v.reshape(1, -1).float()
    one = torch.ones(1, device=flat.device)
    return quantize(flat, Cast(format, Granularity.TENSOR), scale=one).data.double().reshape(v.shape)


def _checked(margin: float) -> float:
    if not margin >= _LEAST_MARGIN:
        raise ValueError(f"a margin of {margin} octaves: histograms answer from {_LEAST_MARGIN:g} up")
    return float(margin)


def _moments(histogram: DepthHistogram, weighting: str) -> torch.Tensor:
    if weighting not in _FIRST_COLUMN:
        raise ValueError(f"no weighting is called {weighting!r}; one of {', '.join(_FIRST_COLUMN)}")
    if weighting == WEIGHTED and not histogram.weighted:
        raise ValueError("this depth histogram was collected without weights; give `weight` when collecting")
    first = _FIRST_COLUMN[weighting]
    return histogram.table[:ZEROS, first : first + 3]


@functools.lru_cache(maxsize=256)
def _rounded(format: Format, margin: float, device: torch.device) -> torch.Tensor:
    cpu = torch.device("cpu")
    factor = units(cpu) * (format.max / Format.E4M3.max * 2.0**-margin)
    return (_quantized(centres(cpu) * factor, format) / factor).to(device)
