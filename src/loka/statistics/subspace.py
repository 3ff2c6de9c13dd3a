"""The leading eigenvectors of a Gram matrix, by a few turns of subspace iteration.

    Q <- orthonormal columns of  G Q         G [n, n] symmetric, no eigenvalue negative;  Q [n, r]

An exact decomposition of a 512 x 512 matrix takes a GPU tens of milliseconds, and a sampled step needs one
for every wide operand. Four turns leave less than 0.1 % of the energy that the best Q holds behind where
eigenvalues fall off, and more only where they do not, and no direction is worth more than another.
"""

import functools

import torch

_TURNS = 4
_RIDGE = 1e-15  # of the trace: columns may depend on each other, where rank(G) < r


def leading(gram: torch.Tensor, rank: int) -> torch.Tensor:
    """Q [n, rank] for `gram` [n, n] float64; nothing waits. Where G has a lower rank, columns are small."""
    columns = _start(gram.shape[0], rank, gram.device)
    for _ in range(_TURNS):
        columns = _orthonormal(gram @ columns)
    return columns


def _orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """By Cholesky, twice: the second time takes out what rounding left."""
    for _ in range(2):
        products = columns.t() @ columns
        diagonal = products.diagonal()
        diagonal.add_(diagonal.sum() * _RIDGE + torch.finfo(products.dtype).tiny)
        factor, _ = torch.linalg.cholesky_ex(products)
        columns = torch.linalg.solve_triangular(factor, columns.t(), upper=False).t()
    return columns


@functools.lru_cache(maxsize=32)
def _start(n: int, rank: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, rank, dtype=torch.float64, generator=generator, device="cpu").to(device)
