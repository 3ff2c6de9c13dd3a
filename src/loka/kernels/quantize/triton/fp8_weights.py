"""FP8 copies of a list of weights on the GPU: two launches for up to 16 weights of one dtype.

    1   partial[p] = bits of max |W| over the share of program p
    2   scale = 2^max(ceil(log2(max|W|)) - 8, -100),  row = fp8(W / scale),  column = row^T

Twin: kernels/quantize/weight_copies.py. Addresses and sizes are arguments of the kernels, so that nothing is
copied to the device before and a CUDA graph may capture the launches. Every program of the second launch
reduces the partial maxima of its weight anew: no memory has to be zeroed, no atomics meet. Where maxima are
known, as ranks agree on them, the second is all there is.

A program picks its weight out of tuples of arguments. Triton compiles anew for integers that are 1 or
multiples of 16, in tuples whether asked to or not; `_opaque` makes all those below 2^30
alike to it.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from loka.kernels.quantize.weight_copies import FP8, NAN_BYTE, NAN_SCALE, OCTAVES, SIDE, SMALLEST, Copies
from loka.kernels.triton.launch import cdiv, launching_on
from loka.kernels.triton.pack import CVT, INTERPRETED, TRITON_TYPES, inverse_of_power, magnitude_bits, word

HIGH_PRECISION = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_PARTIALS = 256  # programs that share a weight's maximum, at most: the second launch reads a number of each
_HIGH, _WIDE = 16, 256  # rows and columns of a tile of the first launch
_TILE = 64  # rows and columns of a tile of the second, as in quantize.py
_REACH = 1 << 24  # a stride below leaves offsets within a tile in 32 bits

_NAN_BYTE, _NAN_BYTES = tl.constexpr(NAN_BYTE), tl.constexpr(NAN_BYTE * 0x01010101)
_NAN_SCALE, _SMALLEST, _OCTAVES = tl.constexpr(NAN_SCALE), tl.constexpr(SMALLEST), tl.constexpr(OCTAVES << 23)
_SIDE = tl.constexpr(SIDE)
_IS_ROW, _IS_COLUMN, _IS_ALIGNED = (tl.constexpr(1 << place) for place in range(3))


def _opaque(value: int) -> int:
    """An odd number and not 1, for a size, a stride or a count."""
    return 2 * value + 3


@triton.jit
def plain(value):
    return (value >> 1) - 1


@triton.jit
def _find_largest(
    partial_ptr, weights, firsts, turns, all_rows, all_columns, strides_row, strides_column,
    WEIGHTS: tl.constexpr, WEIGHT: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Each program takes `turn` tiles on end. A weight without a gap in memory has one row of all
    its elements, and a stride of 0; maxima do not depend on the order.

    Whole tiles of such a weight have no mask: a mask that the compiler cannot follow makes it load single
    elements.
    """
    program = tl.program_id(0)
    weight, first, turn = weights[0].to(tl.int64), firsts[0], turns[0]
    rows, columns = all_rows[0], all_columns[0]
    stride_row, stride_column = strides_row[0], strides_column[0]
    for place in tl.static_range(1, WEIGHTS):
        here = program >= plain(firsts[place])
        weight = tl.where(here, weights[place].to(tl.int64), weight)
        first = tl.where(here, firsts[place], first)
        turn = tl.where(here, turns[place], turn)
        rows = tl.where(here, all_rows[place], rows)
        columns = tl.where(here, all_columns[place], columns)
        stride_row = tl.where(here, strides_row[place], stride_row)
        stride_column = tl.where(here, strides_column[place], stride_column)
    rows, columns = plain(rows).to(tl.int64), plain(columns).to(tl.int64)
    stride_row, stride_column = plain(stride_row).to(tl.int64), plain(stride_column).to(tl.int64)
    turn = plain(turn).to(tl.int64)
    begin = (program - plain(first)) * turn
    if stride_row == 0:
        largest = _largest_of_flat(weight, begin, turn, columns, WEIGHT, HIGH * WIDE)
    else:
        largest = _largest_of_tiles(weight, begin, turn, rows, columns, stride_row, stride_column, WEIGHT, HIGH, WIDE)
    tl.store(partial_ptr + program, largest)


