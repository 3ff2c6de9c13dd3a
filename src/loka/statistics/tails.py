"""Draws with the tails, zeros, row energies and coherence of the real operands, not only their covariance.

A Gaussian matches two moments. What FP8 does also depends on how deep elements lie below their scale's
amax, on zeros, on rows of very different energy (a gradient's rows go with p - y), and, in
grad_weight = sum_i g_i x_i^T, on how far the rows of both operands agree. Three sketches beside the
Gaussian, all of them sums that merge by addition:

    tail_columns [K, 2 B + 1]   counts of sign(x) and log2 |x| in half octaves, per column, and of zeros
    tail_rows [R]               counts of log2 sum_k x_ik^2 in quarter octaves
    tail_cross [N, K]           C = sum_i g_i x_i^T; worth its N K numbers where covariances are kept in full

Gaussian rows, g given x where C is known, get their magnitudes moved: columns to the sketch's values by
rank, rows to its energies by rank, a few times in turn and columns last. So each column has its own
distribution, whence the depth histograms at every granularity follow closely, and nearly the covariance.
That is done to a pool of many draws at once, whose parts are then handed out: by rank within one draw
every column would have the same mean each time, and it is the chance in that mean that adds up in a
real batch's grad_weight (3 dB of its error).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from loka.core.records.stats import Distribution

_PER_OCTAVE = 2
_LOWEST, _HIGHEST = -44, 20  # octaves of |x| in a column; what is beyond lies in the last bin
_SIDE = (_HIGHEST - _LOWEST) * _PER_OCTAVE
_ROWS_PER_OCTAVE = 4
_ROWS_LOWEST, _ROWS_HIGHEST = -100, 60  # octaves of a row's energy
_TURNS = 3

COLUMNS, ROWS, CROSS = "tail_columns", "tail_rows", "tail_cross"
CROSS_COUNT = "tail_cross_count"


@dataclass(frozen=True, kw_only=True)
class Tails:
    """`columns` float32 [K, 2 B + 1]: bins of the negative values from the largest down, zeros, bins of
    the positive ones up. `rows` float32 [R] counts of rows by energy, zero rows in the first."""

    columns: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Cross:
    """`sum` float32 [N, K], g x^T over `count` rows (a tensor, so that nothing waits)."""

    count: torch.Tensor
    sum: torch.Tensor

    @property
    def mean(self) -> torch.Tensor:
        """float64 [N, K]; zeros of no rows."""
        return self.sum.double() / max(self.count.item(), 1.0)


def tails_of(hp: torch.Tensor) -> Tails:
    """Sketches of the rows `hp` [m, K]; rows with NaN or infinity are left out. Nothing waits."""
    values = hp.detach().float()
    good = torch.isfinite(values).all(dim=1, keepdim=True)
    values = torch.where(good, values, 0)
    level = torch.log2(values.abs().double()).sub_(_LOWEST).mul_(_PER_OCTAVE)
    level = level.floor_().clamp_(0, _SIDE - 1).long()
    cell = torch.where(values > 0, _SIDE + 1 + level, _SIDE - 1 - level).masked_fill_(values == 0, _SIDE)
    once = good.float()
    columns = values.new_zeros(values.shape[1], 2 * _SIDE + 1)
    columns.scatter_add_(1, cell.t(), once.expand_as(values).t())
    energy = octaves(values).sub_(_ROWS_LOWEST).mul_(_ROWS_PER_OCTAVE)
    size = (_ROWS_HIGHEST - _ROWS_LOWEST) * _ROWS_PER_OCTAVE
    rows = values.new_zeros(size).scatter_add_(0, energy.clamp_(0, size - 1).long(), once.squeeze(1))
    return Tails(columns=columns, rows=rows)


def octaves(rows: torch.Tensor) -> torch.Tensor:
    """log2 of the energies of `rows` [m, K], float64; a row of zeros has the lowest that is kept."""
    energy = rows.double().square().sum(dim=1)
    return torch.log2(energy).clamp_(_ROWS_LOWEST, _ROWS_HIGHEST)


def merge_tails(a: Tails, b: Tails) -> Tails:
    """Raises ValueError for sketches of different widths."""
    if a.columns.shape != b.columns.shape:
        raise ValueError(f"cannot merge tails of {a.columns.shape[0]} and {b.columns.shape[0]} features")
    return Tails(columns=a.columns + b.columns, rows=a.rows + b.rows)


def cross_of(hp: torch.Tensor, grad_output: torch.Tensor) -> Cross:
    """C of the rows `hp` [m, K] and `grad_output` [m, N], the same rows of both; nothing waits."""
    x, g, good = finite_rows(hp, grad_output)
    return Cross(count=good.sum().double(), sum=g.t() @ x)


def finite_rows(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [.., K] and g [.., N] in float32, with zeros for rows that are not finite in both; and which are, [.., 1]."""
    x, g = x.detach().float(), g.detach().float()
    good = (torch.isfinite(x).all(dim=-1) & torch.isfinite(g).all(dim=-1)).unsqueeze(-1)
    return torch.where(good, x, 0), torch.where(good, g, 0), good


