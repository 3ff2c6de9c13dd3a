"""Drawing operands from learnt statistics: T = mu + Z L^T, and W = M + L_U Z L_V^T."""

from __future__ import annotations

from collections.abc import Callable

import torch

from loka.core.exceptions import UnknownName
from loka.core.stats import Distribution
from loka.probe import gaussian, matrix_normal

Sampler = Callable[[int, torch.Generator], torch.Tensor]
"""(rows, generator) -> float32 [rows, K]; for a weight `rows` is ignored and [N, K] returned."""


def sampler(distribution: Distribution, device: torch.device) -> Sampler:
    """Prepares the factors once and returns a function that draws.

    Raises UnknownName for a kind of distribution this version cannot draw from.
    """
    moved = distribution.to(device)
    if distribution.kind == gaussian.KIND:
        return _gaussian_sampler(gaussian.from_distribution(moved))
    if distribution.kind == matrix_normal.KIND:
        return _matrix_normal_sampler(matrix_normal.from_distribution(moved))
    raise UnknownName(
        f"cannot draw from statistics of kind {distribution.kind!r}",
        way_out=f"this version knows {gaussian.KIND} and {matrix_normal.KIND}; use the LoKA that wrote them",
    )


def _gaussian_sampler(learnt: gaussian.Gaussian) -> Sampler:
    freedom = max(learnt.count - 1, 1)
    mean = learnt.mean
    if learnt.scatter is not None:
        root = _root(learnt.scatter / freedom)

        def draw_full(rows: int, generator: torch.Generator) -> torch.Tensor:
            return mean + _normal((rows, learnt.features), generator) @ root.t()

        return draw_full
    assert learnt.factor is not None
    factor = learnt.factor / freedom**0.5
    spread = (learnt.square / freedom - factor.square().sum(dim=0)).clamp_min(0).sqrt()

    def draw_low_rank(rows: int, generator: torch.Generator) -> torch.Tensor:
        common = _normal((rows, factor.shape[0]), generator) @ factor
        return mean + common + _normal((rows, learnt.features), generator) * spread

    return draw_low_rank


def _matrix_normal_sampler(learnt: matrix_normal.MatrixNormal) -> Sampler:
    rows_root, columns_root = _root(learnt.rows), _root(learnt.columns)

    def draw(rows: int, generator: torch.Generator) -> torch.Tensor:
        noise = _normal(tuple(learnt.mean.shape), generator)
        noise = noise * rows_root.unsqueeze(1) if rows_root.dim() == 1 else rows_root @ noise
        noise = noise * columns_root if columns_root.dim() == 1 else noise @ columns_root.t()
        return learnt.mean + noise

    return draw


def _root(covariance: torch.Tensor) -> torch.Tensor:
    """R with R R^T = covariance, or the square roots of a diagonal; rank deficiency is fine."""
    if covariance.dim() == 1:
        return covariance.clamp_min(0).sqrt()
    values, vectors = torch.linalg.eigh(covariance.double())
    return (vectors * values.clamp_min(0).sqrt()).float()


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)
