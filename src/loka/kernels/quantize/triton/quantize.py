"""Quantization to FP8 on the GPU: a tensor and its transpose, in one pass over the data.

    scale = max(amax, tiny * FMAX) / FMAX        out = round(clamp(hp / scale))

Shapes: hp [R, C] with any strides. The row copy is hp itself, [>= R, >= C]; the column copy is
hp^T, [>= C, >= R]; both FP8, row-major, with zeros in the padding. Each has its own cast.
Twin: core/numerics/reference.py on hp and on hp^T, bit for bit.

Launches: groups of 128 lie inside a tile, and rows of a row-major operand inside a program, so
such a copy costs one. A tensor scale, or the row scale of a column copy, needs its maxima
first: a memset and a launch, or the memset alone where a row copy can merge the tensor's
maximum on its way. Both copies come from one launch where every element has the same scale in
both (tensor, 128x128, given); otherwise each has its own.

Scales lie in memory as `kernels.quantized_side.empty_scale` says.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from loka.core.numerics.reference import Quantized
from loka.core.recipe import Cast, Granularity
from loka.kernels.quantize.side import Side, empty_scale
from loka.kernels.triton.launch import Recording, allocated, cdiv, launch, recorded
from loka.kernels.triton.pack import (
    CVT,
    INTERPRETED,
    TRITON_TYPES,
    magnitude_bits,
    store_row,
    store_turned,
    word,
)

_TINY = torch.finfo(torch.float32).tiny
_ROWS_TILE = 4096  # elements that a program of `_quantize_rows` holds at a time
_AMAX_PROGRAMS = 2048  # enough to fill 132 multiprocessors several times over

# Where a side's scale comes from.
_NONE, _MAXIMA, _GROUP, _BLOCK, _GIVEN = (tl.constexpr(i) for i in range(5))


@triton.jit
def _scale_of(amax_bits, FMAX: tl.constexpr, TINY: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    amax = amax_bits.to(tl.float32, bitcast=True)
    scale = tl.where(amax < TINY * FMAX, TINY, tl.div_rn(amax, FMAX))
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        most: tl.constexpr = 2.0**119 if FMAX < 512 else 2.0**112  # Format.largest_power
        scale = tl.where(scale < float("inf"), tl.minimum(rounded, most), scale)
    return scale


@triton.jit
def _load(hp_ptr, r, c, rows, columns, stride_row, stride_column):
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    offsets = r[:, None] * stride_row + c[None, :] * stride_column
    return tl.load(hp_ptr + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _scaled(hp, scale, FMAX: tl.constexpr, GIVEN: tl.constexpr):
    value = tl.div_rn(hp, scale)
    # Comparisons with NaN are false, so NaN stays; tl.clamp would hide it.
    value = tl.where(value > FMAX, FMAX, value)
    value = tl.where(value < -FMAX, -FMAX, value)
    if GIVEN:  # a current scale is not finite when an element is not; a given one must not hide it
        value = tl.where(tl.abs(hp) < float("inf"), value, float("nan"))
    return value


@triton.jit
def _flag(health_ptr, bits, FLAG: tl.constexpr, COUNT: tl.constexpr):
    """Marks health[FLAG] when the bits of a scale or a magnitude are not finite; COUNT counts a run."""
    if FLAG >= 0:  # noqa: SIM102  Triton decides this one at compile time
        if tl.max(bits, axis=0) >= 0x7F800000:
            tl.store(health_ptr + FLAG, 1)
    if COUNT >= 0 and (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(health_ptr + COUNT, tl.load(health_ptr + COUNT) + 1)


@triton.jit
def _quantize_rows(
    hp_ptr,
    out_ptr,
    scale_ptr,
    tensor_amax_ptr,
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
    OUT: tl.constexpr,
    TENSOR_AMAX: tl.constexpr,
    FLAG: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A program owns BLOCK_R whole rows: amax, then a second read, from the cache, to cast.

    TENSOR_AMAX: the maximum of the tensor is merged on the way, for a copy with a tensor scale.
    """
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    amax = tl.zeros((BLOCK_R,), dtype=tl.int32)
    for step in range(0, span, BLOCK_C):
        c = step + tl.arange(0, BLOCK_C)
        hp = _load(hp_ptr, r, c, rows, columns, stride_row, stride_column)
        amax = tl.maximum(amax, tl.max(magnitude_bits(hp), axis=1))
    if TENSOR_AMAX:
        tl.atomic_max(tensor_amax_ptr, tl.max(amax, axis=0), sem="relaxed")
    scale = _scale_of(amax, FMAX, TINY, POWER_OF_TWO)
    out_ptr = out_ptr.to(tl.pointer_type(tl.uint8))
    for step in range(0, span, BLOCK_C):
        c = step + tl.arange(0, BLOCK_C)
        hp = _load(hp_ptr, r, c, rows, columns, stride_row, stride_column)
        written = (r < padded_rows)[:, None] & (c < padded_columns)[None, :]
        low = _scaled(hp, scale[:, None], FMAX, False).to(OUT).to(tl.uint8, bitcast=True)
        tl.store(out_ptr + r[:, None] * padded_columns + c[None, :], low, mask=written)
    tl.store(scale_ptr + r, scale, mask=r < padded_rows)
    _flag(health_ptr, magnitude_bits(scale), FLAG, COUNT)


