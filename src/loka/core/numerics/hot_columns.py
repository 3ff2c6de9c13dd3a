"""Hot columns: what rounding leaves of the columns that matter most runs as more columns of the same GEMM.

    y [T, N] = Q(x) Q(W)^T + Q(x - Q(x))_H Q(W)_H^T + Q(x)_H Q(W - Q(W))_H^T        x [T, K], W [N, K]
             = [Q(x), r_x, Q(x)_H] [Q(W), Q(W)_H, r_W]^T                            over K + 2 |H| columns

H are the columns that add most to the error of the logits: 32 of hundreds often have half of it. The scale s
of a row serves all of its columns: a residual v - q of v = x / s is at most 2^-4 |v|, and a normal number of
e4m3 down to |v| = 2^-2, eleven octaves below the row's largest (docs/log.md, 2026-11-23).
"""

import torch

from loka.core.numerics.reference import Quantized
from loka.core.recipe import Format

LEFT = 7e-4
"""Of a hot column's error: the energy of e4m3's error over that of what it rounds, -31.5 dB."""


def hottest(heat: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` columns, int64 and ascending, of most `heat` [K]; the first of equal ones; NaN is none."""
    order = heat.double().nan_to_num(nan=0.0).argsort(descending=True, stable=True)
    return order[:count].sort().values


def in_units(hp: torch.Tensor, scale: torch.Tensor, format: Format) -> torch.Tensor:
    """v [R, C] float32 of values under scales [R, 1] of their rows."""
    return (hp.float() / scale).clamp(-format.max, format.max)


def append(low: Quantized, hp: torch.Tensor, columns: torch.Tensor, *, second: bool = False) -> None:
    """Writes r and Q of `columns` [C] of `hp` [R, K] behind column K of `low`, in place; Q and r if `second`.

    `low` is `hp` quantized to e4m3 by row into sides [>= R, >= K + 2 C].
    """
    (rows, width), count = hp.shape, columns.numel()
    q = low.data[:rows, columns]
    r = (in_units(hp[:, columns], low.scale[:rows], low.cast.format) - q.float()).to(q.dtype)
    behind = width + count
    low.data[:rows, width:behind] = q if second else r  # autocast refuses a `cat` of FP8
    low.data[:rows, behind : behind + count] = r if second else q
