"""What a GEMM takes at a shape that nobody measured: a roofline, corrected by measured neighbours.

    log t = log roofline(shape) + r(shape)        r a Gaussian process over log2 of the sides

The roofline says what every shape has in common: a launch, the FLOPs at the peak, the bytes at the bandwidth,
and for eight bits what quantizing reads and writes. Its constants are set by hand, to round numbers. The
process carries over by what factor the nearest shapes took longer than that, and its variance grows with the
distance to them. Its scales are fitted by leaving each layer out in turn (`shape_times` in benchmarks/README.md), and
tests/scale/test_scale_times.py repeats that: a stated interval is one that was checked.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from loka.core.error import Z95
from loka.core.problem import linear_problem, round_up
from loka.core.recipe import Gemm

TOGETHER = "together"
"""The three GEMMs of a layer, all in eight bits, which then quantize each tensor once for two of them."""

KINDS = (*(gemm.value for gemm in Gemm), TOGETHER)

_OCTAVES = 3  # the first features are log2 of m, n and k
_APART = 0.25  # variance of what all shapes of a kind have in common, in log t


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One GEMM of a linear layer, or `TOGETHER` all three; `weight_dtype`: of the stored weights."""

    kind: str
    rows: int
    in_features: int
    out_features: int
    weight_dtype: str

    @property
    def sides(self) -> tuple[int, int, int]:
        """m, n, k of the GEMM; those of `output` for all three."""
        problem = linear_problem(
            Gemm.OUTPUT if self.kind == TOGETHER else Gemm(self.kind),
            rows=self.rows,
            in_features=self.in_features,
            out_features=self.out_features,
            dtype="bfloat16",
            target="cpu",
        )
        return problem.m, problem.n, problem.k

    @property
    def layer(self) -> Hashable:
        return self.rows, self.in_features, self.out_features


@dataclass(frozen=True, kw_only=True)
class Surface:
    """Constants of one quantity: a time in bf16, or the gain of eight bits over it.

    Attributes:
        roofline: launch in us, peak in TFLOP/s, bandwidth in GB/s, in bf16; of a gain the same of eight bits
            behind them.
        scales: of the features; the larger, the faster two shapes are strangers.
        spread: standard deviation of log t about the roofline, far from everything measured.
        noise: of log t between two measurements of one shape.
        widen: factor on the standard deviation with which 95 % intervals held when layers were left out.
    """

    roofline: tuple[float, ...]
    scales: tuple[float, ...]
    spread: float
    noise: float
    widen: float


def features(shapes: Sequence[Shape]) -> torch.Tensor:
    """[S, F]: what makes two shapes alike. Sides in octaves, kind, alignment, dtype of the weights."""
    rows = []
    for shape in shapes:
        m, n, k = shape.sides
        # A GEMM in bf16 is slow where a row of an operand does not begin at a multiple of 16 bytes, and eight
        # bits pad what is no multiple of 16.
        aligned = min(math.gcd(side, 8) for side in (shape.in_features, shape.out_features))
        rows.append(
            [
                *(math.log2(side) for side in (m, n, k)),
                *(float(shape.kind == kind) for kind in KINDS[1:]),
                3.0 - math.log2(aligned),
                float(k % 16 != 0),
                float(n % 16 != 0),
                float(shape.weight_dtype == "float32"),
            ]
        )
    return torch.tensor(rows, dtype=torch.float64).reshape(len(shapes), -1)


def expected(shapes: Sequence[Shape], roofline: torch.Tensor) -> torch.Tensor:
    """[S]: by the roofline alone, a time in us for three constants, a gain for six."""
    high = _roofline(shapes, roofline[:3], eight=False)
    return high if len(roofline) == 3 else high / _roofline(shapes, roofline[3:], eight=True)


def _roofline(shapes: Sequence[Shape], constants: torch.Tensor, *, eight: bool) -> torch.Tensor:
    launch, peak, bandwidth = constants
    work = torch.tensor([_work(shape, eight=eight) for shape in shapes], dtype=torch.float64).reshape(-1, 4)
    flops, moved, quantized, launches = work.unbind(1)
    by_flops, by_bytes = flops / (peak * 1e6), moved / (bandwidth * 1e3)
    # A smooth maximum: where both are near, neither hides the other altogether.
    return launches * launch + (by_flops**3 + by_bytes**3) ** (1 / 3) + quantized / (bandwidth * 1e3)


