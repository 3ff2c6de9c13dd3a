"""Hot columns: what rounding leaves of the columns that matter most runs as more columns of the same GEMM.

    y [T, N] = Q(x) Q(W)^T + Q(x - Q(x))_H Q(W)_H^T + Q(x)_H Q(W - Q(W))_H^T        x [T, K], W [N, K]
             = [Q(x), r_x, Q(x)_H] [Q(W), Q(W)_H, r_W]^T                            over K + 2 |H| columns

H are the columns that add most to the error of the logits: in many layers 32 of hundreds have half of it and
more. The scale of a row serves all of its columns. In its units v = x / s a residual v - q is exact in
float32, and in e4m3 as precise as x itself: at most 2^-4 |v|, it is a normal number for |v| >= 2^-2, eleven
octaves below the row's largest. Neither a power of two on it nor the product of both residuals changed KL/H
by more than 2 % (docs/log.md, 2026-11-23). What is left of a hot column is e4m3's relative error once more.
"""

from __future__ import annotations

import torch

from loka.core.numerics.reference import Quantized

LEFT = 7e-4
"""The energy of e4m3's rounding error over that of what it rounds: -31.5 dB."""


def hottest(heat: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` columns, int64 and ascending, of most `heat` [K]; the first of equal ones; NaN is none."""
    order = heat.double().nan_to_num(nan=0.0).argsort(descending=True, stable=True)
    return order[:count].sort().values


def append(low: Quantized, hp: torch.Tensor, columns: torch.Tensor, *, second: bool = False) -> None:
    """Writes r and Q of `columns` [C] of `hp` [R, K] behind column K of `low`, in place; Q and r if `second`.

    `low` is `hp` quantized to e4m3 by row into sides [>= R, >= K + 2 C].
    """
    (rows, width), count, fmax = hp.shape, columns.numel(), low.cast.format.max
    v = (hp[:, columns].float() / low.scale[:rows]).clamp(-fmax, fmax)
    q = low.data[:rows, columns]
    r = (v - q.float()).to(q.dtype)
    low.data[:rows, width : width + 2 * count] = torch.cat([q, r] if second else [r, q], dim=1)
