"""Quantization to FP8 on the GPU: amax, scale and cast in one launch or two.

    scale = max(amax, tiny * FMAX) / FMAX        out = round(clamp(hp / scale))

Shapes: hp [R, C] with any strides (a transposed view is read as it lies and written
row-major), out [PR, PC] FP8 row-major with zeros in the padding, scale float32 [groups of
rows, groups of columns]. Twin: core/reference.py, bit for bit.

Where a program can hold a whole group (rows of a row-major operand, 1x128 and 128x128
groups) one launch does everything. A tensor scale, or a row scale of a transposed view (a
column amax), needs all amaxes first: a launch writes partial maxima and a second casts.
Small launches are what costs: with amax, scale and cast as separate torch ops the same work
took 83 us of a 133 us site at M=8192, N=K=2048 (docs/log.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loka.core.recipe import Cast, Granularity
from loka.core.reference import Quantized

_TILE = 4096  # elements a program holds at a time
_TINY = torch.finfo(torch.float32).tiny
_PARTS = 64  # partial maxima per row; a tensor has up to 8 times as many
_TRITON_TYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit
def _magnitude_bits(value):
    # Non-negative floats order like their bits, and NaN lies above infinity: an integer
    # maximum needs no NaN handling and never loses one.
    return tl.abs(value).to(tl.int32, bitcast=True)


@triton.jit
def _scale_of(amax_bits, FMAX: tl.constexpr, TINY: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    amax = amax_bits.to(tl.float32, bitcast=True)
    scale = tl.where(amax < TINY * FMAX, TINY, tl.div_rn(amax, FMAX))
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(scale < float("inf"), rounded, scale)
    return scale


@triton.jit
def _load(hp_ptr, r, c, rows, columns, stride_row, stride_column):
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    offsets = r[:, None] * stride_row + c[None, :] * stride_column
    return tl.load(hp_ptr + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(out_ptr, hp, scale, r, c, padded_rows, padded_columns, FMAX: tl.constexpr, OUT: tl.constexpr):
    value = tl.div_rn(hp, scale)
    # Comparisons with NaN are false, so NaN stays; tl.clamp would hide it.
    value = tl.where(value > FMAX, FMAX, value)
    value = tl.where(value < -FMAX, -FMAX, value)
    written = (r < padded_rows)[:, None] & (c < padded_columns)[None, :]
    tl.store(out_ptr + r[:, None] * padded_columns + c[None, :], value.to(OUT), mask=written)


@triton.jit
def _watch(health_ptr, scale, SLOT: tl.constexpr, COUNT: tl.constexpr):
    finite = tl.abs(scale) < float("inf")
    if tl.sum(tl.where(finite, 0, 1), axis=0) > 0:
        tl.store(health_ptr + SLOT, 1)
    if COUNT and (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(health_ptr, tl.load(health_ptr) + 1)


@triton.jit
def _quantize_groups(
    hp_ptr,
    out_ptr,
    scale_ptr,
    health_ptr,
    rows,
    columns,
    padded_rows,
    padded_columns,
    stride_row,
    stride_column,
    span,
    FMAX: tl.constexpr,
    TINY: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SHARE_ROWS: tl.constexpr,
    OUT: tl.constexpr,
    WATCH: tl.constexpr,
    COUNT: tl.constexpr,
    SLOT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A program owns BLOCK_R rows over `span` columns: one group a row, or one for all its rows."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    begin = tl.program_id(1).to(tl.int64) * span
    amax = tl.zeros((BLOCK_R,), dtype=tl.int32)
    for step in range(0, span, BLOCK_C):
        c = begin + step + tl.arange(0, BLOCK_C)
        hp = _load(hp_ptr, r, c, rows, columns, stride_row, stride_column)
        amax = tl.maximum(amax, tl.max(_magnitude_bits(hp), axis=1))
    if SHARE_ROWS:
        amax = tl.zeros((BLOCK_R,), dtype=tl.int32) + tl.max(amax, axis=0)
    scale = _scale_of(amax, FMAX, TINY, POWER_OF_TWO)
    for step in range(0, span, BLOCK_C):  # the second read comes from the cache
        c = begin + step + tl.arange(0, BLOCK_C)
        hp = _load(hp_ptr, r, c, rows, columns, stride_row, stride_column)
        _store(out_ptr, hp, scale[:, None], r, c, padded_rows, padded_columns, FMAX, OUT)
    scale_columns = tl.num_programs(1)
    if SHARE_ROWS:
        place = tl.program_id(0) * scale_columns + tl.program_id(1) + tl.arange(0, BLOCK_R)
        tl.store(scale_ptr + place, scale, mask=tl.arange(0, BLOCK_R) == 0)
    else:
        tl.store(scale_ptr + r * scale_columns + tl.program_id(1), scale, mask=r < padded_rows)
    if WATCH:
        _watch(health_ptr, scale, SLOT, COUNT)


@triton.jit
def _partial_amax(
    hp_ptr,
    partial_ptr,
    rows,
    columns,
    stride_row,
    stride_column,
    span,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """partial [parts, R]: the maxima of |hp| bits over `span` columns each."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    begin = tl.program_id(1).to(tl.int64) * span
    amax = tl.zeros((BLOCK_R,), dtype=tl.int32)
    for step in range(0, span, BLOCK_C):
        c = begin + step + tl.arange(0, BLOCK_C)
        hp = _load(hp_ptr, r, c, rows, columns, stride_row, stride_column)
        amax = tl.maximum(amax, tl.max(_magnitude_bits(hp), axis=1))
    tl.store(partial_ptr + tl.program_id(1) * rows + r, amax, mask=r < rows)