@triton.jit
def _maxima(
    hp_ptr,
    row_amax_ptr,
    column_amax_ptr,
    tensor_amax_ptr,
    rows,
    columns,
    stride_row,
    stride_column,
    span,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TENSOR: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Bits of the largest |hp| of each row, of each column, of all, as asked, merged by atomics.

    Maxima do not depend on the order, so the result is deterministic.
    """
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    begin = tl.program_id(1).to(tl.int64) * span
    row_amax = tl.zeros((BLOCK_R,), dtype=tl.int32)
    for step in range(0, span, BLOCK_C):
        c = begin + step + tl.arange(0, BLOCK_C)
        bits = magnitude_bits(_load(hp_ptr, r, c, rows, columns, stride_row, stride_column))
        if COLUMNS:
            tl.atomic_max(column_amax_ptr + c, tl.max(bits, axis=0), mask=c < columns, sem="relaxed")
        row_amax = tl.maximum(row_amax, tl.max(bits, axis=1))
    if ROWS:
        tl.atomic_max(row_amax_ptr + r, row_amax, mask=r < rows, sem="relaxed")
    if TENSOR:
        tl.atomic_max(tensor_amax_ptr, tl.max(row_amax, axis=0), sem="relaxed")


@triton.jit
def _side_scale(
    group_bits,
    block_bits,
    amax_ptr,
    scale_ptr,
    index,
    size,
    SOURCE: tl.constexpr,
    STEP: tl.constexpr,
    FMAX: tl.constexpr,
    TINY: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """The scales of one side of a tile, one for each of `index`; maxima of its groups are at hand."""
    if SOURCE == _GIVEN:
        scale = tl.load(scale_ptr + index * 0)
    else:
        if SOURCE == _MAXIMA:
            amax = tl.load(amax_ptr + index * STEP, mask=index < size, other=0)
        elif SOURCE == _GROUP:
            amax = group_bits
        else:
            amax = block_bits + (index * 0).to(tl.int32)
        scale = _scale_of(amax, FMAX, TINY, POWER_OF_TWO)
    return scale


@triton.jit
def _store_scale(
    scale_ptr,
    scale,
    index,
    padded,
    along,
    last,
    stride_index,
    stride_along,
    SOURCE: tl.constexpr,
    STEP: tl.constexpr,
):
    """`index` runs over rows of a copy, `along` counts tiles in the direction of its columns."""
    if SOURCE == _GROUP:
        tl.store(scale_ptr + index * stride_index + along * stride_along, scale, mask=index < padded)
    if SOURCE == _BLOCK:
        first = (index % 128 == 0) & (index < padded)
        place = scale_ptr + (index // 128) * stride_index + along
        tl.store(place, scale, mask=first)
        if along == last:  # the columns up to a multiple of 4 exist for the layout only
            for beyond in tl.static_range(1, 4):
                tl.store(
                    place + beyond, scale * 0.0, mask=first & (index * 0 + along + beyond < stride_index)
                )
    if SOURCE == _MAXIMA and along == 0:
        tl.store(scale_ptr + index * STEP, scale, mask=(index < padded) & (index * (1 - STEP) == 0))


@triton.jit
def _row_quarter(
    hp,
    scale_ptr,
    amax_ptr,
    block_bits,
    r,
    rows,
    padded_rows,
    scale_stride_0,
    scale_stride_1,
    last,
    SOURCE: tl.constexpr,
    STEP: tl.constexpr,
    FMAX: tl.constexpr,
    TINY: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Every fourth row for the row copy: stores its scales; returns scaled values and what to flag."""
    group_bits = tl.max(magnitude_bits(hp), axis=1)
    scale = _side_scale(
        group_bits, block_bits, amax_ptr, scale_ptr, r, rows, SOURCE, STEP, FMAX, TINY, POWER_OF_TWO
    )
    _store_scale(
        scale_ptr,
        scale,
        r,
        padded_rows,
        tl.program_id(1),
        last,
        scale_stride_0,
        scale_stride_1,
        SOURCE,
        STEP,
    )
    value = _scaled(hp, scale[:, None], FMAX, SOURCE == _GIVEN)
    return value, magnitude_bits(scale) if SOURCE != _GIVEN else group_bits


@triton.jit
def _cast(
    hp_ptr,
    row_out_ptr,
    row_scale_ptr,
    row_amax_ptr,
    column_out_ptr,
    column_scale_ptr,
    column_amax_ptr,
    seen_ptr,
    health_ptr,
    rows,
    columns,
    stride_row,
    stride_column,
    row_rows,
    row_columns,
    row_scale_stride_0,
    row_scale_stride_1,
    column_rows,
    column_columns,
    column_scale_stride_0,
    column_scale_stride_1,
    row_last,
    column_last,
    TINY: tl.constexpr,
    ROW: tl.constexpr,
    ROW_STEP: tl.constexpr,
    ROW_FMAX: tl.constexpr,
    ROW_POWER_OF_TWO: tl.constexpr,
    ROW_OUT: tl.constexpr,
    ROW_CVT: tl.constexpr,
    ROW_FLAG: tl.constexpr,
    ROW_COUNT: tl.constexpr,
    COLUMN: tl.constexpr,
    COLUMN_STEP: tl.constexpr,
    COLUMN_FMAX: tl.constexpr,
    COLUMN_POWER_OF_TWO: tl.constexpr,
    COLUMN_OUT: tl.constexpr,
    COLUMN_CVT: tl.constexpr,
    COLUMN_FLAG: tl.constexpr,
    COLUMN_COUNT: tl.constexpr,
    SEEN: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One tile: the row copy, the column copy, or both, which are then rounded alike.

    The tile is held as four tiles of every fourth row. A transposed store of single bytes goes
    through shared memory a byte at a time: 51 us for both copies of 8192 x 2048 bf16, where four
    rows in a word take 24 and a plain copy of the tensor 18. WORDS is off where the padded rows
    are no multiple of 4.
    """
    r0 = tl.program_id(0).to(tl.int64) * BLOCK_R + 4 * tl.arange(0, BLOCK_R // 4)
    c = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    hp_0 = _load(hp_ptr, r0, c, rows, columns, stride_row, stride_column)
    hp_1 = _load(hp_ptr, r0 + 1, c, rows, columns, stride_row, stride_column)
    hp_2 = _load(hp_ptr, r0 + 2, c, rows, columns, stride_row, stride_column)
    hp_3 = _load(hp_ptr, r0 + 3, c, rows, columns, stride_row, stride_column)
    bits = tl.maximum(
        tl.maximum(magnitude_bits(hp_0), magnitude_bits(hp_1)),
        tl.maximum(magnitude_bits(hp_2), magnitude_bits(hp_3)),
    )
    column_bits = tl.max(bits, axis=0)
    block_bits = tl.max(column_bits, axis=0)
    if SEEN:
        tl.atomic_max(seen_ptr, block_bits, sem="relaxed")
    if ROW != _NONE:
        value_0, shown_0 = _row_quarter(
            hp_0, row_scale_ptr, row_amax_ptr, block_bits, r0, rows, row_rows,
            row_scale_stride_0, row_scale_stride_1, row_last,
            ROW, ROW_STEP, ROW_FMAX, TINY, ROW_POWER_OF_TWO,
        )  # fmt: skip
        value_1, shown_1 = _row_quarter(
            hp_1, row_scale_ptr, row_amax_ptr, block_bits, r0 + 1, rows, row_rows,
            row_scale_stride_0, row_scale_stride_1, row_last,
            ROW, ROW_STEP, ROW_FMAX, TINY, ROW_POWER_OF_TWO,
        )  # fmt: skip
        value_2, shown_2 = _row_quarter(
            hp_2, row_scale_ptr, row_amax_ptr, block_bits, r0 + 2, rows, row_rows,
            row_scale_stride_0, row_scale_stride_1, row_last,
            ROW, ROW_STEP, ROW_FMAX, TINY, ROW_POWER_OF_TWO,
        )  # fmt: skip
        value_3, shown_3 = _row_quarter(
            hp_3, row_scale_ptr, row_amax_ptr, block_bits, r0 + 3, rows, row_rows,
            row_scale_stride_0, row_scale_stride_1, row_last,
            ROW, ROW_STEP, ROW_FMAX, TINY, ROW_POWER_OF_TWO,
        )  # fmt: skip
        packed = word(value_0, value_1, value_2, value_3, ROW_OUT, ROW_CVT)
        row_bytes = row_out_ptr.to(tl.pointer_type(tl.uint8))
        store_row(row_bytes, packed, 0, r0, c, row_rows, row_columns)
        store_row(row_bytes, packed, 8, r0 + 1, c, row_rows, row_columns)
        store_row(row_bytes, packed, 16, r0 + 2, c, row_rows, row_columns)
        store_row(row_bytes, packed, 24, r0 + 3, c, row_rows, row_columns)
        shown = tl.maximum(tl.maximum(shown_0, shown_1), tl.maximum(shown_2, shown_3))
        _flag(health_ptr, shown, ROW_FLAG, ROW_COUNT)
    if COLUMN != _NONE:
        scale = _side_scale(
            column_bits, block_bits, column_amax_ptr, column_scale_ptr, c, columns,
            COLUMN, COLUMN_STEP, COLUMN_FMAX, TINY, COLUMN_POWER_OF_TWO,
        )  # fmt: skip
        if ROW == _NONE:
            value_0 = _scaled(hp_0, scale[None, :], COLUMN_FMAX, COLUMN == _GIVEN)
            value_1 = _scaled(hp_1, scale[None, :], COLUMN_FMAX, COLUMN == _GIVEN)
            value_2 = _scaled(hp_2, scale[None, :], COLUMN_FMAX, COLUMN == _GIVEN)
            value_3 = _scaled(hp_3, scale[None, :], COLUMN_FMAX, COLUMN == _GIVEN)
            packed = word(value_0, value_1, value_2, value_3, COLUMN_OUT, COLUMN_CVT)
        if WORDS:
            words = column_out_ptr.to(tl.pointer_type(tl.int32))
            store_turned(words, packed, r0 // 4, c, column_rows, column_columns // 4)
        else:
            column_bytes = column_out_ptr.to(tl.pointer_type(tl.uint8))
            for quarter in tl.static_range(4):
                low = ((packed >> (8 * quarter)) & 0xFF).to(tl.uint8)
                store_turned(column_bytes, low, r0 + quarter, c, column_rows, column_columns)
        _store_scale(
            column_scale_ptr, scale, c, column_rows, tl.program_id(0), column_last,
            column_scale_stride_0, column_scale_stride_1, COLUMN, COLUMN_STEP,
        )  # fmt: skip
        shown = magnitude_bits(scale) if COLUMN != _GIVEN else column_bits
        _flag(health_ptr, shown, COLUMN_FLAG, COLUMN_COUNT)


def quantize_pair_fused(
    hp: torch.Tensor,
    *,
    row: Side | None,
    column: Side | None,
    given: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
    health: torch.Tensor | None = None,
) -> tuple[Quantized | None, Quantized | None]:
    """Quantizes hp [R, C] (`row`) and hp^T [C, R] (`column`) in one pass; see kernels/quantize/quantizer.py.

    `given` float32 [1] is the tensor scale to use; `seen` int32 [1] receives the bits of max |hp|,
    from which the next step's scale follows. `health` int64, flat.
    """
    if INTERPRETED or not hp.is_cuda:
        return _quantize(hp, row, column, given, seen, health)
    key = (hp.shape, hp.stride(), hp.dtype, row, column)
    # Triton launches on the current device, which need not be the operand's.
    with torch.cuda.device_of(hp) if hp.device.index != torch.cuda.current_device() else _NOTHING:
        return recorded(
            key,
            (hp, given, seen, health),
            lambda: _quantize(hp, row, column, given, seen, health),
            _slots,
            lambda slots, tensors: _from_slots(slots, tensors, row, column),
        )


_NOTHING = contextlib.nullcontext()
Slots = tuple[tuple[int, int] | None, tuple[int, int] | None]


def _slots(copies: tuple[Quantized | None, Quantized | None], recording: Recording) -> Slots:
    first, second = (
        None if copy is None else (recording.slot_of(copy.data), recording.slot_of(copy.scale))
        for copy in copies
    )
    return first, second


def _from_slots(
    slots: Slots, tensors: list[torch.Tensor | None], row: Side | None, column: Side | None
) -> tuple[Quantized | None, Quantized | None]:
    return _from_slot(slots[0], tensors, row), _from_slot(slots[1], tensors, column)


def _from_slot(
    slot: tuple[int, int] | None, tensors: list[torch.Tensor | None], side: Side | None
) -> Quantized | None:
    if slot is None or side is None:
        return None
    data, scale = tensors[slot[0]], tensors[slot[1]]
    assert data is not None
    assert scale is not None
    return Quantized(data, scale if scale.dim() == 2 else scale.view(1, 1), side.cast)


def _quantize(
    hp: torch.Tensor,
    row: Side | None,
    column: Side | None,
    given: torch.Tensor | None,
    seen: torch.Tensor | None,
    health: torch.Tensor | None,
) -> tuple[Quantized | None, Quantized | None]:
    maxima = _take_maxima(hp, row, column) if given is None else _NO_MAXIMA
    if row is not None and column is not None and _rounded_alike(row, column):
        return _cast_tiles(hp, row, column, maxima, given, seen, health)
    row_copy = column_copy = None
    if row is not None:
        if given is None and _is_rows(row, hp):
            row_copy = _rows(hp, row, maxima.tensor if maxima.tensor.numel() else None, health)
        else:
            row_copy, _ = _cast_tiles(hp, row, None, maxima, given, seen, health)
    if column is not None:
        if given is None and row is None and _is_rows(column, hp.t()):
            column_copy = _rows(hp.t(), column, None, health)
        else:
            seen = seen if row is None else None  # noted already
            _, column_copy = _cast_tiles(hp, None, column, maxima, given, seen, health)
    return row_copy, column_copy


def _is_rows(side: Side, hp: torch.Tensor) -> bool:
    """A row scale of rows that lie in memory: `_quantize_rows` does it in one launch."""
    return side.cast.granularity is Granularity.ROW and hp.stride(1) == 1


def _rounded_alike(row: Side, column: Side) -> bool:
    """Whether one launch can make both copies: the same scale for every element of both.

    Two casts with different scales in one launch take as long as two launches (64 us against 18
    and 24 at 8192 x 2048 bf16).
    """
    square = (Granularity.TENSOR, Granularity.BLOCK_128X128)
    return row.cast == column.cast and row.cast.granularity in square


@dataclass(frozen=True)
class _Maxima:
    """Bits of maxima of |hp|: one a row, one a column, one in all; empty where nobody asks."""

    rows: torch.Tensor
    columns: torch.Tensor
    tensor: torch.Tensor

    def of(self, cast: Cast, *, turned: bool) -> torch.Tensor:
        if cast.granularity is Granularity.TENSOR:
            return self.tensor
        return self.columns if turned else self.rows


_NO_MAXIMA = _Maxima(torch.empty(0), torch.empty(0), torch.empty(0))


def _take_maxima(hp: torch.Tensor, row: Side | None, column: Side | None) -> _Maxima:
    """A memset and a launch, or the memset alone where `_quantize_rows` will merge the maximum."""
    wanted = {side.cast.granularity for side in (row, column) if side}
    rows = row is not None and row.cast.granularity is Granularity.ROW and not _is_rows(row, hp)
    columns = (
        column is not None
        and column.cast.granularity is Granularity.ROW
        and not (row is None and _is_rows(column, hp.t()))
    )
    tensor = Granularity.TENSOR in wanted
    sizes = (hp.shape[0] * rows, hp.shape[1] * columns, int(tensor))
    if not any(sizes):
        return _NO_MAXIMA
    bits = allocated(torch.zeros(sum(sizes), dtype=torch.int32, device=hp.device), zeroed=True)
    maxima = _Maxima(*bits.split(sizes))
    merged = tensor and row is not None and _is_rows(row, hp)
    if not rows and not columns and merged:
        return maxima
    lying, row_amax, column_amax = hp, maxima.rows, maxima.columns
    if hp.stride(1) != 1 and hp.stride(0) == 1:  # read in the order in which it lies in memory
        lying, row_amax, column_amax = hp.t(), maxima.columns, maxima.rows
    block_r, block_c = (64, 128) if column_amax.numel() else (16, 256)  # measured at 8192 x 2048 bf16
    high, wide = cdiv(lying.shape[0], block_r), cdiv(lying.shape[1], block_c)
    turns = min(wide, max(1, high * wide // _AMAX_PROGRAMS))
    pointers = (
        lying,
        row_amax if row_amax.numel() else bits,
        column_amax if column_amax.numel() else bits,
        maxima.tensor if tensor else bits,
    )
    constants = {
        "ROWS": row_amax.numel() > 0,
        "COLUMNS": column_amax.numel() > 0,
        "TENSOR": tensor and not merged,
        "BLOCK_R": block_r,
        "BLOCK_C": block_c,
    }
    launch(
        _maxima,
        (high, cdiv(wide, turns)),
        (*pointers, *lying.shape, *lying.stride(), turns * block_c),
        constants,
    )
    return maxima


def _cast_tiles(
    hp: torch.Tensor,
    row: Side | None,
    column: Side | None,
    maxima: _Maxima,
    given: torch.Tensor | None,
    seen: torch.Tensor | None,
    health: torch.Tensor | None,
) -> tuple[Quantized | None, Quantized | None]:
    row_copy, column_copy = _empty(row, hp.device, given), _empty(column, hp.device, given)
    high = max(row.padded[0] if row else 0, column.padded[1] if column else 0)
    wide = max(row.padded[1] if row else 0, column.padded[0] if column else 0)
    block_r, block_c, warps = _tile(row, column)
    args = (
        hp,
        *_pointers(hp, row, row_copy, maxima, turned=False),
        *_pointers(hp, column, column_copy, maxima, turned=True),
        seen if seen is not None else hp,
        health.view(-1) if health is not None else hp,
        *hp.shape,
        *hp.stride(),
        *_sides(row_copy),
        *_sides(column_copy),
        (row_copy.scale.shape[1] if row_copy else 0) - 1,
        (column_copy.scale.shape[1] if column_copy else 0) - 1,
    )
    constants = {
        "TINY": _TINY,
        **_constants("ROW", row, given is not None, health is not None),
        **_constants("COLUMN", column, given is not None, health is not None),
        "SEEN": seen is not None,
        "WORDS": column is not None and column.padded[1] % 4 == 0,
        "BLOCK_R": block_r,
        "BLOCK_C": block_c,
    }
    launch(_cast, (cdiv(high, block_r), cdiv(wide, block_c)), args, constants, num_warps=warps)
    return row_copy, column_copy


def _tile(row: Side | None, column: Side | None) -> tuple[int, int, int]:
    """Rows, columns and warps of a program: the fastest of a dozen at 8192 x 2048 bf16 on an H200."""
    casts = [side.cast.granularity for side in (row, column) if side]
    if Granularity.BLOCK_128X128 in casts:
        return 128, 128, 8
    if column is None:
        return 32, 128, 4
    if casts[-1] is Granularity.GROUP_1X128:
        return 128, 32, 4
    return 64, 64, 4


def _empty(side: Side | None, device: torch.device, given: torch.Tensor | None) -> Quantized | None:
    if side is None:
        return None
    out = allocated(torch.empty(*side.padded, dtype=side.cast.format.dtype, device=device))
    if given is None:
        return Quantized(out, allocated(empty_scale(side.cast, side.padded, device)), side.cast)
    assert side.cast.granularity is Granularity.TENSOR, "one given scale is a tensor scale"
    return Quantized(out, given.view(1, 1), side.cast)


def _pointers(
    hp: torch.Tensor, side: Side | None, copy: Quantized | None, maxima: _Maxima, *, turned: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Data, scale and maxima of a copy; any valid pointer where the kernel will not look."""
    if side is None or copy is None:
        return hp, hp, hp
    amax = maxima.of(side.cast, turned=turned)
    return copy.data, copy.scale, amax if amax.numel() else copy.scale


def _sides(copy: Quantized | None) -> tuple[int, int, int, int]:
    return (*copy.data.shape, *copy.scale.stride()) if copy else (0, 0, 0, 0)


@functools.lru_cache(maxsize=1024)
def _constants(prefix: str, side: Side | None, given: bool, health: bool) -> dict[str, object]:
    cast = side.cast if side else None
    source = _NONE
    if cast:
        sources = {Granularity.GROUP_1X128: _GROUP, Granularity.BLOCK_128X128: _BLOCK}
        source = _GIVEN if given else sources.get(cast.granularity, _MAXIMA)
    values = {
        "": source.value,
        "_STEP": int(cast is not None and cast.granularity is Granularity.ROW),
        "_FMAX": cast.format.max if cast else 1.0,
        "_POWER_OF_TWO": cast is not None and cast.power_of_two,
        "_OUT": TRITON_TYPES[cast.format.dtype] if cast else tl.float8e4nv,
        "_CVT": CVT[cast.format.dtype] if cast and not INTERPRETED else "",
        "_FLAG": side.flag if side and health else -1,
        "_COUNT": side.count if side and health else -1,
    }
    return {prefix + name: value for name, value in values.items()}


def _rows(
    hp: torch.Tensor, side: Side, tensor_amax: torch.Tensor | None, health: torch.Tensor | None
) -> Quantized:
    """Row scales of a row-major operand: a launch."""
    rows, columns = side.padded
    out = allocated(torch.empty(rows, columns, dtype=side.cast.format.dtype, device=hp.device))
    scale = allocated(torch.empty(rows, 1, dtype=torch.float32, device=hp.device))
    block_c = max(1 << (columns - 1).bit_length(), 16) if columns <= _ROWS_TILE else 1024
    block_r = max(_ROWS_TILE // block_c, 1)
    args = (
        hp,
        out,
        scale,
        tensor_amax if tensor_amax is not None else scale,
        health.view(-1) if health is not None else scale,
        *hp.shape,
        rows,
        columns,
        *hp.stride(),
        cdiv(columns, block_c) * block_c,
    )
    constants = {
        "FMAX": side.cast.format.max,
        "TINY": _TINY,
        "POWER_OF_TWO": side.cast.power_of_two,
        "OUT": TRITON_TYPES[side.cast.format.dtype],
        "TENSOR_AMAX": tensor_amax is not None,
        "FLAG": side.flag if health is not None else -1,
        "COUNT": side.count if health is not None else -1,
        "BLOCK_R": block_r,
        "BLOCK_C": block_c,
    }
    launch(_quantize_rows, (cdiv(rows, block_r), 1), args, constants)
    return Quantized(out, scale, side.cast)
