"""Scaled cast to FP8, one pass: out = round(clamp(hp / scale)), padded with zeros.

Shapes: hp [R, C] with any strides (a transposed view is read as it lies and written
row-major), scale float32 [groups of rows, groups of columns], out [PR, PC] FP8 row-major.
Twin: core/reference.py. The kernel moves the least bytes, one read and one FP8 write; the
amax before it is a second read, which a fused producer would save.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loka.core.recipe import Cast
from loka.core.reference import Quantized
from loka.kernels.quantizer import BAD_A

_BLOCK_R, _BLOCK_C = 64, 64
_TRITON_TYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit
def _cast_kernel(
    hp_ptr,
    scale_ptr,
    out_ptr,
    health_ptr,
    rows,
    columns,
    padded_rows,
    padded_columns,
    stride_row,
    stride_column,
    scale_columns,
    group_rows,
    group_columns,
    FMAX: tl.constexpr,
    OUT_TYPE: tl.constexpr,
    WATCH: tl.constexpr,
    COUNT: tl.constexpr,
    SLOT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    written = (r < padded_rows)[:, None] & (c < padded_columns)[None, :]
    hp = tl.load(hp_ptr + r[:, None] * stride_row + c[None, :] * stride_column, mask=inside, other=0.0).to(
        tl.float32
    )
    group = (r // group_rows)[:, None] * scale_columns + (c // group_columns)[None, :]
    scale = tl.load(scale_ptr + group, mask=written, other=1.0)
    value = tl.div_rn(hp, scale)
    # Comparisons with NaN are false, so NaN stays; tl.clamp would hide it.
    value = tl.where(value > FMAX, FMAX, value)
    value = tl.where(value < -FMAX, -FMAX, value)
    tl.store(out_ptr + r[:, None] * padded_columns + c[None, :], value.to(OUT_TYPE), mask=written)
    if WATCH:
        finite = tl.abs(scale) < float("inf")
        bad = tl.sum(tl.sum(tl.where(finite, 0, 1), axis=1), axis=0)
        if bad > 0:
            tl.store(health_ptr + SLOT, 1)
        if COUNT and (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(health_ptr, tl.load(health_ptr) + 1)


def scaled_cast(
    hp: torch.Tensor,
    scale: torch.Tensor,
    cast: Cast,
    *,
    padded: tuple[int, int],
    health: torch.Tensor | None = None,
    slot: int = BAD_A,
) -> Quantized:
    """Casts `hp` [R, C] with the given dequantizing `scale`, into `padded` sides."""
    rows, columns = padded
    group_rows, group_columns = cast.granularity.group(rows, columns)
    out = torch.empty(rows, columns, dtype=cast.format.dtype, device=hp.device)
    grid = (triton.cdiv(rows, _BLOCK_R), triton.cdiv(columns, _BLOCK_C))
    # Triton launches on the current device, which need not be the operand's.
    with torch.cuda.device_of(hp):
        _cast_kernel[grid](
            hp,
            scale.contiguous(),
            out,
            health if health is not None else scale,
            hp.shape[0],
            hp.shape[1],
            rows,
            columns,
            hp.stride(0),
            hp.stride(1),
            scale.shape[1],
            group_rows,
            group_columns,
            FMAX=cast.format.max,
            OUT_TYPE=_TRITON_TYPES[cast.format.dtype],
            WATCH=health is not None,
            COUNT=slot == BAD_A,
            SLOT=slot,
            BLOCK_R=_BLOCK_R,
            BLOCK_C=_BLOCK_C,
        )
    return Quantized(out, scale, cast)
