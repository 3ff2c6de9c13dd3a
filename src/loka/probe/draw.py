"""Drawing operands from statistics: T = mu + Z L^T, W = M + L_U Z L_V^T, or plain normal numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from loka.core.exceptions import UnknownName
from loka.core.stats import Distribution
from loka.probe import gaussian, matrix_normal

NORMAL = "normal"

Sampler = Callable[[int, torch.Generator], torch.Tensor]
"""(rows, generator) -> float32 [rows, K]; for a weight `rows` is ignored and [N, K] returned."""


def normal(
    features: int,
    *,
    rows: int | None = None,
    mean: float = 0.0,
    std: float = 1.0,
    spread: float = 0.0,
    seed: int = 0,
) -> Distribution:
    """Independent normal numbers, for shapes without a model: nothing was learnt, so no tensors.

    Feature j has the standard deviation std * exp(spread z_j - spread^2), z_j standard normal from
    `seed`: the features' scales are log-normal and their mean square stays std^2.

    Args:
        features: K of operands [*, K].
        rows: N of a weight [N, K]; None for an operand whose rows are asked for.
    """
    # `count` is what readers of an operand ask first: how many rows stand behind it.
    numbers = {"features": features, "rows": rows, "mean": mean, "std": std, "spread": spread, "seed": seed}
    return Distribution(kind=NORMAL, numbers={**numbers, "count": 1})


def sampler(distribution: Distribution, device: torch.device) -> Sampler:
    """Prepares the factors once and returns a function that draws.

    Raises UnknownName for a kind of distribution this version cannot draw from.
    """
    moved = distribution.to(device)
    if distribution.kind == gaussian.KIND:
        return _gaussian_sampler(gaussian.from_distribution(moved))
    if distribution.kind == matrix_normal.KIND:
        return _matrix_normal_sampler(matrix_normal.from_distribution(moved))
    if distribution.kind == NORMAL:
        return _normal_sampler(distribution, device)
    raise UnknownName(
        f"cannot draw from statistics of kind {distribution.kind!r}",
        way_out=f"this version knows {gaussian.KIND}, {matrix_normal.KIND} and {NORMAL}; "
        "use the LoKA that wrote them",
    )


def _normal_sampler(distribution: Distribution, device: torch.device) -> Sampler:
    numbers = distribution.numbers
    features, spread, mean = numbers["features"], numbers["spread"], numbers["mean"]
    # On the CPU, so that the features have the same scales on every device.
    z = torch.randn(features, generator=torch.Generator().manual_seed(numbers["seed"]))
    std = (numbers["std"] * (spread * z - spread**2).exp()).to(device)

    def draw(rows: int, generator: torch.Generator) -> torch.Tensor:
        # In place: a weight of 147840 x 16384 in float32 is 9.7 GB.
        values = _normal((numbers["rows"] or rows, features), generator)
        return values.mul_(std).add_(mean)

    return draw


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
