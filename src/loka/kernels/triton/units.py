"""The units of a gradient's rows on the GPU: the least power of two that is not below max |row|.

One pass before a chain's backward (core/producer.py). Twin: core/producer.row_units.
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl

from loka.kernels.triton.pack import magnitude_bits


@triton.jit(do_not_specialize=["rows"])
def _row_units(
    grad_ptr, units_ptr, largest_ptr, factor_0_ptr, factor_1_ptr, row_scale_ptr, rows, features,
    grad_stride,
    FACTORS: tl.constexpr, SMALLEST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    amax = tl.zeros((BLOCK_R,), dtype=tl.int32)
    for start in range(0, features, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        live = (r < rows)[:, None] & (c < features)[None, :]
        grad = tl.load(grad_ptr + r[:, None] * grad_stride + c[None, :], mask=live, other=0.0)
        amax = tl.maximum(amax, tl.max(magnitude_bits(grad.to(tl.float32)), axis=1))
    up = (tl.maximum(amax, SMALLEST) + 0x7FFFFF) & 0x7F800000
    up = tl.where(amax == 0, 0, tl.where(amax >= 0x7F800000, 0x7FC00000, up))
    units = up.to(tl.float32, bitcast=True)
    live = r < rows
    tl.store(units_ptr + r, units, mask=live)
    tl.atomic_max(largest_ptr, tl.max(tl.where(live, up, 0), axis=0), sem="relaxed")
    if FACTORS:
        scale = units * tl.load(factor_0_ptr) * tl.load(factor_1_ptr)
        tl.store(row_scale_ptr + r, scale, mask=live)


def row_units_fused(
    grad: torch.Tensor, largest: torch.Tensor, *, factors: tuple[torch.Tensor, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin: core/producer.row_units, with none or two factors. One launch."""
    assert len(factors) in (0, 2)
    rows, features = grad.shape
    units = torch.empty(rows, dtype=torch.float32, device=grad.device)
    row_scale = (
        torch.empty(rows, 1, dtype=torch.float32, device=grad.device) if factors else units.view(-1, 1)
    )
    wide = min(max(triton.next_power_of_2(features), 16), 1024)
    high = max(4096 // wide, 1)
    # Triton launches on the current device, which need not be the operand's.
    with torch.cuda.device_of(grad) if grad.is_cuda else contextlib.nullcontext():
        _row_units[(triton.cdiv(rows, high),)](
            grad,
            units,
            largest,
            *(factors or (units, units)),
            row_scale,
            rows,
            features,
            grad.stride(0),
            FACTORS=bool(factors),
            SMALLEST=1 << 23,  # the bits of 2^-126
            BLOCK_R=high,
            BLOCK_C=wide,
        )
    return units, row_scale
