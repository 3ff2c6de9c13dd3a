"""Every error of a GEMM's result against the float32 product of the same operands, in one pass.

    sqnr_db, mere     core/error.py says what they are
    r_i             = sum_j D_ij^2 / sum_j G_ij^2           of the rows i with G_i != 0,   D = out - G
    row_db          = -10 log10 mean_i 2 (1 - (1 + r_i)^(-1/2))
    row_p99_db      = -10 log10 (99th percentile of r_i)

`sqnr_db` is that of the large rows: where rows differ in size and share a scale it says 28 dB while the
small ones are lost. `row_db` counts every row alike. 2 (1 - (1 + r)^(-1/2)) is the squared distance that
a row is moved on the unit sphere by an error across it, which is what a norm behind the GEMM sees: r
where that is small, and never above 2, so that rows near 0 (every second one, where N = 1) do not carry
the mean. `row_p99_db` is the SQNR that 99 in 100 rows reach.
"""

import math

import torch

from loka.core.error import decibels
from loka.core.numerics.direction import Fold, Turn, angle_of


class Truth:
    """The true product [M, N] float32 and what is made of it once for all candidates.

    Args:
        by_row: rows are examples, whose errors are told apart.
        fold: where the product is a gradient, what keeps its direction.
    """

    def __init__(self, product: torch.Tensor, *, by_row: bool, fold: Fold | None = None) -> None:
        self.product = product
        self.fold = fold
        self.gradient = None if fold is None else fold(product)
        nonzero = product != 0
        self.divisor = product.where(nonzero, math.inf)
        self.divisible = int(nonzero.sum())
        self.rows = product.square().sum(dim=1, dtype=torch.float64)
        self.signal = float(self.rows.sum())
        self.by_row = by_row
        self.kept = None if bool((self.rows > 0).all()) else self.rows > 0


def errors_of(out: torch.Tensor, truth: Truth) -> tuple[dict[str, float], Turn | None]:
    """By name: "sqnr_db", "mere", with rows "row_db" and "row_p99_db", of a gradient "angle"; and its turn.

    inf for an exact result, nan where `out` holds a NaN.
    """
    error = out.float() - truth.product
    rows = error.square().sum(dim=1, dtype=torch.float64)
    numbers = [rows.sum(), (error / truth.divisor).abs().sum(dtype=torch.float64)]
    if truth.by_row:
        ratios = rows / truth.rows
        ratios = ratios if truth.kept is None else ratios[truth.kept]
        numbers += [_moved(ratios), _percentile(ratios)]
    if truth.fold is not None:
        # Not torch.dot, whose BLAS counts to 2^31: weights of 147840 x 16384 are more.
        numbers.append((error * truth.product).sum(dtype=torch.float64))
    energy, relative, *rest = torch.stack(numbers).tolist()  # one wait for the device
    found = {
        "sqnr_db": decibels(energy, truth.signal),
        "mere": relative / truth.divisible if truth.divisible else math.nan,
    }
    if truth.by_row:
        found |= {"row_db": decibels(rest[0], 1.0), "row_p99_db": decibels(rest[1], 1.0)}
    if truth.fold is None or truth.gradient is None:
        return found, None
    cross = rest[-1]
    found["angle"] = angle_of(energy, cross, truth.signal)
    folded = truth.fold(error)
    return found, Turn(energy=energy, cross=cross, signal=truth.signal, error=folded, gradient=truth.gradient)


def _moved(ratios: torch.Tensor) -> torch.Tensor:
    """2 (1 - (1 + r)^(-1/2)), without the cancellation of small r; nan without rows."""
    return (-2 * torch.expm1(-torch.log1p(ratios) / 2)).mean()


def _percentile(ratios: torch.Tensor) -> torch.Tensor:
    if not len(ratios):
        return ratios.new_full((), math.nan)
    return ratios.sort().values[math.ceil(0.99 * len(ratios)) - 1]