def merge_cross(a: Cross, b: Cross) -> Cross:
    """C of the rows of both."""
    return Cross(count=a.count + b.count, sum=a.sum + b.sum)


def with_tails(distribution: Distribution, tails: Tails, cross: Cross | None = None) -> Distribution:
    """`distribution` with the sketches beside its tensors; `cross` belongs to grad_output's."""
    tensors = {**distribution.tensors, COLUMNS: tails.columns, ROWS: tails.rows}
    numbers = dict(distribution.numbers)
    if cross is not None:
        tensors[CROSS] = cross.sum
        numbers[CROSS_COUNT] = cross.count.item()
    return replace(distribution, tensors=tensors, numbers=numbers)


def tails_in(distribution: Distribution) -> Tails | None:
    if not {COLUMNS, ROWS} <= set(distribution.tensors):
        return None
    return Tails(columns=distribution.tensors[COLUMNS], rows=distribution.tensors[ROWS])


def cross_in(distribution: Distribution) -> Cross | None:
    """The same for how grad_output goes with input."""
    if CROSS not in distribution.tensors:
        return None
    count = torch.tensor(distribution.numbers[CROSS_COUNT], dtype=torch.float64, device="cpu")
    return Cross(count=count, sum=distribution.tensors[CROSS])


def reshape(
    drawn: torch.Tensor,
    tails: Tails,
    generator: torch.Generator,
    order: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """`drawn` [m, K] with its magnitudes moved to the sketches', ranks kept. `generator` is on its device.

    `order` takes the rows' energies [m] to what they are ranked by; by default it is the energies.
    """
    if drawn.numel() == 0 or not bool(tails.rows.any()):
        return drawn
    # Columns first: rows scaled before them would send a small row's elements to the zeros together.
    values = _column_values(tails.columns, drawn, generator)
    targets = _row_targets(tails.rows, drawn.shape[0], generator)
    for _ in range(_TURNS):
        energy = values.double().square().sum(dim=1)
        wanted = torch.empty_like(energy)
        wanted[(energy if order is None else order(energy)).argsort()] = targets
        values = values * (wanted / energy.clamp_min(1e-300)).sqrt().float().unsqueeze(1)
        values = _column_values(tails.columns, values, generator)
    return values


def _row_targets(counts: torch.Tensor, m: int, generator: torch.Generator) -> torch.Tensor:
    """Energies [m], ascending: the quantiles of `counts` at m jittered places."""
    place = _places(m, 1, generator)[:, 0]
    cell, inside = _invert(counts.unsqueeze(0), place.unsqueeze(0))
    octave = (cell[0] + inside[0]) / _ROWS_PER_OCTAVE + _ROWS_LOWEST
    return torch.where(cell[0] == 0, 0.0, torch.exp2(octave))


def _column_values(counts: torch.Tensor, values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """`values` [m, K] with each column's numbers replaced, rank for rank, by quantiles of `counts`."""
    m, k = values.shape
    cell, inside = _invert(counts, _places(m, k, generator).t())
    positive = cell > _SIDE
    steps = torch.where(positive, cell - _SIDE - 1 + inside, _SIDE - cell - inside)
    size = torch.exp2(steps / _PER_OCTAVE + _LOWEST)
    sign = torch.sign(cell - _SIDE).to(size)
    quantiles = (size * sign).to(values)
    ranked = values.t().contiguous().argsort(dim=1)  # by columns as they do not lie, it takes three times as long
    return torch.empty_like(quantiles).scatter_(1, ranked, quantiles).t().contiguous()


def _places(m: int, k: int, generator: torch.Generator) -> torch.Tensor:
    """[m, k], ascending in each column: one place in every m-th of (0, 1)."""
    jitter = torch.rand(m, k, generator=generator, device=generator.device, dtype=torch.float64)
    return (torch.arange(m, device=jitter.device).unsqueeze(1) + jitter) / m


def _invert(counts: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bin and the part of it below, for `place` [K, m] in the distributions `counts` [K, bins]."""
    above = counts.double().cumsum(dim=1)
    target = place * above[:, -1:]
    cell = torch.searchsorted(above, target.contiguous(), right=True).clamp(max=counts.shape[1] - 1)
    inside = counts.double().gather(1, cell)
    below = above.gather(1, cell) - inside
    return cell, ((target - below) / inside.clamp_min(1e-30)).clamp(0, 1)


def coupling(cross: Cross, means: tuple[torch.Tensor, torch.Tensor], covariance: torch.Tensor) -> torch.Tensor:
    """M [N, K] with E[g | x] = mean_g + M (x - mean_x), for `means` of x and g and x's covariance [K, K]."""
    between = cross.mean - torch.outer(means[1].double(), means[0].double())
    ridge = 1e-3 * covariance.double().diagonal().mean().clamp_min(1e-300)
    eye = torch.eye(covariance.shape[0], dtype=torch.float64, device=covariance.device)
    return torch.linalg.solve(covariance.double() + ridge * eye, between.t()).t()