@triton.jit
def _largest_of_flat(weight, begin, turn, size, WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    weight_ptr = tl.multiple_of(weight.to(tl.pointer_type(WEIGHT)), 16)
    i = tl.arange(0, BLOCK)
    whole = size // BLOCK
    bits = tl.zeros((BLOCK,), tl.int32)
    for tile in range(begin, tl.minimum(begin + turn, whole)):
        value = tl.load(weight_ptr + tile * BLOCK + i)
        bits = tl.maximum(bits, magnitude_bits(value.to(tl.float32)))
    largest = tl.max(bits, axis=0)
    if begin + turn > whole:
        rest = whole * BLOCK
        value = tl.load(weight_ptr + rest + i, mask=i < size - rest, other=0.0)
        largest = tl.maximum(largest, tl.max(magnitude_bits(value.to(tl.float32)), axis=0))
    return largest


@triton.jit
def _largest_of_tiles(
    weight, begin, turn, rows, columns, stride_row, stride_column,
    WEIGHT: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    weight_ptr = weight.to(tl.pointer_type(WEIGHT))
    q = tl.arange(0, HIGH)
    c = tl.arange(0, WIDE)
    across = (columns + WIDE - 1) // WIDE
    tiles = (rows + HIGH - 1) // HIGH * across
    bits = tl.zeros((HIGH, WIDE), tl.int32)
    for tile in range(begin, tl.minimum(begin + turn, tiles)):
        r = tile // across * HIGH + q
        k = tile % across * WIDE + c
        offset = r[:, None] * stride_row + k[None, :] * stride_column
        value = tl.load(weight_ptr + offset, mask=(r < rows)[:, None] & (k < columns)[None, :], other=0.0)
        bits = tl.maximum(bits, magnitude_bits(value.to(tl.float32)))
    return tl.max(tl.max(bits, axis=1), axis=0)


@triton.jit
def _scale_bits(largest):
    """Twin: kernels/quantize/weight_copies.scale_bits. NaN and infinity are the bits from 0x7F800000 on."""
    power = ((tl.minimum(largest, 0x7F800000) + 0x7FFFFF) & 0x7F800000) - _OCTAVES
    return tl.where(largest >= 0x7F800000, _NAN_SCALE, tl.maximum(power, _SMALLEST))


@triton.jit
def _load(weight_ptr, q, c, rows, columns, stride_row, stride_column, EVEN: tl.constexpr):
    place = weight_ptr + (q[:, None] * stride_row + c[None, :] * stride_column)
    if EVEN:
        value = tl.load(place)
    else:
        value = tl.load(place, mask=(q < rows)[:, None] & (c < columns)[None, :], other=0.0)
    return value.to(tl.float32)


@triton.jit
def _store_row(row_ptr, value, q, c, rows, columns, padded, OUT: tl.constexpr, CVT: tl.constexpr, EVEN: tl.constexpr):
    """Casts anew what the words hold too: a conversion more, but no bytes to pick out of words.

    The hardware makes of every NaN the byte 0x7F, the interpreter a number.
    """
    if CVT != "":
        byte = tl.inline_asm_elementwise(CVT, "=r,f,f,f,f", [value], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        byte = tl.where(value == value, value.to(OUT).to(tl.uint8, bitcast=True), _NAN_BYTE)
    place = row_ptr + (q[:, None] * padded + c[None, :])
    if EVEN:
        tl.store(place, byte.to(tl.uint8))
    else:
        tl.store(place, byte.to(tl.uint8), mask=(q < rows)[:, None] & (c < columns)[None, :])


@triton.jit
def _tile(
    weight_ptr, row, column, scale, partial, tile, start, first, rows, columns, stride_row, stride_column,
    padded_rows, padded_columns, flags,
    OUT: tl.constexpr, CVT: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Rows from `start` and columns from `first` on, as four tiles of every fourth row; see `quantize._cast`.

    The elements are asked for before the maxima are reduced, so that both are on their way at once.
    """
    v = tl.arange(0, BLOCK // 4)
    q = 4 * v
    c = tl.arange(0, BLOCK)
    weight_ptr += start * stride_row + first * stride_column
    along = stride_row.to(tl.int32) if EVEN else stride_row
    below, beside = (rows - start).to(tl.int32), (columns - first).to(tl.int32)
    hp_0 = _load(weight_ptr, q, c, below, beside, along, stride_column, EVEN)
    hp_1 = _load(weight_ptr + stride_row, q, c, below - 1, beside, along, stride_column, EVEN)
    hp_2 = _load(weight_ptr + 2 * stride_row, q, c, below - 2, beside, along, stride_column, EVEN)
    hp_3 = _load(weight_ptr + 3 * stride_row, q, c, below - 3, beside, along, stride_column, EVEN)
    bits = _scale_bits(tl.max(partial, axis=0))
    inverse = inverse_of_power(bits.to(tl.float32, bitcast=True))
    value_0, value_1, value_2, value_3 = hp_0 * inverse, hp_1 * inverse, hp_2 * inverse, hp_3 * inverse
    low, right = (padded_rows - start).to(tl.int32), (padded_columns - first).to(tl.int32)
    if (flags & _IS_ROW) != 0:
        row_ptr = tl.multiple_of(row.to(tl.pointer_type(tl.uint8)), 16) + start * padded_columns + first
        wide = padded_columns.to(tl.int32)
        _store_row(row_ptr, value_0, q, c, low, right, wide, OUT, CVT, EVEN)
        _store_row(row_ptr + padded_columns, value_1, q, c, low - 1, right, wide, OUT, CVT, EVEN)
        _store_row(row_ptr + 2 * padded_columns, value_2, q, c, low - 2, right, wide, OUT, CVT, EVEN)
        _store_row(row_ptr + 3 * padded_columns, value_3, q, c, low - 3, right, wide, OUT, CVT, EVEN)
    if (flags & _IS_COLUMN) != 0:
        packed = word(value_0, value_1, value_2, value_3, OUT, CVT)
        if CVT == "":
            packed = tl.where(inverse == inverse, packed, _NAN_BYTES)
        column_ptr = tl.multiple_of(column.to(tl.pointer_type(tl.int32)), 16)
        column_ptr += first * (padded_rows // 4) + start // 4
        place = column_ptr + (c[None, :] * (padded_rows // 4).to(tl.int32) + v[:, None])
        if EVEN:
            tl.store(place, packed)
        else:
            tl.store(place, packed, mask=(q < low)[:, None] & (c < right)[None, :])
    # There are at least as many tiles as blocks of scales.
    i = tile * BLOCK + c
    scale_ptr = tl.multiple_of(scale.to(tl.pointer_type(tl.int32)), 16)
    tl.store(scale_ptr + i, tl.zeros((BLOCK,), tl.int32) + bits, mask=i < tl.maximum(padded_rows, padded_columns))


@triton.jit
def _cast(
    partial_ptr, weights, all_row, all_column, scales, firsts, begins, counts, all_rows, all_columns,
    strides_row, strides_column, all_flags,
    WEIGHTS: tl.constexpr, WEIGHT: tl.constexpr, ALIGN: tl.constexpr, OUT: tl.constexpr, CVT: tl.constexpr,
    PARTIALS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    weight, scale = weights[0].to(tl.int64), scales[0].to(tl.int64)
    row, column = all_row[0].to(tl.int64), all_column[0].to(tl.int64)
    first, begin, count = firsts[0], begins[0], counts[0]
    rows, columns, flags = all_rows[0], all_columns[0], all_flags[0]
    stride_row, stride_column = strides_row[0], strides_column[0]
    for place in tl.static_range(1, WEIGHTS):
        here = program >= plain(firsts[place])
        weight = tl.where(here, weights[place].to(tl.int64), weight)
        scale = tl.where(here, scales[place].to(tl.int64), scale)
        row = tl.where(here, all_row[place].to(tl.int64), row)
        column = tl.where(here, all_column[place].to(tl.int64), column)
        first = tl.where(here, firsts[place], first)
        begin = tl.where(here, begins[place], begin)
        count = tl.where(here, counts[place], count)
        rows = tl.where(here, all_rows[place], rows)
        columns = tl.where(here, all_columns[place], columns)
        flags = tl.where(here, all_flags[place], flags)
        stride_row = tl.where(here, strides_row[place], stride_row)
        stride_column = tl.where(here, strides_column[place], stride_column)
    rows, columns, flags = plain(rows).to(tl.int64), plain(columns).to(tl.int64), plain(flags)
    stride_row, stride_column = plain(stride_row).to(tl.int64), plain(stride_column).to(tl.int64)
    i = tl.arange(0, PARTIALS)
    partial = tl.load(partial_ptr + plain(begin) + i, mask=i < plain(count), other=0)
    tile = program - plain(first)
    across = ((columns + BLOCK - 1) // BLOCK).to(tl.int32)
    start = (tile // across).to(tl.int64) * BLOCK
    side = (tile % across).to(tl.int64) * BLOCK
    # Multiplied by the side, so that the compiler sees it and may use wide loads and stores.
    padded_rows = (rows + (_SIDE - 1)) // _SIDE * _SIDE
    padded_columns = (columns + (_SIDE - 1)) // _SIDE * _SIDE
    whole = (start + BLOCK <= rows) & (side + BLOCK <= columns)
    if ((flags & _IS_ALIGNED) != 0) & whole:
        weight_ptr = tl.multiple_of(weight.to(tl.pointer_type(WEIGHT)), 16)
        _tile(
            weight_ptr, row, column, scale, partial, tile, start, side, rows, columns,
            stride_row // ALIGN * ALIGN, 1, padded_rows, padded_columns, flags, OUT, CVT, BLOCK, True,
        )  # fmt: skip
    else:
        weight_ptr = weight.to(tl.pointer_type(WEIGHT))
        _tile(
            weight_ptr, row, column, scale, partial, tile, start, side, rows, columns, stride_row,
            stride_column, padded_rows, padded_columns, flags, OUT, CVT, BLOCK, False,
        )  # fmt: skip


class _Job(NamedTuple):
    """A weight as it lies in memory, and its copies from there; for one not asked for the other stands in."""

    weight: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor
    scale: torch.Tensor
    flags: int


def _job(weight: torch.Tensor, copies: Copies) -> _Job:
    """A transpose is quantized from the rows that lie in memory: its column copy is their row copy."""
    row, column = copies.row, copies.column
    if weight.stride(1) != 1 and weight.stride(0) == 1:
        weight, row, column = weight.t(), column, row
    flags = _IS_ROW.value * bool(row.numel()) + _IS_COLUMN.value * bool(column.numel())
    flags += _IS_ALIGNED.value * is_aligned(weight)
    return _Job(weight, row if row.numel() else column, column if column.numel() else row, copies.scale, flags)


def is_aligned(weight: torch.Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes, their elements side by side."""
    along, size = weight.stride(0), weight.element_size()
    return weight.stride(1) == 1 and along < _REACH and weight.data_ptr() % 16 == 0 and along * size % 16 == 0


class _Lying(NamedTuple):
    """How a job's weight lies, and its flags. `whole`: without gaps, from a multiple of 16 bytes on."""

    rows: int
    columns: int
    stride_row: int
    stride_column: int
    whole: bool
    flags: int


def _lying(job: _Job) -> _Lying:
    weight = job.weight
    whole = weight.is_contiguous() and weight.data_ptr() % 16 == 0
    (rows, columns), (stride_row, stride_column) = weight.shape, weight.stride()
    return _Lying(rows, columns, stride_row, stride_column, whole, job.flags)


class _Share(NamedTuple):
    programs: int
    turns: int
    rows: int
    columns: int
    stride_row: int
    stride_column: int


def _share(weight: _Lying) -> _Share:
    rows, columns = weight.rows, weight.columns
    if weight.whole:
        tiles, sides = cdiv(rows * columns, _HIGH * _WIDE), (1, rows * columns, 0, 1)
    else:
        # Zero is for weights without gaps; an expanded row may as well be read once.
        rows, stride = (rows, weight.stride_row) if weight.stride_row else (1, columns)
        tiles, sides = cdiv(rows, _HIGH) * cdiv(columns, _WIDE), (rows, columns, stride, weight.stride_column)
    turns = cdiv(tiles, _PARTIALS)
    return _Share(cdiv(tiles, turns), turns, *sides)


def numbers(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(_opaque(value) for value in values)


def starts(counts: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(counts, initial=0))


class _Sizes(NamedTuple):
    sharing: int
    shares: list[tuple[int, ...]]
    casting: int
    casts: list[tuple[int, ...]]


@functools.lru_cache(maxsize=512)  # a step asks each time, and counting takes the host as long as launching
def _sizes(weights: tuple[_Lying, ...]) -> _Sizes:
    shares = [_share(weight) for weight in weights]
    begins = starts([share.programs for share in shares])
    fields = list(zip(*shares, strict=True))[1:]
    sharing = [numbers(each) for each in (begins[:-1], *fields)]
    casts = _casts(weights[::-1], tuple(begins[-2::-1]), tuple(share.programs for share in shares[::-1]))
    return _Sizes(begins[-1], sharing, *casts)


@functools.lru_cache(maxsize=512)
def _casts(
    weights: tuple[_Lying, ...], begins: tuple[int, ...], counts: tuple[int, ...]
) -> tuple[int, list[tuple[int, ...]]]:
    """Programs of the second launch and its numbers; `begins` and `counts`: of each weight's partial maxima."""
    firsts = starts([cdiv(weight.rows, _TILE) * cdiv(weight.columns, _TILE) for weight in weights])
    fields = [[getattr(weight, name) for weight in weights] for name in (*_Lying._fields[:4], "flags")]
    return firsts[-1], [numbers(each) for each in (firsts[:-1], begins, counts, *fields)]


def quantize_weights_fused(weights: Sequence[torch.Tensor], copies: Sequence[Copies]) -> None:
    """Writes the copies of up to 16 weights [N, K], which have one dtype and elements: two launches."""
    jobs = [_job(weight, each) for weight, each in zip(weights, copies, strict=True)]
    sizes = _sizes(tuple(map(_lying, jobs)))
    partial = torch.empty(sizes.sharing, dtype=torch.int32, device=weights[0].device)
    dtype = weights[0].dtype
    with launching_on(partial):
        _find_largest[(sizes.sharing,)](
            partial,
            tuple(job.weight for job in jobs),
            *sizes.shares,
            WEIGHTS=len(jobs),
            WEIGHT=HIGH_PRECISION[dtype],
            HIGH=_HIGH,
            WIDE=_WIDE,
        )
        # The second launch begins with the weights that the first read last: they may still be in the cache.
        _launch_cast(partial, jobs[::-1], sizes.casting, sizes.casts)


def cast_rows_fused(
    weights: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    largest: torch.Tensor,
    indices: Sequence[int],
) -> None:
    """Writes rows, uint8 [N16, K16], and the first of `scales` of up to 16 weights [N, K] of one dtype, whose
    largest magnitudes are known, float32, at `indices` of `largest`: one launch."""
    jobs = [
        _Job(weight, row, row, scale, _IS_ROW.value + _IS_ALIGNED.value * is_aligned(weight))
        for weight, row, scale in zip(weights, rows, scales, strict=True)
    ]
    programs, casts = _casts(tuple(map(_lying, jobs)), tuple(indices), (1,) * len(jobs))
    with launching_on(largest):
        _launch_cast(largest.view(torch.int32), jobs, programs, casts)


def _launch_cast(partial: torch.Tensor, jobs: Sequence[_Job], programs: int, casts: Sequence[tuple[int, ...]]) -> None:
    dtype = jobs[0].weight.dtype
    _cast[(programs,)](
        partial,
        tuple(job.weight for job in jobs),
        tuple(job.row for job in jobs),
        tuple(job.column for job in jobs),
        tuple(job.scale for job in jobs),
        *casts,
        WEIGHTS=len(jobs),
        WEIGHT=HIGH_PRECISION[dtype],
        ALIGN=16 // dtype.itemsize,
        OUT=TRITON_TYPES[FP8],
        CVT="" if INTERPRETED else CVT[FP8],
        PARTIALS=_PARTIALS,
        BLOCK=_TILE,
        num_warps=2,
    )
