"""The scale book's update and the weight bank's quantization on the GPU: a launch each.

    update:   scale = 2^ceil(log2(max(history) * 2^margin / largest))      for every slot
    bank:     row = fp8(W / scale),  turned = row^T                        for every weight of a dtype

Twins: kernels/book.py. A program of the bank owns one tile of one weight; which one, a table in
device memory says, so that the number of weights costs no launches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from loka.core.recipe import Format
from loka.kernels.triton.pack import (
    CVT,
    INTERPRETED,
    TRITON_TYPES,
    inverse_of_power,
    magnitude_bits,
    power_above,
    word,
)

if TYPE_CHECKING:
    from loka.kernels.book import Entry, Scales

_HIGH_PRECISION = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}
_BLOCK = 32  # slots of the book that a program updates
_TILE = 64  # rows and columns of a weight that a program casts, as in `quantize._tile`

# Columns of the table. Padded sides are stored divided by 16: the compiler sees the multiplication
# and may then use wide loads and stores.
_WEIGHT, _ROW, _TURNED, _ROWS, _COLUMNS, _STRIDE_ROW, _STRIDE_COLUMN = (tl.constexpr(i) for i in range(7))
_PADDED_ROWS, _PADDED_COLUMNS, _SLOT, _FIRST, _ACROSS, _ALIGNED = (tl.constexpr(i) for i in range(7, 13))
_FIELDS = tl.constexpr(13)


@triton.jit
def _update(
    history_ptr,
    cursor_ptr,
    scale_ptr,
    seen_ptr,
    rules_ptr,
    units_ptr,
    slots,
    units,
    LENGTH: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, LENGTH)
    inside = slot < slots
    ring = slot[:, None] * LENGTH + place[None, :]
    bits = tl.load(seen_ptr + 4 * slot, mask=inside, other=0)
    cursor = tl.load(cursor_ptr + slot, mask=inside, other=0)
    history = tl.load(history_ptr + ring, mask=inside[:, None], other=0.0)
    largest = tl.load(rules_ptr + 2 * slot, mask=inside, other=0)
    margin = tl.load(rules_ptr + 2 * slot + 1, mask=inside, other=0)
    # Zero: nothing came by. At least 0x7F800000: infinity or NaN.
    taken = inside & (bits > 0) & (bits < 0x7F800000)
    pushed = taken[:, None] & (place[None, :] == cursor[:, None])
    history = tl.where(pushed, bits.to(tl.float32, bitcast=True)[:, None], history)
    highest = tl.max(history, axis=1).to(tl.int32, bitcast=True)
    scale = power_above(highest, largest, margin, LIMIT).to(tl.float32, bitcast=True)
    # Threads hold copies of a slot's values: none may store before all have loaded.
    tl.debug_barrier()
    tl.store(history_ptr + ring, history, mask=pushed)
    tl.store(cursor_ptr + slot, (cursor + 1) % LENGTH, mask=taken)
    tl.store(scale_ptr + 4 * slot, scale, mask=taken)
    tl.store(seen_ptr + 4 * slot, tl.zeros_like(bits), mask=inside)
    unit = tl.program_id(0) * BLOCK * 4 + tl.arange(0, BLOCK * 4)
    tl.store(units_ptr + unit, tl.zeros((BLOCK * 4,), tl.int32), mask=unit < 4 * units)


@triton.jit
def _load(weight_ptr, q, c, rows, columns, stride_row, stride_column, EVEN: tl.constexpr):
    """A mask that the compiler cannot follow makes it load single elements: whole tiles have none."""
    place = weight_ptr + (q[:, None] * stride_row + c[None, :] * stride_column)
    if EVEN:
        value = tl.load(place)
    else:
        value = tl.load(place, mask=(q < rows)[:, None] & (c < columns)[None, :], other=0.0)
    return value.to(tl.float32)


@triton.jit
def _scaled(hp, inverse, FMAX: tl.constexpr, CLAMP: tl.constexpr):
    """Quotients, and NaN where hp is not finite: infinity times zero, and times zero all else is zero.

    The hardware's conversion saturates by itself, the interpreter's does not.
    """
    value = hp * inverse  # a power of two: as exact as the division
    if CLAMP:
        value = tl.where(value > FMAX, FMAX, tl.where(value < -FMAX, -FMAX, value))
    return value + hp * 0.0


@triton.jit
def _lost(hp, inverse, FMAX: tl.constexpr, LOST: tl.constexpr):
    """Saturated << 16 | underflowed."""
    magnitude = tl.abs(hp * inverse)
    saturated = (tl.abs(hp) < float("inf")) & (magnitude > FMAX)
    return tl.where(saturated, 1 << 16, 0) + tl.where((magnitude <= LOST) & (hp != 0.0), 1, 0)


@triton.jit
def _store_row(
    row_ptr, value, q, c, rows, columns, padded, OUT: tl.constexpr, CVT: tl.constexpr, EVEN: tl.constexpr
):
    """Casts anew what the words hold too: a conversion more, but no bytes to pick out of words."""
    if CVT != "":
        byte = tl.inline_asm_elementwise(CVT, "=r,f,f,f,f", [value], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        byte = value.to(OUT).to(tl.uint8, bitcast=True)
    place = row_ptr + (q[:, None] * padded + c[None, :])
    if EVEN:
        tl.store(place, byte)
    else:
        tl.store(place, byte, mask=(q < rows)[:, None] & (c < columns)[None, :])


@triton.jit
def _tile(
    weight_ptr, row_ptr, turned_ptr, rows, columns, stride_row, stride_column, padded_rows, padded_columns,
    start, first, inverse, seen_ptr, counters_ptr,
    EVEN: tl.constexpr, COUNTS: tl.constexpr, FMAX: tl.constexpr, LOST: tl.constexpr, OUT: tl.constexpr,
    CVT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows from `start` and columns from `first` on, as four tiles of every fourth row; see `quantize._cast`.

    Offsets within a tile have 32 bits, what leads to it 64.
    """
    v = tl.arange(0, BLOCK // 4)
    q = 4 * v
    c = tl.arange(0, BLOCK)
    weight_ptr += start * stride_row + first * stride_column
    across, along = stride_row.to(tl.int32), stride_column
    below, beside = (rows - start).to(tl.int32), (columns - first).to(tl.int32)
    hp_0 = _load(weight_ptr, q, c, below, beside, across, along, EVEN)
    hp_1 = _load(weight_ptr + stride_row, q, c, below - 1, beside, across, along, EVEN)
    hp_2 = _load(weight_ptr + 2 * stride_row, q, c, below - 2, beside, across, along, EVEN)
    hp_3 = _load(weight_ptr + 3 * stride_row, q, c, below - 3, beside, across, along, EVEN)
    bits = tl.maximum(
        tl.maximum(magnitude_bits(hp_0), magnitude_bits(hp_1)),
        tl.maximum(magnitude_bits(hp_2), magnitude_bits(hp_3)),
    )
    tl.atomic_max(seen_ptr, tl.max(tl.max(bits, axis=1), axis=0), sem="relaxed")
    value_0 = _scaled(hp_0, inverse, FMAX, CVT == "")
    value_1 = _scaled(hp_1, inverse, FMAX, CVT == "")
    value_2 = _scaled(hp_2, inverse, FMAX, CVT == "")
    value_3 = _scaled(hp_3, inverse, FMAX, CVT == "")
    row_ptr += start * padded_columns + first
    wide = padded_columns.to(tl.int32)
    low, right = (padded_rows - start).to(tl.int32), (padded_columns - first).to(tl.int32)
    _store_row(row_ptr, value_0, q, c, low, right, wide, OUT, CVT, EVEN)
    _store_row(row_ptr + padded_columns, value_1, q, c, low - 1, right, wide, OUT, CVT, EVEN)
    _store_row(row_ptr + 2 * padded_columns, value_2, q, c, low - 2, right, wide, OUT, CVT, EVEN)
    _store_row(row_ptr + 3 * padded_columns, value_3, q, c, low - 3, right, wide, OUT, CVT, EVEN)
    packed = word(value_0, value_1, value_2, value_3, OUT, CVT)
    turned_ptr += first * (padded_rows // 4) + start // 4
    place = turned_ptr + (c[None, :] * (padded_rows // 4).to(tl.int32) + v[:, None])
    if EVEN:
        tl.store(place, packed)
    else:
        tl.store(place, packed, mask=(q < low)[:, None] & (c < right)[None, :])
    if COUNTS:
        lost = _lost(hp_0, inverse, FMAX, LOST) + _lost(hp_1, inverse, FMAX, LOST)
        lost += _lost(hp_2, inverse, FMAX, LOST) + _lost(hp_3, inverse, FMAX, LOST)
        lost = tl.sum(tl.sum(lost, axis=1), axis=0)
        if lost != 0:  # rare, so that programs seldom meet at the counters
            tl.atomic_add(counters_ptr, (lost >> 16).to(tl.int64), sem="relaxed")
            tl.atomic_add(counters_ptr + 1, (lost & 0xFFFF).to(tl.int64), sem="relaxed")


@triton.jit
def _quantize_bank(
    table_ptr, owner_ptr, scale_ptr, seen_ptr, counters_ptr,
    WEIGHT: tl.constexpr, ALIGN: tl.constexpr, COUNTS: tl.constexpr, FMAX: tl.constexpr, LOST: tl.constexpr,
    OUT: tl.constexpr, CVT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of one weight."""
    program = tl.program_id(0)
    field_ptr = table_ptr + tl.load(owner_ptr + program).to(tl.int64) * _FIELDS
    address = tl.load(field_ptr + _WEIGHT)
    row_ptr = tl.multiple_of(tl.load(field_ptr + _ROW).to(tl.pointer_type(tl.uint8)), 16)
    turned_ptr = tl.multiple_of(tl.load(field_ptr + _TURNED).to(tl.pointer_type(tl.int32)), 16)
    rows = tl.load(field_ptr + _ROWS)
    columns = tl.load(field_ptr + _COLUMNS)
    stride_row = tl.load(field_ptr + _STRIDE_ROW)
    padded_rows = tl.load(field_ptr + _PADDED_ROWS) * 16
    padded_columns = tl.load(field_ptr + _PADDED_COLUMNS) * 16
    slot = tl.load(field_ptr + _SLOT)
    tile = program - tl.load(field_ptr + _FIRST)
    across = tl.load(field_ptr + _ACROSS)
    start = (tile // across) * BLOCK
    first = (tile % across) * BLOCK
    inverse = inverse_of_power(tl.load(scale_ptr + 4 * slot))
    seen_ptr += 4 * slot
    counters_ptr += 2 * slot
    aligned = tl.load(field_ptr + _ALIGNED) != 0
    if aligned & (start + BLOCK <= rows) & (first + BLOCK <= columns):
        weight_ptr = tl.multiple_of(address.to(tl.pointer_type(WEIGHT)), 16)
        _tile(
            weight_ptr, row_ptr, turned_ptr, rows, columns, stride_row // ALIGN * ALIGN, 1, padded_rows,
            padded_columns, start, first, inverse, seen_ptr, counters_ptr, True, COUNTS, FMAX, LOST, OUT, CVT,
            BLOCK,
        )  # fmt: skip
    else:
        weight_ptr = address.to(tl.pointer_type(WEIGHT))
        stride_column = tl.load(field_ptr + _STRIDE_COLUMN).to(tl.int32)
        _tile(
            weight_ptr, row_ptr, turned_ptr, rows, columns, stride_row, stride_column, padded_rows,
            padded_columns, start, first, inverse, seen_ptr, counters_ptr, False, COUNTS, FMAX, LOST, OUT,
            CVT, BLOCK,
        )  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Weights of one dtype: int64 [weights, fields] and, for each program, its weight: int32 [programs]."""

    fields: torch.Tensor
    owner: torch.Tensor
    dtype: torch.dtype


def build_table(entries: Sequence[Entry]) -> Table:
    """Addresses and sizes of `entries`, which have one dtype, copied to their device (synchronizes)."""
    weight = entries[0].weight
    fields: list[tuple[int, ...]] = []
    owner: list[int] = []
    for index, entry in enumerate(entries):
        padded_rows, padded_columns = entry.row.shape
        across = triton.cdiv(padded_columns, _TILE)
        first, programs = len(owner), triton.cdiv(padded_rows, _TILE) * across
        fields.append(
            (
                entry.weight.data_ptr(),
                entry.row.data_ptr(),
                entry.turned.data_ptr(),
                *entry.weight.shape,
                *entry.weight.stride(),
                padded_rows // 16,
                padded_columns // 16,
                entry.slot,
                first,
                across,
                int(_aligned(entry.weight)),
            )
        )
        owner += [index] * programs
    return Table(
        torch.tensor(fields, dtype=torch.int64, device=weight.device),
        torch.tensor(owner, dtype=torch.int32, device=weight.device),
        weight.dtype,
    )


def _aligned(weight: torch.Tensor) -> bool:
    """Whether rows lie in memory as whole vectors of 16 bytes."""
    size = weight.element_size()
    sides = (weight.data_ptr(), weight.stride(0) * size, weight.shape[1] * size)
    return weight.stride(1) == 1 and all(side % 16 == 0 for side in sides)


def quantize_bank_fused(table: Table, scales: Scales, *, counting: bool = False) -> None:
    """Writes both copies of every weight of the table and raises `seen`: one launch."""
    with _on(table.fields):
        _quantize_bank[(table.owner.numel(),)](
            table.fields,
            table.owner,
            scales.scale,
            scales.seen,
            scales.counters,
            WEIGHT=_HIGH_PRECISION[table.dtype],
            ALIGN=16 // table.dtype.itemsize,
            COUNTS=counting,
            FMAX=Format.E4M3.max,
            LOST=Format.E4M3.smallest_subnormal / 2,
            OUT=TRITON_TYPES[Format.E4M3.dtype],
            CVT="" if INTERPRETED else CVT[Format.E4M3.dtype],
            BLOCK=_TILE,
            num_warps=2,
        )


def update_scales_fused(scales: Scales, limit: int) -> None:
    """Every slot's next scale; `seen` and `units` are zero afterwards: one launch."""
    slots, length = scales.history.shape
    units = scales.units.numel() // 4
    with _on(scales.history):
        _update[(max(triton.cdiv(slots, _BLOCK), triton.cdiv(units, _BLOCK), 1),)](
            scales.history,
            scales.cursor,
            scales.scale,
            scales.seen,
            scales.rules,
            scales.units,
            slots,
            units,
            LENGTH=length,
            LIMIT=limit,
            BLOCK=_BLOCK,
        )


def _on(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    # Triton launches on the current device, which need not be the tensors'.
    return torch.cuda.device_of(tensor) if tensor.is_cuda else contextlib.nullcontext()
