"""Quantization to FP8 on the GPU: a tensor and its transpose, in one pass over the data.

    scale = max(amax, tiny * FMAX) / FMAX        out = round(clamp(hp / scale))

Shapes: hp [R, C] with any strides. The row copy is hp itself, [>= R, >= C]; the column copy is
hp^T, [>= C, >= R]; both FP8, row-major, with zeros in the padding. Each has its own cast.
Twin: core/reference.py on hp and on hp^T, bit for bit.

Groups of 128 lie inside a tile, so 1x128 and 128x128 scales of both copies cost one launch and
one read. A tensor scale, or a row scale of a copy that shares its pass, needs its amaxes first:
a memset, a launch that takes maxima, and the launch that casts. Rows of a single row copy fit
one program, so they need one launch too. A given (delayed) scale always needs one.

Scales lie in memory as `kernels.quantizer.empty_scale` says.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from loka.core.recipe import Granularity
from loka.core.reference import Quantized
from loka.kernels.quantizer import Side, empty_scale

_TINY = torch.finfo(torch.float32).tiny
_TRITON_TYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
_ROWS_TILE = 4096  # elements that a program of `_quantize_rows` holds at a time
_AMAX_PROGRAMS = 2048  # enough to fill 132 multiprocessors several times over

# Where a side's scale comes from.
_NONE, _MAXIMA, _GROUP, _BLOCK, _GIVEN = (tl.constexpr(i) for i in range(5))


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
def _to_fp8(hp, scale, FMAX: tl.constexpr, OUT: tl.constexpr, GIVEN: tl.constexpr):
    value = tl.div_rn(hp, scale)
    # Comparisons with NaN are false, so NaN stays; tl.clamp would hide it.
    value = tl.where(value > FMAX, FMAX, value)
    value = tl.where(value < -FMAX, -FMAX, value)
    if GIVEN:  # a current scale is not finite when an element is not; a given one must not hide it
        value = tl.where(tl.abs(hp) < float("inf"), value, float("nan"))
    return value.to(OUT)


@triton.jit
def _flag(health_ptr, scale, FLAG: tl.constexpr, COUNT: tl.constexpr):
    """Marks health[FLAG] when a value (a scale, a magnitude) is not finite; the first program counts
    a run."""
    if FLAG >= 0:
        finite = tl.abs(scale) < float("inf")
        if tl.sum(tl.where(finite, 0, 1), axis=0) > 0:
            tl.store(health_ptr + FLAG, 1)
    if COUNT >= 0 and (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(health_ptr + COUNT, tl.load(health_ptr + COUNT) + 1)


@triton.jit
def _quantize_rows(
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
    OUT: tl.constexpr,
    FLAG: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A program owns BLOCK_R whole rows: amax, then a second read, from the cache, to cast."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    amax = tl.zeros((BLOCK_R,), dtype=tl.int32)
    for step in range(0, span, BLOCK_C):
        c = step + tl.arange(0, BLOCK_C)
        hp = _load(hp_ptr, r, c, rows, columns, stride_row, stride_column)
        amax = tl.maximum(amax, tl.max(_magnitude_bits(hp), axis=1))
    scale = _scale_of(amax, FMAX, TINY, POWER_OF_TWO)
    for step in range(0, span, BLOCK_C):
        c = step + tl.arange(0, BLOCK_C)
        hp = _load(hp_ptr, r, c, rows, columns, stride_row, stride_column)
        written = (r < padded_rows)[:, None] & (c < padded_columns)[None, :]
        value = _to_fp8(hp, scale[:, None], FMAX, OUT, False)
        tl.store(out_ptr + r[:, None] * padded_columns + c[None, :], value, mask=written)
    tl.store(scale_ptr + r, scale, mask=r < padded_rows)
    _flag(health_ptr, scale, FLAG, COUNT)


@triton.jit
def _maxima(
    hp_ptr,
    row_amax_ptr,
    column_amax_ptr,
    rows,
    columns,
    stride_row,
    stride_column,
    span,
    ROW_STEP: tl.constexpr,
    COLUMN_STEP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Bits of the largest |hp|, merged by atomics; a step of 1 keeps one a row (or column), 0 one
    in all, -1 none. Maxima do not depend on the order, so the result is deterministic."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    begin = tl.program_id(1).to(tl.int64) * span
    row_amax = tl.zeros((BLOCK_R,), dtype=tl.int32)
    for step in range(0, span, BLOCK_C):
        c = begin + step + tl.arange(0, BLOCK_C)
        bits = _magnitude_bits(_load(hp_ptr, r, c, rows, columns, stride_row, stride_column))
        if COLUMN_STEP == 1:
            tl.atomic_max(column_amax_ptr + c, tl.max(bits, axis=0), mask=c < columns, sem="relaxed")
        row_amax = tl.maximum(row_amax, tl.max(bits, axis=1))
    if ROW_STEP == 1:
        tl.atomic_max(row_amax_ptr + r, row_amax, mask=r < rows, sem="relaxed")
    if ROW_STEP == 0:
        tl.atomic_max(row_amax_ptr, tl.max(row_amax, axis=0), sem="relaxed")
    if COLUMN_STEP == 0:
        tl.atomic_max(column_amax_ptr, tl.max(row_amax, axis=0), sem="relaxed")


@triton.jit
def _side_scale(
    bits,
    amax_ptr,
    scale_ptr,
    index,
    size,
    SOURCE: tl.constexpr,
    STEP: tl.constexpr,
    AXIS: tl.constexpr,
    FMAX: tl.constexpr,
    TINY: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """The scales of one side of a tile, one for each of `index`: [BLOCK]."""
    if SOURCE == _GIVEN:
        scale = tl.load(scale_ptr + index * 0)
    else:
        if SOURCE == _MAXIMA:
            amax = tl.load(amax_ptr + index * STEP, mask=index < size, other=0)
        elif SOURCE == _GROUP:
            amax = tl.max(bits, axis=AXIS)
        else:
            amax = tl.max(tl.max(bits, axis=1), axis=0) + (index * 0).to(tl.int32)
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
    BLOCK: tl.constexpr,
):
    """`index` runs over the rows of a copy, `along` counts tiles in the direction of its columns."""
    if SOURCE == _GROUP:
        tl.store(scale_ptr + index * stride_index + along * stride_along, scale, mask=index < padded)
    if SOURCE == _BLOCK:
        lane = tl.arange(0, BLOCK)
        tile = tl.min(index, axis=0) // BLOCK
        tl.store(scale_ptr + tile * stride_index + along + lane, scale, mask=lane == 0)
        if along == last:  # the columns up to a multiple of 4 exist for the layout only
            beyond = along + 1 + lane
            tl.store(scale_ptr + tile * stride_index + beyond, scale * 0.0, mask=beyond < stride_index)
    if SOURCE == _MAXIMA and along == 0:
        tl.store(scale_ptr + index * STEP, scale, mask=(index < padded) & (index * (1 - STEP) == 0))


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
    ROW_FLAG: tl.constexpr,
    ROW_COUNT: tl.constexpr,
    COLUMN: tl.constexpr,
    COLUMN_STEP: tl.constexpr,
    COLUMN_FMAX: tl.constexpr,
    COLUMN_POWER_OF_TWO: tl.constexpr,
    COLUMN_OUT: tl.constexpr,
    COLUMN_FLAG: tl.constexpr,
    COLUMN_COUNT: tl.constexpr,
    SAME: tl.constexpr,
    SEEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One tile: both copies from one read. SAME: one rounding serves both."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    hp = _load(hp_ptr, r, c, rows, columns, stride_row, stride_column)
    bits = _magnitude_bits(hp)
    if SEEN:
        tl.atomic_max(seen_ptr, tl.max(tl.max(bits, axis=1), axis=0), sem="relaxed")
    if ROW != _NONE:
        scale = _side_scale(
            bits, row_amax_ptr, row_scale_ptr, r, rows, ROW, ROW_STEP, 1, ROW_FMAX, TINY, ROW_POWER_OF_TWO
        )
        low = _to_fp8(hp, scale[:, None], ROW_FMAX, ROW_OUT, ROW == _GIVEN)
        written = (r < row_rows)[:, None] & (c < row_columns)[None, :]
        tl.store(row_out_ptr + r[:, None] * row_columns + c[None, :], low, mask=written)
        _store_scale(
            row_scale_ptr,
            scale,
            r,
            row_rows,
            tl.program_id(1),
            row_last,
            row_scale_stride_0,
            row_scale_stride_1,
            ROW,
            ROW_STEP,
            BLOCK_R,
        )
        shown = scale if ROW != _GIVEN else tl.max(bits, axis=1).to(tl.float32, bitcast=True)
        _flag(health_ptr, shown, ROW_FLAG, ROW_COUNT)
    if COLUMN != _NONE:
        column_scale = _side_scale(
            bits,
            column_amax_ptr,
            column_scale_ptr,
            c,
            columns,
            COLUMN,
            COLUMN_STEP,
            0,
            COLUMN_FMAX,
            TINY,
            COLUMN_POWER_OF_TWO,
        )
        if SAME:
            turned = low
        else:
            turned = _to_fp8(hp, column_scale[None, :], COLUMN_FMAX, COLUMN_OUT, COLUMN == _GIVEN)
        written = (r < column_columns)[:, None] & (c < column_rows)[None, :]
        tl.store(column_out_ptr + c[None, :] * column_columns + r[:, None], turned, mask=written)
        _store_scale(
            column_scale_ptr,
            column_scale,
            c,
            column_rows,
            tl.program_id(0),
            column_last,
            column_scale_stride_0,
            column_scale_stride_1,
            COLUMN,
            COLUMN_STEP,
            BLOCK_C,
        )
        shown = column_scale if COLUMN != _GIVEN else tl.max(bits, axis=0).to(tl.float32, bitcast=True)
        _flag(health_ptr, shown, COLUMN_FLAG, COLUMN_COUNT)


@dataclass(frozen=True)
class _Copy:
    out: torch.Tensor
    scale: torch.Tensor  # logical [groups of rows, groups of columns]
    source: int
    step: int  # of the maxima: 1 a row, 0 one in all, -1 none


def quantize_pair_fused(
    hp: torch.Tensor,
    *,
    row: Side | None,
    column: Side | None,
    given: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
    health: torch.Tensor | None = None,
) -> tuple[Quantized | None, Quantized | None]:
    """Quantizes hp [R, C] (`row`) and hp^T [C, R] (`column`) in one pass; see kernels/quantizer.py.

    `given` float32 [1] is the tensor scale to use; `seen` int32 [1] receives the bits of max |hp|,
    from which the next step's scale follows. `health` int64, flat.
    """
    # Triton launches on the current device, which need not be the operand's.
    with torch.cuda.device_of(hp) if hp.is_cuda else contextlib.nullcontext():
        if given is None and column is None and row is not None and _is_rows(row, hp):
            return _rows(hp, row, health), None
        if given is None and row is None and column is not None and _is_rows(column, hp.t()):
            return None, _rows(hp.t(), column, health)
        row_copy = _prepare(row, hp.device, given)
        column_copy = _prepare(column, hp.device, given)
        _cast_tiles(hp, row, column, row_copy, column_copy, given, seen, health)
    return (
        Quantized(row_copy.out, row_copy.scale, row.cast) if row and row_copy else None,
        Quantized(column_copy.out, column_copy.scale, column.cast) if column and column_copy else None,
    )


def _is_rows(side: Side, hp: torch.Tensor) -> bool:
    """A row scale of rows that lie in memory: `_quantize_rows` does it in one launch."""
    return side.cast.granularity is Granularity.ROW and hp.stride(1) == 1


def _cast_tiles(
    hp: torch.Tensor,
    row: Side | None,
    column: Side | None,
    row_copy: _Copy | None,
    column_copy: _Copy | None,
    given: torch.Tensor | None,
    seen: torch.Tensor | None,
    health: torch.Tensor | None,
) -> None:
    row_amax, column_amax = _take_maxima(hp, row_copy, column_copy)
    unused = given if given is not None else hp
    tiles, grid = _tiles(row, column)
    _cast[grid](
        hp,
        row_copy.out if row_copy else unused,
        row_copy.scale if row_copy else unused,
        row_amax if row_amax is not None else unused,
        column_copy.out if column_copy else unused,
        column_copy.scale if column_copy else unused,
        column_amax if column_amax is not None else unused,
        seen if seen is not None else unused,
        health.view(-1) if health is not None else unused,
        *hp.shape,
        *hp.stride(),
        *_sides(row_copy),
        *_sides(column_copy),
        (row_copy.scale.shape[1] if row_copy else 0) - 1,
        (column_copy.scale.shape[1] if column_copy else 0) - 1,
        TINY=_TINY,
        **_constants("ROW", row, row_copy, health),
        **_constants("COLUMN", column, column_copy, health),
        SAME=_same(row, column),
        SEEN=seen is not None,
        **tiles,
    )


def _prepare(side: Side | None, device: torch.device, given: torch.Tensor | None) -> _Copy | None:
    if side is None:
        return None
    rows, columns = side.padded
    out = torch.empty(rows, columns, dtype=side.cast.format.dtype, device=device)
    granularity = side.cast.granularity
    if given is not None:
        assert granularity is Granularity.TENSOR, "one given scale is a tensor scale"
        return _Copy(out, given.view(1, 1), _GIVEN.value, -1)
    scale = empty_scale(side.cast, side.padded, device)
    if granularity is Granularity.GROUP_1X128:
        return _Copy(out, scale, _GROUP.value, -1)
    if granularity is Granularity.BLOCK_128X128:
        return _Copy(out, scale, _BLOCK.value, -1)
    return _Copy(out, scale, _MAXIMA.value, int(granularity is Granularity.ROW))


def _take_maxima(
    hp: torch.Tensor, row: _Copy | None, column: _Copy | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    row_step = row.step if row else -1
    column_step = column.step if column else -1
    if row_step < 0 and column_step < 0:
        return None, None
    sizes = (
        {1: hp.shape[0], 0: 1, -1: 0}[row_step],
        {1: hp.shape[1], 0: int(row_step != 0), -1: 0}[column_step],
    )
    maxima = torch.zeros(sum(sizes), dtype=torch.int32, device=hp.device)
    row_amax, column_amax = maxima[: sizes[0]], maxima[sizes[0] :]
    if row_step == 0 and column_step == 0:
        column_amax = row_amax  # one tensor maximum serves both copies
    steps = (row_step, column_step if column_amax is not row_amax else -1)
    lying = hp
    if hp.stride(1) != 1 and hp.stride(0) == 1:  # read in the order in which it lies in memory
        lying, row_amax, column_amax, steps = hp.t(), column_amax, row_amax, steps[::-1]
    block_r, block_c = 64, 128
    high, wide = triton.cdiv(lying.shape[0], block_r), triton.cdiv(lying.shape[1], block_c)
    turns = min(wide, max(1, high * wide // _AMAX_PROGRAMS))
    _maxima[(high, triton.cdiv(wide, turns))](
        lying,
        row_amax if steps[0] >= 0 else maxima,
        column_amax if steps[1] >= 0 else maxima,
        *lying.shape,
        *lying.stride(),
        turns * block_c,
        ROW_STEP=steps[0],
        COLUMN_STEP=steps[1],
        BLOCK_R=block_r,
        BLOCK_C=block_c,
    )
    return (row_amax, column_amax) if lying is hp else (column_amax, row_amax)


def _tiles(row: Side | None, column: Side | None) -> tuple[dict[str, int], tuple[int, int]]:
    """Tile sides and warps, and the grid that covers hp and both copies with their padding."""
    high = max(row.padded[0] if row else 0, column.padded[1] if column else 0)
    wide = max(row.padded[1] if row else 0, column.padded[0] if column else 0)
    block_r = block_c = 128
    if column is None and row is not None and row.cast.granularity is not Granularity.BLOCK_128X128:
        block_r = 32
    tiles = {"BLOCK_R": block_r, "BLOCK_C": block_c, "num_warps": 4 if block_r == 32 else 8}
    return tiles, (triton.cdiv(high, block_r), triton.cdiv(wide, block_c))


def _same(row: Side | None, column: Side | None) -> bool:
    """Whether both copies round every element alike: one cast, one scale for each square block."""
    square = (Granularity.TENSOR, Granularity.BLOCK_128X128)
    return (
        row is not None and column is not None and row.cast == column.cast and row.cast.granularity in square
    )


def _sides(copy: _Copy | None) -> tuple[int, int, int, int]:
    return (*copy.out.shape, *copy.scale.stride()) if copy else (0, 0, 0, 0)


def _constants(prefix: str, side: Side | None, copy: _Copy | None, health: torch.Tensor | None) -> dict:
    fmt = side.cast.format if side else None
    values = {
        "": copy.source if copy else _NONE.value,
        "_STEP": copy.step if copy else -1,
        "_FMAX": fmt.max if fmt else 1.0,
        "_POWER_OF_TWO": bool(side and side.cast.power_of_two),
        "_OUT": _TRITON_TYPES[fmt.dtype] if fmt else tl.float8e4nv,
        "_FLAG": side.flag if side and health is not None else -1,
        "_COUNT": side.count if side and health is not None else -1,
    }
    return {prefix + name: value for name, value in values.items()}


def _rows(hp: torch.Tensor, side: Side, health: torch.Tensor | None) -> Quantized:
    """Row scales of a row-major operand: a launch."""
    rows, columns = side.padded
    out = torch.empty(rows, columns, dtype=side.cast.format.dtype, device=hp.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=hp.device)
    block_c = max(triton.next_power_of_2(columns), 16) if columns <= _ROWS_TILE else 1024
    block_r = max(_ROWS_TILE // block_c, 1)
    _quantize_rows[(triton.cdiv(rows, block_r), 1)](
        hp,
        out,
        scale,
        health.view(-1) if health is not None else scale,
        *hp.shape,
        rows,
        columns,
        *hp.stride(),
        triton.cdiv(columns, block_c) * block_c,
        FMAX=side.cast.format.max,
        TINY=_TINY,
        POWER_OF_TWO=side.cast.power_of_two,
        OUT=_TRITON_TYPES[side.cast.format.dtype],
        FLAG=side.flag if health is not None else -1,
        COUNT=side.count if health is not None else -1,
        BLOCK_R=block_r,
        BLOCK_C=block_c,
    )
    return Quantized(out, scale, side.cast)
