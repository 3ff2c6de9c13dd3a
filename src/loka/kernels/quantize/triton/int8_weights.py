"""INT8 copies of a list of weights on the GPU: one launch for up to 16 weights of one dtype.

A program has a few whole rows of one weight: it finds their maxima, and reads them again, from the cache, to
cast. Twin: core/numerics/reference.py. Programs find their weight as those of fp8_weights.py do.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from loka.core.numerics.reference import TINY
from loka.kernels.quantize.triton.cast_kernels import scale_of, scaled
from loka.kernels.quantize.triton.fp8_weights import HIGH_PRECISION, is_aligned, numbers, plain, starts
from loka.kernels.triton.launch import cdiv, launching_on
from loka.kernels.triton.pack import integer, magnitude_bits

_TILE = 4096  # elements that a program holds at a time
_WIDE = 1024  # columns of them, at most


@triton.jit
def _load(weight_ptr, r, c, rows, columns, stride):
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    return tl.load(weight_ptr + (r[:, None] * stride + c[None, :]), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _quantize(
    weights, copies, scales, firsts, all_rows, all_columns, strides,
    WEIGHTS: tl.constexpr, WEIGHT: tl.constexpr, ALIGN: tl.constexpr, TINY: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """ALIGN: elements of 16 bytes where all rows begin and end at multiples of them, else 1. The compiler
    sees it by the factor, and loads that many at once."""
    program = tl.program_id(0)
    weight, copy, scale = weights[0].to(tl.int64), copies[0].to(tl.int64), scales[0].to(tl.int64)
    first, rows, columns, stride = firsts[0], all_rows[0], all_columns[0], strides[0]
    for index in tl.static_range(1, WEIGHTS):
        here = program >= plain(firsts[index])
        weight = tl.where(here, weights[index].to(tl.int64), weight)
        copy = tl.where(here, copies[index].to(tl.int64), copy)
        scale = tl.where(here, scales[index].to(tl.int64), scale)
        first = tl.where(here, firsts[index], first)
        rows = tl.where(here, all_rows[index], rows)
        columns = tl.where(here, all_columns[index], columns)
        stride = tl.where(here, strides[index], stride)
    rows, columns = plain(rows), plain(columns) // ALIGN * ALIGN
    stride = (plain(stride) // ALIGN * ALIGN).to(tl.int64)
    padded_rows, padded_columns = (rows + 15) // 16 * 16, (columns + 15) // 16 * 16
    weight_ptr = tl.multiple_of(weight.to(tl.pointer_type(WEIGHT)), ALIGN * WEIGHT.primitive_bitwidth // 8)
    copy_ptr = tl.multiple_of(copy.to(tl.pointer_type(tl.uint8)), 16)
    scale_ptr = tl.multiple_of(scale.to(tl.pointer_type(tl.float32)), 16)
    r = (program - plain(first)).to(tl.int64) * HIGH + tl.arange(0, HIGH)
    bits = tl.zeros((HIGH,), tl.int32)
    for step in range(0, columns, WIDE):
        hp = _load(weight_ptr, r, step + tl.arange(0, WIDE), rows, columns, stride)
        bits = tl.maximum(bits, tl.max(magnitude_bits(hp), axis=1))
    steps = scale_of(bits, 127.0, TINY, False)
    tl.store(scale_ptr + r, steps, mask=r < padded_rows)
    for step in range(0, padded_columns, WIDE):
        c = step + tl.arange(0, WIDE)
        low = integer(scaled(_load(weight_ptr, r, c, rows, columns, stride), steps[:, None], 127.0, False))
        written = (r < padded_rows)[:, None] & (c < padded_columns)[None, :]
        tl.store(copy_ptr + (r[:, None] * padded_columns + c[None, :]), low.to(tl.uint8), mask=written)


def quantize_rows_fused(weights: Sequence[torch.Tensor], copies: Sequence[Sequence[torch.Tensor]]) -> None:
    """Writes row int8 [N16, K16] and scale float32 [N16] of up to 16 weights [N, K] of one dtype, whose
    elements lie side by side in a row."""
    widest = max(weight.shape[1] for weight in weights)
    wide = max(min(triton.next_power_of_2(widest), _WIDE), 16)
    high = _TILE // wide
    align = 16 // weights[0].element_size()
    if not all(is_aligned(weight) and weight.shape[1] % align == 0 for weight in weights):
        align = 1
    begins = starts([cdiv(copy[0].shape[0], high) for copy in copies])
    with launching_on(weights[0]):
        _quantize[(begins[-1],)](
            tuple(weights),
            tuple(copy[0] for copy in copies),
            tuple(copy[1] for copy in copies),
            numbers(begins[:-1]),
            numbers([weight.shape[0] for weight in weights]),
            numbers([weight.shape[1] for weight in weights]),
            numbers([weight.stride(0) for weight in weights]),
            WEIGHTS=len(weights),
            WEIGHT=HIGH_PRECISION[weights[0].dtype],
            ALIGN=align,
            TINY=TINY,
            HIGH=high,
            WIDE=wide,
        )
