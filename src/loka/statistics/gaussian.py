"""Streaming multivariate Gaussian over features, rows taken as independent (paper, "Probe").

    n' = n + B,  d = mu_b - mu,  mu' = mu + (B / n') d,
    Sigma' = Sigma + S_b + (n B / n') d d^T,   cov = Sigma' / (n' - 1)

Updating with a batch is merging with that batch's own statistics, so the same `merge` serves
steps, ranks and resumed runs. Above `full_covariance` features the scatter matrix is kept as
low rank plus diagonal: a factor F [r, K] with F^T F ~ Sigma, and Sigma's exact diagonal. A
full one is impossible where it would matter most (K = 123,200 needs 61 GB).
"""

from dataclasses import dataclass

import torch

from loka.core.records.stats import Distribution
from loka.statistics.subspace import leading

KIND = "gaussian"
AMAX_HISTORY = 16


@dataclass(frozen=True, kw_only=True)
class Gaussian:
    """Sufficient statistics in float32. Exactly one of `scatter` and `factor` is set.

    `square` [K] is the diagonal of the scatter matrix, exact in both cases. `amax` holds the
    largest |x| of the last sampled batches: a Gaussian has no heavy tail, so tails are kept
    beside it.
    """

    count: int
    mean: torch.Tensor
    square: torch.Tensor
    scatter: torch.Tensor | None
    factor: torch.Tensor | None
    amax: torch.Tensor
    zeros: torch.Tensor
    fourth: torch.Tensor
    nonfinite_rows: int

    @property
    def features(self) -> int:
        return self.mean.shape[0]


def gaussian_of(rows: torch.Tensor, *, full_covariance: int, rank: int, whole: torch.Tensor | None = None) -> Gaussian:
    """Statistics of one batch of `rows` [B, K], amax of `whole`; rows with NaN or infinity are counted, not used."""
    values = rows.detach().float()
    finite = torch.isfinite(values).all(dim=1)
    good = int(finite.sum())
    if good < values.shape[0]:
        values = values[finite]
    features = values.shape[1]
    mean = values.mean(dim=0) if good else values.new_zeros(features)
    centred = values - mean
    square = centred.square().sum(dim=0)
    scatter = factor = None
    if features <= full_covariance:
        scatter = centred.t() @ centred
    else:
        factor = compress(centred, rank)
    low, high = (rows if whole is None else whole).detach().aminmax(dim=1)  # no copy of a batch of activations
    largest = torch.maximum(-low, high).float()
    largest = largest[largest.isfinite()]
    amax = largest.amax().reshape(1) if largest.numel() else values.new_zeros(0)
    return Gaussian(
        count=good,
        mean=mean,
        square=square,
        scatter=scatter,
        factor=factor,
        amax=amax,
        zeros=(values == 0).sum().double(),
        fourth=centred.double().pow(4).sum(),
        nonfinite_rows=rows.shape[0] - good,
    )


def merge(a: Gaussian, b: Gaussian, *, rank: int) -> Gaussian:
    """Statistics of the rows of `a` and `b` together. Exact but for the rank of `factor`.

    `fourth` (for a rough kurtosis) lacks what skewness within the parts adds.
    """
    if a.features != b.features:
        raise ValueError(f"cannot merge Gaussians over {a.features} and {b.features} features")
    count = a.count + b.count
    if count == 0:
        weight_b = cross = 0.0
    else:
        weight_b = b.count / count
        cross = a.count * weight_b
    shift = b.mean - a.mean
    apart = shift.double().square()
    within = (1 - weight_b) ** 2 * b.square + weight_b**2 * a.square
    moved = apart * (cross * (1 - 3 * weight_b * (1 - weight_b)) * apart + 6 * within)
    scatter = factor = None
    if a.scatter is not None and b.scatter is not None:
        scatter = a.scatter + b.scatter + cross * torch.outer(shift, shift)
    else:
        assert a.factor is not None
        assert b.factor is not None
        factor = compress(torch.cat([a.factor, b.factor, (cross**0.5 * shift).unsqueeze(0)]), rank)
    return Gaussian(
        count=count,
        mean=a.mean + weight_b * shift,
        square=a.square + b.square + cross * shift.square(),
        scatter=scatter,
        factor=factor,
        amax=torch.cat([a.amax, b.amax])[-AMAX_HISTORY:],
        zeros=a.zeros + b.zeros,
        fourth=a.fourth + b.fourth + moved.sum(),
        nonfinite_rows=a.nonfinite_rows + b.nonfinite_rows,
    )


def compress(rows: torch.Tensor, rank: int) -> torch.Tensor:
    """F [<= rank, K] whose F^T F is a rank-`rank` approximation of rows^T rows, nearly the best one.

    See statistics/subspace.py.
    """
    if rows.shape[0] <= rank:
        return rows
    values = rows.double()
    # rows^T rows = V S^2 V^T and U^T rows = S V^T: projecting keeps the largest directions.
    return (leading(values @ values.t(), rank).t() @ values).float()


def to_distribution(gaussian: Gaussian) -> Distribution:
    tensors = {"mean": gaussian.mean, "square": gaussian.square, "amax": gaussian.amax}
    if gaussian.scatter is not None:
        tensors["scatter"] = gaussian.scatter
    if gaussian.factor is not None:
        tensors["factor"] = gaussian.factor
    elements = gaussian.count * gaussian.features
    variance = gaussian.square.double().mean().item() / max(gaussian.count, 1)
    kurtosis = gaussian.fourth.item() / elements / variance**2 if elements and variance else 0.0
    return Distribution(
        kind=KIND,
        tensors=tensors,
        numbers={
            "count": gaussian.count,
            "zeros": gaussian.zeros.item(),
            "fourth": gaussian.fourth.item(),
            "nonfinite_rows": gaussian.nonfinite_rows,
            "zero_fraction": gaussian.zeros.item() / elements if elements else 0.0,
            "kurtosis": kurtosis,
        },
    )


def from_distribution(distribution: Distribution) -> Gaussian:
    tensors, numbers = distribution.tensors, distribution.numbers
    return Gaussian(
        count=numbers["count"],
        mean=tensors["mean"],
        square=tensors["square"],
        scatter=tensors.get("scatter"),
        factor=tensors.get("factor"),
        amax=tensors["amax"],
        zeros=torch.tensor(numbers["zeros"], dtype=torch.float64, device="cpu"),
        fourth=torch.tensor(numbers["fourth"], dtype=torch.float64, device="cpu"),
        nonfinite_rows=numbers["nonfinite_rows"],
    )
