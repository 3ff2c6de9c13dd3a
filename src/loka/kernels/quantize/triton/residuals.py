"""The columns of residuals behind an FP8 operand, on the GPU: one launch.

    r = fp8(clamp(hp_H / scale) - q_H)

hp [R, K] with any strides; out [>= R, >= K + 2 COUNT] row-major, in which q lies already; columns [COUNT].
Twin: `append` of core/numerics/hot_columns.py, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loka.core.numerics.reference import Quantized
from loka.kernels.quantize.triton.cast_kernels import scaled
from loka.kernels.triton.launch import cdiv, launch, launching_on, recorded
from loka.kernels.triton.pack import INTERPRETED, TRITON_TYPES

_ROWS = 32


def append_residuals_fused(low: Quantized, hp: torch.Tensor, columns: torch.Tensor, *, second: bool) -> None:
    """As `append`, of a power of two of `columns`."""

    def run() -> None:
        (rows, width), (stride, step), count = hp.shape, hp.stride(), columns.numel()
        form = {"FMAX": low.cast.format.max, "OUT": TRITON_TYPES[low.data.dtype]}
        constants = {**form, "SECOND": second, "COUNT": count, "BLOCK_R": _ROWS}
        args = (hp, low.data, low.scale, columns, rows, width, low.data.shape[1], stride, step)
        launch(_append, (cdiv(rows, _ROWS), 1), args, constants)

    with launching_on(hp):
        if INTERPRETED or not hp.is_cuda:
            run()
            return
        given = (hp, low.data, low.scale, columns)
        key = ("residuals", hp.shape, hp.stride(), hp.dtype, low.shape, low.cast, len(columns), second)
        recorded(key, given, run, lambda *_: None, lambda *_: None)


@triton.jit
def _append(
    hp_ptr,
    out_ptr,
    scale_ptr,
    columns_ptr,
    rows,
    width,
    padded_columns,
    stride_row,
    stride_column,
    FMAX: tl.constexpr,
    OUT: tl.constexpr,
    SECOND: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    behind = tl.arange(0, COUNT)
    inside = (r < rows)[:, None] & (behind < COUNT)[None, :]
    c = tl.load(columns_ptr + behind)
    hp = tl.load(hp_ptr + r[:, None] * stride_row + c[None, :] * stride_column, mask=inside, other=0.0)
    scale = tl.load(scale_ptr + r, mask=r < rows, other=1.0)
    value = scaled(hp.to(tl.float32), scale[:, None], FMAX, False)
    out = out_ptr.to(tl.pointer_type(tl.uint8)) + r[:, None] * padded_columns
    low = tl.load(out + c[None, :], mask=inside, other=0)
    left = (value - low.to(OUT, bitcast=True).to(tl.float32)).to(OUT)
    place = out + width + behind[None, :]
    tl.store(place + COUNT * (1 - SECOND), low, mask=inside)
    tl.store(place + COUNT * SECOND, left.to(tl.uint8, bitcast=True), mask=inside)