def _work(shape: Shape, *, eight: bool) -> tuple[float, float, float, float]:
    """What a GEMM does: FLOPs, bytes that it moves, bytes that quantizing its operands moves, and launches.

    `eight`: in eight bits, with sides padded to multiples of 16; else in bf16. `TOGETHER` is a layer's three GEMMs.
    """
    if shape.kind == TOGETHER:
        each = [_work(replace(shape, kind=gemm.value), eight=eight) for gemm in Gemm]
        flops, moved, quantized, launches = (sum(column) for column in zip(*each, strict=True))
        return flops, moved, quantized, launches
    m, n, k = shape.sides
    kept = 4 if shape.weight_dtype == "float32" else 2
    written = kept if shape.kind == Gemm.GRAD_WEIGHT else 2
    if not eight:
        return 2.0 * m * n * k, 2.0 * (m * k + n * k) + written * m * n, 0.0, 1.0
    weight = 0 if shape.kind == Gemm.GRAD_WEIGHT else (kept - 2) * n * k
    quantized = 3.0 * (m * k + n * k) + weight  # two bytes read and one written
    m, n, k = (round_up(side, 16) for side in (m, n, k))
    return 2.0 * m * n * k, 1.0 * (m * k + n * k) + written * m * n, quantized, 1.0


def covariance(
    left: torch.Tensor, right: torch.Tensor, scales: torch.Tensor, spread: torch.Tensor | float
) -> torch.Tensor:
    """[L, R] of r between features [L, F] and [R, F]: Matern 3/2, and a constant of each kind."""
    away = (left[:, None] - right[None]) * scales
    distance = (away.square().sum(-1) + 1e-12).sqrt() * math.sqrt(3)
    kinds = slice(_OCTAVES, _OCTAVES + len(KINDS) - 1)
    same = (left[:, None, kinds] == right[None, :, kinds]).all(-1)
    return spread**2 * (1 + distance) * torch.exp(-distance) + _APART * same


@dataclass(frozen=True)
class Known:
    """Measured shapes, and log of what was measured there over what the roofline says."""

    shapes: tuple[Shape, ...]
    surface: Surface
    residual: torch.Tensor  # [S]
    weights: torch.Tensor  # [S], K^-1 residual
    inverse: torch.Tensor  # [S, S], K^-1


def known(shapes: Sequence[Shape], values: Sequence[float], surface: Surface) -> Known:
    """Of shapes and what was measured there, in the unit of the surface."""
    constants = torch.tensor(surface.roofline, dtype=torch.float64)
    measured = torch.tensor(values, dtype=torch.float64)
    residual = measured.log() - expected(shapes, constants).log()
    scales = torch.tensor(surface.scales, dtype=torch.float64)
    given = features(shapes)
    inverse = torch.linalg.inv(
        covariance(given, given, scales, surface.spread)
        + surface.noise**2 * torch.eye(len(shapes), dtype=torch.float64)
    )
    return Known(tuple(shapes), surface, residual, inverse @ residual, inverse)


def predict(base: Known, shapes: Sequence[Shape]) -> list[tuple[float, float]]:
    """For each shape log of the quantity, and the half-width of its 95 % interval."""
    if not shapes:
        return []
    surface = base.surface
    scales = torch.tensor(surface.scales, dtype=torch.float64)
    asked, given = features(shapes), features(base.shapes)
    between = covariance(asked, given, scales, surface.spread)
    prior = expected(shapes, torch.tensor(surface.roofline, dtype=torch.float64)).log()
    mean = prior + between @ base.weights
    variance = surface.spread**2 + _APART - ((between @ base.inverse) * between).sum(1) + surface.noise**2
    half = Z95 * surface.widen * variance.clamp_min(surface.noise**2).sqrt()
    return list(zip(mean.tolist(), half.tolist(), strict=True))
