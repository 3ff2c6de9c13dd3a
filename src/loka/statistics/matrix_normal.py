"""Streaming matrix normal MN(M, U, V) of a weight [N, K], by flip-flop with an EMA (paper, "Probe").

    W_c = W - M
    U' = (1/K) (W_c L_V^-T)(W_c L_V^-T)^T,   V' = (1/N) (L_U^-1 W_c)^T (L_U^-1 W_c)
    U <- m U + (1 - m) U', the same for V;  s = trace(U) / N;  U <- U / s;  V <- s V

with Cholesky factors of U + eps I and V + eps I, eps = 1e-6 of the mean diagonal. M is an
EMA of W over the earlier snapshots, so that W_c is what training moved; after one snapshot
nothing has moved, U and V are zero, and a draw is the weight itself. U and V start from the
identity times the energy of the first move: one move of N x K values determines neither, and
whitening by a rank-deficient V blew U up (docs/log.md). Sides above `full_covariance` keep
the diagonal of U or V only.
"""

from dataclasses import dataclass, fields

import torch

from loka.core.records.stats import Distribution

KIND = "matrix_normal"
_MOMENTUM = 0.95  # of U and V; the paper's range is 0.9 to 0.99
_MEAN_MOMENTUM = 0.5  # of M: it lags by a few snapshots, so draws stay near today's weight
_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class MatrixNormal:
    """`mean` [N, K]; `rows` is U, [N, N] or its diagonal [N]; `columns` is V likewise for K."""

    snapshots: int
    mean: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor


def first_snapshot(weight: torch.Tensor, *, full_covariance: int) -> MatrixNormal:
    mean = weight.detach().float().clone()
    n, k = mean.shape
    return MatrixNormal(
        snapshots=1,
        mean=mean,
        rows=mean.new_zeros(n, n) if n <= full_covariance else mean.new_zeros(n),
        columns=mean.new_zeros(k, k) if k <= full_covariance else mean.new_zeros(k),
    )


def update(learnt: MatrixNormal, weight: torch.Tensor) -> MatrixNormal:
    """One flip-flop step with a new snapshot of the weight; a non-finite one is ignored."""
    value = weight.detach().float()
    moved = value - learnt.mean
    mean = _MEAN_MOMENTUM * learnt.mean + (1 - _MEAN_MOMENTUM) * value
    energy = moved.square().sum().item()
    if not energy > 0 or energy == float("inf"):
        usable = energy == 0
        return MatrixNormal(
            snapshots=learnt.snapshots + usable,
            mean=mean if usable else learnt.mean,
            rows=learnt.rows,
            columns=learnt.columns,
        )
    n, k = moved.shape
    started = bool(learnt.columns.any())
    rows = learnt.rows if started else _identity_like(learnt.rows)
    columns = learnt.columns if started else _identity_like(learnt.columns) * (energy / (n * k))
    new_rows = _second_moment(_whiten(columns, moved.t()).t(), learnt.rows.dim()) / k
    new_columns = _second_moment(_whiten(rows, moved).t(), learnt.columns.dim()) / n
    new_rows = _MOMENTUM * rows + (1 - _MOMENTUM) * new_rows
    new_columns = _MOMENTUM * columns + (1 - _MOMENTUM) * new_columns
    scale = _mean_diagonal(new_rows)
    return MatrixNormal(snapshots=learnt.snapshots + 1, mean=mean, rows=new_rows / scale, columns=new_columns * scale)


def _identity_like(covariance: torch.Tensor) -> torch.Tensor:
    if covariance.dim() == 1:
        return torch.ones_like(covariance)
    return torch.eye(covariance.shape[0], dtype=covariance.dtype, device=covariance.device)


def _mean_diagonal(covariance: torch.Tensor) -> torch.Tensor:
    return (covariance if covariance.dim() == 1 else covariance.diagonal()).mean()


def _whiten(covariance: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """L^-1 values for covariance + eps I = L L^T, [S, *] with S the covariance's side."""
    eps = _EPS * _mean_diagonal(covariance)
    if covariance.dim() == 1:
        return values / (covariance + eps).sqrt().unsqueeze(1)
    factor = _cholesky(covariance, eps)
    return torch.linalg.solve_triangular(factor, values, upper=False)


def _cholesky(covariance: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """Factor of covariance + eps I. U has rank at most K: where float32 rounding leaves it
    indefinite beyond eps (N = 479, K = 13 did), the ridge grows tenfold until it factors."""
    identity = torch.eye(covariance.shape[0], dtype=covariance.dtype, device=covariance.device)
    for growth in range(8):
        factor, failed = torch.linalg.cholesky_ex(covariance + eps * 10**growth * identity)
        if not failed:
            return factor
    return identity * _mean_diagonal(covariance).sqrt()


def _second_moment(values: torch.Tensor, dimensions: int) -> torch.Tensor:
    """values values^T [S, S], or its diagonal [S], for values [S, *]."""
    if dimensions == 1:
        return values.square().sum(dim=1)
    moment = values @ values.t()
    return (moment + moment.t()) / 2


def to_distribution(learnt: MatrixNormal) -> Distribution:
    return Distribution(
        kind=KIND,
        tensors={"mean": learnt.mean, "rows": learnt.rows, "columns": learnt.columns},
        numbers={"snapshots": learnt.snapshots},
    )


def from_distribution(distribution: Distribution) -> MatrixNormal:
    names = [field.name for field in fields(MatrixNormal) if field.name != "snapshots"]  # others lie beside
    tensors = {name: distribution.tensors[name] for name in names}
    return MatrixNormal(snapshots=distribution.numbers["snapshots"], **tensors)
