"""Quantization to FP8 and INT8 on the GPU: a tensor and its transpose, in one pass over the data.

    scale = max(amax, tiny * FMAX) / FMAX        out = round(clamp(hp / scale))

Shapes: hp [R, C] with any strides. The row copy is hp itself, [>= R, >= C]; the column copy is
hp^T, [>= C, >= R]; both row-major, with zeros in the padding. Each has its own cast.
Twin: core/numerics/reference.py on hp and on hp^T, bit for bit.

Launches: groups of 128 lie inside a tile, and rows of a row-major operand inside a program, so
such a copy costs one. A tensor scale, or the row scale of a column copy, needs its maxima
first: a memset and a launch, or the memset alone where a row copy can merge the tensor's
maximum on its way. Both copies come from one launch where every element has the same scale in
both (tensor, 128x128, given); otherwise each has its own.

Scales lie in memory as `kernels.quantize.side.empty_scale` says.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl

from loka.core.numerics.reference import TINY, Quantized
from loka.core.recipe import Cast, Granularity
from loka.kernels.quantize.side import Copies, Operand, Side, empty_scale
from loka.kernels.quantize.triton.cast_kernels import (
    BLOCK,
    GIVEN,
    GROUP,
    MAXIMA,
    NONE,
    cast_tiles,
    find_maxima,
    quantize_rows,
)
from loka.kernels.triton.launch import Recording, allocated, cdiv, launch, launching_on, recorded
from loka.kernels.triton.pack import CVT, INTERPRETED, TRITON_TYPES

_ROWS_TILE = 4096  # elements that a program of `quantize_rows` holds at a time
_AMAX_PROGRAMS = 2048  # enough to fill 132 multiprocessors several times over


def quantize_fused(
    operands: Sequence[Operand], *, given: torch.Tensor | None, health: torch.Tensor | None
) -> list[Copies]:
    """Quantizes each hp [R, C] and hp^T [C, R] in one pass over it; see kernels/quantize/quantizer.py.

    `given` float32 [1] is the tensor scale to use. `health` int64, flat.
    """
    hps = tuple(hp for hp, _, _ in operands)
    if INTERPRETED or not hps[0].is_cuda:
        return _quantize_each(operands, given, health)
    key = tuple((hp.shape, hp.stride(), hp.dtype, row, column) for hp, row, column in operands)
    with launching_on(hps[0]):
        found: list[Copies] = recorded(
            key,
            (*hps, given, health),
            lambda: _quantize_each(operands, given, health),
            lambda copies, recording: [(_slots(row, recording), _slots(column, recording)) for row, column in copies],
            lambda slots, tensors: [
                (_from_slot(places[0], tensors, row), _from_slot(places[1], tensors, column))
                for places, (_, row, column) in zip(slots, operands, strict=True)
            ],
        )
    return found


def _quantize_each(
    operands: Sequence[Operand], given: torch.Tensor | None, health: torch.Tensor | None
) -> list[Copies]:
    found = []
    for hp, row, column in operands:
        if hp.stride(1) != 1 and hp.stride(0) == 1:  # a weight [K, N] that is read as [N, K], as it lies
            transposed, lying = _quantize(hp.t(), column, row, given, health)
            found.append((lying, transposed))
        else:
            found.append(_quantize(hp, row, column, given, health))
    return found


def _slots(copy: Quantized | None, recording: Recording) -> tuple[int, int] | None:
    return None if copy is None else (recording.slot_of(copy.data), recording.slot_of(copy.scale))


def _from_slot(slot: tuple[int, int] | None, tensors: list[torch.Tensor | None], side: Side | None) -> Quantized | None:
    if slot is None or side is None:
        return None
    data, scale = tensors[slot[0]], tensors[slot[1]]
    assert data is not None
    assert scale is not None
    return Quantized(data, scale if scale.dim() == 2 else scale.view(1, 1), side.cast)


def _quantize(
    hp: torch.Tensor, row: Side | None, column: Side | None, given: torch.Tensor | None, health: torch.Tensor | None
) -> tuple[Quantized | None, Quantized | None]:
    maxima = _take_maxima(hp, row, column) if given is None else _NO_MAXIMA
    if row is not None and column is not None and _rounded_alike(row, column):
        return _cast_tiles(hp, row, column, maxima, given, health)
    row_copy = column_copy = None
    if row is not None:
        if given is None and _is_rows(row, hp):
            row_copy = _rows(hp, row, maxima.tensor if maxima.tensor.numel() else None, health)
        else:
            row_copy, _ = _cast_tiles(hp, row, None, maxima, given, health)
    if column is not None:
        if given is None and row is None and _is_rows(column, hp.t()):
            column_copy = _rows(hp.t(), column, None, health)
        else:
            _, column_copy = _cast_tiles(hp, None, column, maxima, given, health)
    return row_copy, column_copy


def _is_rows(side: Side, hp: torch.Tensor) -> bool:
    """A row scale of rows that lie in memory: `quantize_rows` does it in one launch."""
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

    def of(self, cast: Cast, *, transposed: bool) -> torch.Tensor:
        if cast.granularity is Granularity.TENSOR:
            return self.tensor
        return self.columns if transposed else self.rows


_NO_MAXIMA = _Maxima(torch.empty(0), torch.empty(0), torch.empty(0))


def _take_maxima(hp: torch.Tensor, row: Side | None, column: Side | None) -> _Maxima:
    """A memset and a launch, or the memset alone where `quantize_rows` will merge the maximum."""
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
        find_maxima, (high, cdiv(wide, turns)), (*pointers, *lying.shape, *lying.stride(), turns * block_c), constants
    )
    return maxima


def _cast_tiles(
    hp: torch.Tensor,
    row: Side | None,
    column: Side | None,
    maxima: _Maxima,
    given: torch.Tensor | None,
    health: torch.Tensor | None,
) -> tuple[Quantized | None, Quantized | None]:
    row_copy, column_copy = _empty(row, hp.device, given), _empty(column, hp.device, given)
    high = max(row.padded[0] if row else 0, column.padded[1] if column else 0)
    wide = max(row.padded[1] if row else 0, column.padded[0] if column else 0)
    block_r, block_c, warps = _tile(row, column)
    args = (
        hp,
        *_pointers(hp, row, row_copy, maxima, transposed=False),
        *_pointers(hp, column, column_copy, maxima, transposed=True),
        health.view(-1) if health is not None else hp,
        *hp.shape,
        *hp.stride(),
        *_sides(row_copy),
        *_sides(column_copy),
        (row_copy.scale.shape[1] if row_copy else 0) - 1,
        (column_copy.scale.shape[1] if column_copy else 0) - 1,
    )
    constants = {
        "TINY": TINY,
        **_constants("ROW", row, given is not None, health is not None),
        **_constants("COLUMN", column, given is not None, health is not None),
        "WORDS": column is not None and column.padded[1] % 4 == 0,
        "BLOCK_R": block_r,
        "BLOCK_C": block_c,
    }
    launch(cast_tiles, (cdiv(high, block_r), cdiv(wide, block_c)), args, constants, num_warps=warps)
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
    hp: torch.Tensor, side: Side | None, copy: Quantized | None, maxima: _Maxima, *, transposed: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Data, scale and maxima of a copy; any valid pointer where the kernel will not look."""
    if side is None or copy is None:
        return hp, hp, hp
    amax = maxima.of(side.cast, transposed=transposed)
    return copy.data, copy.scale, amax if amax.numel() else copy.scale


