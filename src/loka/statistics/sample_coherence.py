"""How far the rows of one sample add up in grad_weight: a sketch of what samples share.

    grad_weight = sum_s M_s,   M_s = sum_t g_st x_st^T   over the rows t of sample s (tokens, positions)

Rows of a sample share its p - y and more, so E |M_s|^2 is not sum_t E |g_st|^2 |x_st|^2 as for rows that
are independent. Kept of the samples seen, whatever their number of rows T and of positions:

    sample_factor [r, N K]   F^T F ~ sum_s vec(M_s) vec(M_s)^T, best rank r: in which directions they add up
    tail_sample_sums         float64 sums over samples, rows and pairs of rows of a sample, see SUMS

Sums add up over steps, ranks and runs; factors are stacked and cut to r again, as those of the Gaussian.
Second moments over pairs of different rows of a sample do not hang on T, so T may vary, and of long
samples a part of the rows does. statistics/sample_draws.py draws from it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from loka.core.records.stats import Distribution
from loka.statistics.gaussian import compress
from loka.statistics.row_picks import sent
from loka.statistics.tails import finite_rows, octaves

FACTOR, TOTALS = "sample_factor", "tail_sample_sums"
_DIRECTIONS, _FACTOR_ELEMENTS = 8, 1 << 20  # r, and r N K at most: 4 MiB
_POSITIONS = 64  # rows of a sample that are used, at most
_PRODUCTS = 1 << 22  # elements of all M_s of a call

SUMS = (
    *("samples", "rows", "pairs"),  # pairs: of different rows of a sample, both ways
    *("all_rows", "all_pairs"),  # the same, with the rows that were not used
    *("energy", "coherent"),  # sum |g|^2 |x|^2; sum |M_s|^2
    *("x", "g", "x_sum", "g_sum"),  # sum |x|^2; sum_s |sum_t x|^2
    # Of l = log2 of a row's energy, where x and g both have one: sums, products, products of sums by sample.
    *("alive", "alive_pairs", "log_x", "log_g", "log_xx", "log_xg", "log_gg"),
    *("log_x_sum", "log_xg_sum", "log_g_sum"),
)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """`sums` float64 [len(SUMS)], `factor` float32 [<= r, N K]."""

    sums: torch.Tensor
    factor: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Picked:
    """Of a call: the indices [S, T] of the rows of some samples, the input's values there [S, T, K], and
    the number of rows that a sample has."""

    rows: torch.Tensor
    values: torch.Tensor
    all_rows: int


def pick(given: torch.Tensor, batch: int, elements: int, most: int, generator: torch.Generator) -> Picked | None:
    """Draws some samples of a site's input `given` [.., K], and of long samples some rows.

    Args:
        batch: the number of samples in `given`; 0 if it is not known.
        elements: of the site's weight, which bound what a sample's product takes.
        most: rows of all that are drawn together; a single sample may have more.

    Returns None where a sample has a single row.
    """
    by_sample = rows_by_sample(given.shape[:-1], batch)
    if by_sample is None:
        return None
    samples, all_rows = by_sample.shape
    used = min(all_rows, _POSITIONS)
    count = max(1, min(samples, most // used, _PRODUCTS // max(elements, 1)))
    some = torch.randperm(samples, generator=generator, device="cpu")[:count]
    positions = torch.randperm(all_rows, generator=generator, device="cpu")[:used].sort().values
    rows = sent(by_sample[some][:, positions], given.device)
    values = given.reshape(-1, given.shape[-1])[rows].to(torch.float32)  # a copy: the input may change
    return Picked(rows=rows, values=values, all_rows=all_rows)


def samples_of(x: torch.Tensor, g: torch.Tensor, *, all_rows: int | None = None) -> Samples:
    """The sketch of samples `x` [S, T, K] and `g` [S, T, N]; rows with NaN or infinity are left out.

    `all_rows`: how many rows each has, if more than are given.
    """
    x, g, good = finite_rows(x, g)
    products = (g.transpose(1, 2) @ x).flatten(1)
    x_energy, g_energy = (v.double().square().sum(dim=2) for v in (x, g))
    alive = ((x_energy > 0) & (g_energy > 0)).double()
    log_x, log_g = (octaves(v.flatten(0, 1)).view(alive.shape) * alive for v in (x, g))
    rows, living = good.double().sum(dim=(1, 2)), alive.sum(dim=1)
    every = rows.new_full(rows.shape, all_rows or x.shape[1])
    sums = (
        *(torch.ones_like(rows).sum(), rows.sum(), _pairs(rows), every.sum(), _pairs(every)),
        *((x_energy * g_energy).sum(), products.double().square().sum()),
        *(x_energy.sum(), g_energy.sum(), *(v.double().sum(dim=1).square().sum() for v in (x, g))),
        *(living.sum(), _pairs(living), log_x.sum(), log_g.sum()),
        *(log_x.square().sum(), (log_x * log_g).sum(), log_g.square().sum()),
        *(log_x.sum(dim=1).square().sum(), (log_x.sum(dim=1) * log_g.sum(dim=1)).sum()),
        log_g.sum(dim=1).square().sum(),
    )
    return Samples(sums=torch.stack(sums), factor=_cut(products))


def merge_samples(a: Samples, b: Samples) -> Samples:
    """Of the samples of both; exact but for the rank of `factor`."""
    return Samples(sums=a.sums + b.sums, factor=_cut(torch.cat([a.factor, b.factor])))


def with_samples(distribution: Distribution, samples: Samples | None) -> Distribution:
    """`distribution` (of grad_output) with the sketch beside its tensors."""
    if samples is None:
        return distribution
    tensors = {**distribution.tensors, TOTALS: samples.sums, FACTOR: samples.factor}
    return replace(distribution, tensors=tensors)


def samples_in(distribution: Distribution) -> Samples | None:
    """The sketch in `distribution`; None where it was learnt without, or samples have one row each."""
    tensors = distribution.tensors
    return Samples(sums=tensors[TOTALS], factor=tensors[FACTOR]) if FACTOR in tensors else None


def merged_factors(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By name, of the tensors of two distributions; TOTALS is a plain sum and not among them."""
    kept = [tensors[FACTOR] for tensors in (a, b) if FACTOR in tensors]
    return {FACTOR: _cut(torch.cat(kept))} if kept else {}


def _cut(rows: torch.Tensor) -> torch.Tensor:
    return compress(rows, max(1, min(_DIRECTIONS, _FACTOR_ELEMENTS // max(rows.shape[1], 1))))


def _pairs(counts: torch.Tensor) -> torch.Tensor:
    """How many pairs of different rows, both ways, samples of `counts` [S] rows have together."""
    return (counts * (counts - 1)).sum()


def rows_by_sample(leading: Sequence[int], batch: int) -> torch.Tensor | None:
    """Indices [samples, T] of the rows of each sample in an input [*leading, K], by its shape alone.

    Samples lie along the side (the first or the second) that is as long as the `batch`, or else as runs
    of rows; with `batch` 0, along the first side. None where a sample has one row, or rows do not split.
    It may be wrong about samples (a flattened input with positions first): what is learnt by such runs
    is then true of the runs.
    """
    count = math.prod(leading)
    index = torch.arange(count, device="cpu")
    sides = [side for side in (0, 1) if list(leading[side : side + 1]) == [batch]]
    if sides == [1]:
        return index.view(leading[0], batch, -1).transpose(0, 1).reshape(batch, -1) if leading[0] > 1 else None
    if not batch or count % batch:
        batch = leading[0] if len(leading) > 1 else count
    return index.view(batch, -1) if count > batch > 0 else None
