"""The kernels that quantize to FP8 and INT8; kernels/quantize/triton/quantize.py launches them.

`quantize_rows` owns whole rows of a row-major tensor, `find_maxima` finds the maxima of rows, columns and
all, and `cast_tiles` casts tiles whose scales are given, follow from such maxima, or lie inside a tile.
"""

import triton
import triton.language as tl

from loka.core.numerics.reference import LARGEST_STEP
from loka.kernels.triton.pack import byte, magnitude_bits, store_row, store_transposed, word

_LARGEST_STEP = tl.constexpr(LARGEST_STEP)  # of INT8
# Where a side's scale comes from.
NONE, MAXIMA, GROUP, BLOCK, GIVEN = (tl.constexpr(i) for i in range(5))


@triton.jit
def scale_of(amax_bits, FMAX: tl.constexpr, TINY: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    amax = amax_bits.to(tl.float32, bitcast=True)
    scale = tl.where(amax < TINY * FMAX, TINY, tl.div_rn(amax, FMAX))
    if FMAX == 127:
        scale = tl.where((scale > _LARGEST_STEP) & (scale < float("inf")), _LARGEST_STEP, scale)
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
def scaled(hp, scale, FMAX: tl.constexpr, GIVEN: tl.constexpr):
    if FMAX == 127:
        value = hp * tl.div_rn(1.0, scale)
    else:
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
def quantize_rows(
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
    scale = scale_of(amax, FMAX, TINY, POWER_OF_TWO)
    out_ptr = out_ptr.to(tl.pointer_type(tl.uint8))
    for step in range(0, span, BLOCK_C):
        c = step + tl.arange(0, BLOCK_C)
        hp = _load(hp_ptr, r, c, rows, columns, stride_row, stride_column)
        written = (r < padded_rows)[:, None] & (c < padded_columns)[None, :]
        value = scaled(hp, scale[:, None], FMAX, False)
        if tl.int8 == OUT:
            low = byte(value, OUT).to(tl.uint8)
        else:
            low = value.to(OUT).to(tl.uint8, bitcast=True)
        tl.store(out_ptr + r[:, None] * padded_columns + c[None, :], low, mask=written)
    tl.store(scale_ptr + r, scale, mask=r < padded_rows)
    _flag(health_ptr, magnitude_bits(scale), FLAG, COUNT)


@triton.jit
def find_maxima(
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
    if SOURCE == GIVEN:
        scale = tl.load(scale_ptr + index * 0)
    else:
        if SOURCE == MAXIMA:
            amax = tl.load(amax_ptr + index * STEP, mask=index < size, other=0)
        elif SOURCE == GROUP:
            amax = group_bits
        else:
            amax = block_bits + (index * 0).to(tl.int32)
        scale = scale_of(amax, FMAX, TINY, POWER_OF_TWO)
    return scale


@triton.jit
def _store_scale(
    scale_ptr, scale, index, padded, along, last, stride_index, stride_along, SOURCE: tl.constexpr, STEP: tl.constexpr
):
    """`index` runs over rows of a copy, `along` counts tiles in the direction of its columns."""
    if SOURCE == GROUP:
        tl.store(scale_ptr + index * stride_index + along * stride_along, scale, mask=index < padded)
    if SOURCE == BLOCK:
        first = (index % 128 == 0) & (index < padded)
        place = scale_ptr + (index // 128) * stride_index + along
        tl.store(place, scale, mask=first)
        if along == last:  # the columns up to a multiple of 4 exist for the layout only
            for beyond in tl.static_range(1, 4):
                tl.store(place + beyond, scale * 0.0, mask=first & (index * 0 + along + beyond < stride_index))
    if SOURCE == MAXIMA and along == 0:
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
    scale = _side_scale(group_bits, block_bits, amax_ptr, scale_ptr, r, rows, SOURCE, STEP, FMAX, TINY, POWER_OF_TWO)
    _store_scale(scale_ptr, scale, r, padded_rows, tl.program_id(1), last, scale_stride_0, scale_stride_1, SOURCE, STEP)
    value = scaled(hp, scale[:, None], FMAX, SOURCE == GIVEN)
    return value, magnitude_bits(scale) if SOURCE != GIVEN else group_bits


@triton.jit
def cast_tiles(
    hp_ptr,
    row_out_ptr,
    row_scale_ptr,
    row_amax_ptr,
    column_out_ptr,
    column_scale_ptr,
    column_amax_ptr,
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
        tl.maximum(magnitude_bits(hp_0), magnitude_bits(hp_1)), tl.maximum(magnitude_bits(hp_2), magnitude_bits(hp_3))
    )
    column_bits = tl.max(bits, axis=0)
    block_bits = tl.max(column_bits, axis=0)
    if ROW != NONE:
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
    if COLUMN != NONE:
        scale = _side_scale(
            column_bits, block_bits, column_amax_ptr, column_scale_ptr, c, columns,
            COLUMN, COLUMN_STEP, COLUMN_FMAX, TINY, COLUMN_POWER_OF_TWO,
        )  # fmt: skip
        if ROW == NONE:
            value_0 = scaled(hp_0, scale[None, :], COLUMN_FMAX, COLUMN == GIVEN)
            value_1 = scaled(hp_1, scale[None, :], COLUMN_FMAX, COLUMN == GIVEN)
            value_2 = scaled(hp_2, scale[None, :], COLUMN_FMAX, COLUMN == GIVEN)
            value_3 = scaled(hp_3, scale[None, :], COLUMN_FMAX, COLUMN == GIVEN)
            packed = word(value_0, value_1, value_2, value_3, COLUMN_OUT, COLUMN_CVT)
        if WORDS:
            words = column_out_ptr.to(tl.pointer_type(tl.int32))
            store_transposed(words, packed, r0 // 4, c, column_rows, column_columns // 4)
        else:
            column_bytes = column_out_ptr.to(tl.pointer_type(tl.uint8))
            for quarter in tl.static_range(4):
                low = ((packed >> (8 * quarter)) & 0xFF).to(tl.uint8)
                store_transposed(column_bytes, low, r0 + quarter, c, column_rows, column_columns)
        _store_scale(
            column_scale_ptr, scale, c, column_rows, tl.program_id(0), column_last,
            column_scale_stride_0, column_scale_stride_1, COLUMN, COLUMN_STEP,
        )  # fmt: skip
        shown = magnitude_bits(scale) if COLUMN != GIVEN else column_bits
        _flag(health_ptr, shown, COLUMN_FLAG, COLUMN_COUNT)