@triton.jit
def _partial_amax_flat(
    hp_ptr,
    partial_ptr,
    rows,
    columns,
    stride_row,
    stride_column,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """partial [programs]: each program takes tiles in turn over the whole operand."""
    tiles_wide = tl.cdiv(columns, BLOCK_C)
    tiles = tl.cdiv(rows, BLOCK_R) * tiles_wide
    amax = tl.zeros((BLOCK_R,), dtype=tl.int32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        r = (tile // tiles_wide).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
        c = (tile % tiles_wide).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
        hp = _load(hp_ptr, r, c, rows, columns, stride_row, stride_column)
        amax = tl.maximum(amax, tl.max(_magnitude_bits(hp), axis=1))
    tl.store(partial_ptr + tl.program_id(0), tl.max(amax, axis=0))


@triton.jit
def _quantize_given(
    hp_ptr,
    partial_ptr,
    out_ptr,
    scale_ptr,
    health_ptr,
    rows,
    columns,
    padded_rows,
    padded_columns,
    stride_row,
    stride_column,
    parts,
    FMAX: tl.constexpr,
    TINY: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    PER_ROW: tl.constexpr,
    OUT: tl.constexpr,
    WATCH: tl.constexpr,
    COUNT: tl.constexpr,
    SLOT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Finishes the partial maxima, per row or for the tensor, and casts one tile."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    part = tl.arange(0, PARTS)
    if PER_ROW:
        known = (part < parts)[:, None] & (r < rows)[None, :]
        amax = tl.max(tl.load(partial_ptr + part[:, None] * rows + r[None, :], mask=known, other=0), axis=0)
    else:
        whole = tl.max(tl.load(partial_ptr + part, mask=part < parts, other=0), axis=0)
        amax = tl.zeros((BLOCK_R,), dtype=tl.int32) + whole
    scale = _scale_of(amax, FMAX, TINY, POWER_OF_TWO)
    hp = _load(hp_ptr, r, c, rows, columns, stride_row, stride_column)
    _store(out_ptr, hp, scale[:, None], r, c, padded_rows, padded_columns, FMAX, OUT)
    if tl.program_id(1) == 0:
        if PER_ROW:
            tl.store(scale_ptr + r, scale, mask=r < padded_rows)
        else:
            tl.store(scale_ptr + r, scale, mask=r == 0)
    if WATCH:
        _watch(health_ptr, scale, SLOT, COUNT)


def quantize_fused(
    hp: torch.Tensor,
    cast: Cast,
    *,
    padded: tuple[int, int],
    health: torch.Tensor | None = None,
    slot: int = 1,
) -> Quantized:
    """Quantizes `hp` [R, C] with current scales into `padded` sides; see kernels/quantizer.py."""
    rows, columns = padded
    group_rows, group_columns = cast.granularity.group(rows, columns)
    out = torch.empty(rows, columns, dtype=cast.format.dtype, device=hp.device)
    scale = torch.empty(
        triton.cdiv(rows, group_rows),
        triton.cdiv(columns, group_columns),
        dtype=torch.float32,
        device=hp.device,
    )
    constants = {
        "FMAX": cast.format.max,
        "TINY": _TINY,
        "POWER_OF_TWO": cast.power_of_two,
        "OUT": _TRITON_TYPES[cast.format.dtype],
        "WATCH": health is not None,
        "COUNT": slot == 1,
        "SLOT": slot,
    }
    sides = (hp.shape[0], hp.shape[1], rows, columns, hp.stride(0), hp.stride(1))
    watched = health if health is not None else scale
    row_major = hp.stride(1) == 1 or hp.shape[0] == 1
    # Triton launches on the current device, which need not be the operand's.
    with torch.cuda.device_of(hp):
        if cast.granularity is Granularity.TENSOR or (cast.granularity is Granularity.ROW and not row_major):
            per_row = cast.granularity is Granularity.ROW
            partial, parts = _row_partials(hp) if per_row else _tensor_partials(hp)
            block_r, block_c = 64, 64
            grid = (triton.cdiv(rows, block_r), triton.cdiv(columns, block_c))
            _quantize_given[grid](
                hp,
                partial,
                out,
                scale,
                watched,
                *sides,
                parts,
                **constants,
                PER_ROW=per_row,
                PARTS=triton.next_power_of_2(parts),
                BLOCK_R=block_r,
                BLOCK_C=block_c,
            )
        else:
            block_c = (
                _row_block(columns) if cast.granularity is Granularity.ROW else min(128, _power(columns))
            )
            block_r = 128 if cast.granularity is Granularity.BLOCK_128X128 else max(_TILE // block_c, 1)
            grid = (triton.cdiv(rows, block_r), scale.shape[1])
            _quantize_groups[grid](
                hp,
                out,
                scale,
                watched,
                *sides,
                triton.cdiv(group_columns, block_c) * block_c,
                **constants,
                SHARE_ROWS=cast.granularity is Granularity.BLOCK_128X128,
                BLOCK_R=block_r,
                BLOCK_C=block_c,
                num_warps=8 if cast.granularity is Granularity.BLOCK_128X128 else 4,
            )
    return Quantized(out, scale, cast)


def _row_partials(hp: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Partial row maxima of a transposed view: many programs, each over a stretch of columns."""
    block_r, block_c = 64, 64
    span = max(triton.cdiv(triton.cdiv(hp.shape[1], _PARTS), block_c) * block_c, 2 * block_c)
    parts = triton.cdiv(hp.shape[1], span)
    partial = torch.empty(parts, hp.shape[0], dtype=torch.int32, device=hp.device)
    grid = (triton.cdiv(hp.shape[0], block_r), parts)
    _partial_amax[grid](
        hp,
        partial,
        hp.shape[0],
        hp.shape[1],
        hp.stride(0),
        hp.stride(1),
        span,
        BLOCK_R=block_r,
        BLOCK_C=block_c,
    )
    return partial, parts


def _tensor_partials(hp: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Partial maxima of the whole operand, read in the order in which it lies in memory."""
    lying = hp if hp.stride(1) == 1 else hp.t()
    block_c = min(1024, _power(lying.shape[1]))
    block_r = max(_TILE // block_c, 1)
    tiles = triton.cdiv(lying.shape[0], block_r) * triton.cdiv(lying.shape[1], block_c)
    parts = min(tiles, _PARTS * 8)
    partial = torch.empty(parts, dtype=torch.int32, device=hp.device)
    _partial_amax_flat[(parts,)](
        lying, partial, *lying.shape, *lying.stride(), BLOCK_R=block_r, BLOCK_C=block_c
    )
    return partial, parts


def _row_block(columns: int) -> int:
    """Columns held at a time: the whole row if it fits a tile, else stretches that waste little."""
    return _power(columns) if columns <= _TILE else 1024


def _power(value: int) -> int:
    return max(triton.next_power_of_2(value), 16)
