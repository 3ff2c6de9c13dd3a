"""A cross layer (DCNv2, arXiv:2008.13535) behind an FP8 GEMM, in plain PyTorch: ground truth, and the CPU path.

    y  [T, N] = a [T, K] @ w [N, K]^T * t * s          e4m3 operands, t of rows, s of all of w; float32 sums
    x         = p (y + b) + r                          float32; rounded to bfloat16 where it is kept
    x8        = e4m3(x / u)                            u [T], powers of two; NaN where x is not finite

The largest |x| of a row is known when all of its tiles are done, which is too late. So u is above a bound that is
known before (Cauchy and Schwarz; triangles):

    |y_ij| <= |t_i a_i| max_j |s w_j|        |x_ij| <= max|p_i| (that + max|b|) + max|r_i| <= 448 u_i

Nothing saturates, and a row's answer depends on that row alone. The bound is 4 to 7 octaves above the largest |x| of
normal and lognormal data; e4m3 is a floating point, and keeps full precision for 14 octaves below 448: it costs 0.0 to
0.2 dB (docs/log.md, 2026-11-28).
"""

from typing import NamedTuple

import torch

from loka.core.recipe import Format
from loka.kernels.edge.twin import E4M3_MAX, scale_above

LARGEST = 3e38  # a bound that overflows float32 counts as this, which no finite value of 16 bits is far above
SLACK = 1.0 + 2.0**-6  # for roundings of the bound, of sums in a tensor core, and of x to bfloat16


class Crossed(NamedTuple):
    """x bfloat16 [T, N], or None where it is not kept; data e4m3 [T, N] of x / u."""

    x: torch.Tensor | None
    data: torch.Tensor


def longest_row(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """max_j |s w_j|, float32 [1], of w e4m3 [N, K] under one scale."""
    if not w.numel():
        return torch.zeros(1, dtype=torch.float32, device=w.device)
    return (torch.linalg.vector_norm(w.float(), dim=1).amax() * scale.flatten()[0]).reshape(1)


def bound_of_rows(
    a: torch.Tensor,
    scale_a: torch.Tensor,
    longest: torch.Tensor,
    bias: torch.Tensor | None,
    scale_p: torch.Tensor,
    scale_r: torch.Tensor | None,
) -> torch.Tensor:
    """u float32 [T, 1]; arguments as `row_bound` takes them (crossed_gemm.py)."""
    largest = torch.linalg.vector_norm(a.float(), dim=1) * scale_a.view(-1) * longest
    if bias is not None:
        largest = largest + bias.float().abs().amax()
    bound = E4M3_MAX * scale_p.view(-1) * largest
    if scale_r is not None:
        bound = bound + E4M3_MAX * scale_r.view(-1)
    return scale_above((bound * SLACK).clamp_max(LARGEST)).view(-1, 1)  # NaN stays


def crossed(
    y: torch.Tensor, bias: torch.Tensor | None, p: torch.Tensor, r: torch.Tensor | None, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x float32 and x8 [T, N] of y float32 [T, N]; `scale` float32 [T, 1] is u."""
    x = p.float() * (y if bias is None else y + bias.float())
    x = x if r is None else x + r.float()
    low = (x / scale).clamp(-E4M3_MAX, E4M3_MAX)
    return x, torch.where(x.isfinite(), low, torch.nan).to(Format.E4M3.dtype)
