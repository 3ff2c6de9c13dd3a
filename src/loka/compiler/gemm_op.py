"""The GEMMs of a region, from operands that come quantized.

    output        y  = (x / t) (W / s)^T         rows scaled by t s
    grad_input    dx = (dy / r) (W^T / s)^T      rows scaled by r s
    grad_weight   dW = (dy / r)^T (r x / M)      scaled by M

A scale of one element is that of a tensor; more are those of rows.
"""

from __future__ import annotations

import torch

from loka.core.problem import Problem, dtype_name, target_of
from loka.core.recipe import Cast, Format, Gemm, Granularity
from loka.core.reference import Quantized
from loka.kernels.launches import note_launch
from loka.kernels.run import fit, scaled_gemm
from loka.nn.site_ops import registered

TOKEN = 4  # place of the argument that is not read
_ROW = Cast(Format.E4M3, Granularity.ROW)
_TENSOR = Cast(Format.E4M3, Granularity.TENSOR)


def _region_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    token: torch.Tensor | None,
    site: str,
    gemm: str,
    kernel: str,
    rows: int,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """out [rows, columns] = a [rows.., K] @ b [columns.., K]^T, both float8 and padded with zeros to 16.

    a_scale: float32 [1], or at least [rows] in any shape; b_scale: float32 of at least [columns], all one
    number where it stands for a tensor. `token` is not read: it keeps alive what counts runs.
    """
    note_launch("gemm")
    if rows == 0:
        return a.new_empty(0, columns, dtype=dtype)
    by_rows = a_scale.numel() > 1
    problem = Problem(
        gemm=Gemm(gemm), m=rows, n=columns, k=a.shape[1], dtype=dtype_name(dtype), target=target_of(a.device)
    )
    run = scaled_gemm(f"{kernel}:{'rowwise' if by_rows else 'tensorwise'}_e4m3", problem)
    cast = _ROW if by_rows else _TENSOR
    a, b = fit(a, run.padded_a), fit(b, run.padded_b)
    if not by_rows:
        return run(Quantized(a, a_scale.view(1, 1), cast), Quantized(b, b_scale[:1].view(1, 1), cast))
    scale_a = a_scale.reshape(-1, 1)
    if scale_a.shape[0] != a.shape[0]:
        scale_a = torch.nn.functional.pad(scale_a, (0, 0, 0, a.shape[0] - scale_a.shape[0]), value=1.0)
    return run(Quantized(a, scale_a, cast), Quantized(b, b_scale[: b.shape[0]].view(-1, 1), cast))


def _region_gemm_fake(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    token: torch.Tensor | None,
    site: str,
    gemm: str,
    kernel: str,
    rows: int,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    return a.new_empty(rows, columns, dtype=dtype)


region_gemm = registered("loka::region_gemm", _region_gemm, _region_gemm_fake)