def _sides(copy: Quantized | None) -> tuple[int, int, int, int]:
    return (*copy.data.shape, *copy.scale.stride()) if copy else (0, 0, 0, 0)


@functools.lru_cache(maxsize=1024)
def _constants(prefix: str, side: Side | None, given: bool, health: bool) -> dict[str, object]:
    cast = side.cast if side else None
    source = NONE
    if cast:
        sources = {Granularity.GROUP_1X128: GROUP, Granularity.BLOCK_128X128: BLOCK}
        source = GIVEN if given else sources.get(cast.granularity, MAXIMA)
    values = {
        "": source.value,
        "_STEP": int(cast is not None and cast.granularity is Granularity.ROW),
        "_FMAX": cast.format.max if cast else 1.0,
        "_POWER_OF_TWO": cast is not None and cast.power_of_two,
        "_OUT": TRITON_TYPES[cast.format.dtype] if cast else tl.float8e4nv,
        "_CVT": CVT.get(cast.format.dtype, "") if cast and not INTERPRETED else "",
        "_FLAG": side.flag if side and health else -1,
        "_COUNT": side.count if side and health else -1,
    }
    return {prefix + name: value for name, value in values.items()}


def _rows(hp: torch.Tensor, side: Side, tensor_amax: torch.Tensor | None, health: torch.Tensor | None) -> Quantized:
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
        "TINY": TINY,
        "POWER_OF_TWO": side.cast.power_of_two,
        "OUT": TRITON_TYPES[side.cast.format.dtype],
        "TENSOR_AMAX": tensor_amax is not None,
        "FLAG": side.flag if health is not None else -1,
        "COUNT": side.count if health is not None else -1,
        "BLOCK_R": block_r,
        "BLOCK_C": block_c,
    }
    launch(quantize_rows, (cdiv(rows, block_r), 1), args, constants)
    return Quantized(out, scale, side.cast)
