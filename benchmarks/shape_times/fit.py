"""Constants of a surface: the largest likelihood of what was left out, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch

from loka.scaling.surface import Shape, Surface, covariance, expected, features, without

STEPS, RATE = 200, 0.05
_Z95 = 1.959964


def fit(shapes: Sequence[Shape], values: Sequence[float], roofline: tuple[float, ...]) -> Surface:
    """The surface of `values` with the given roofline; logs of all other constants are fitted."""
    given = features(shapes)
    prior = expected(shapes, torch.tensor(roofline, dtype=torch.float64)).log()
    residual = torch.tensor(values, dtype=torch.float64).log() - prior
    groups: dict[Hashable, list[int]] = {}
    for place, shape in enumerate(shapes):
        groups.setdefault(shape.layer, []).append(place)
    start = [*[1 / 8] * 3, *[0.3] * (given.shape[1] - 3), 0.4, 0.03]
    logs = torch.tensor(start, dtype=torch.float64).log().requires_grad_()

    def standardized() -> tuple[torch.Tensor, torch.Tensor]:
        scales, (spread, noise) = logs[:-2].exp(), logs[-2:].exp()
        matrix = covariance(given, given, scales, spread)
        inverse = torch.linalg.inv(matrix + noise**2 * torch.eye(len(shapes), dtype=torch.float64))
        found = [without(residual, inverse, places) for places in groups.values()]
        return torch.cat([error for error, _ in found]), torch.cat([variance for _, variance in found])

    optimizer = torch.optim.Adam([logs], lr=RATE)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        errors, variances = standardized()
        loss = (errors**2 / variances + variances.log()).sum() / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        errors, variances = standardized()
    constants = [round(value, 5) for value in logs.exp().tolist()]
    return Surface(
        roofline=roofline,
        scales=tuple(constants[:-2]),
        spread=constants[-2],
        noise=constants[-1],
        widen=round((errors.abs() / variances.sqrt()).quantile(0.95).item() / _Z95, 4),
    )
