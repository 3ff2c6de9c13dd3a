"""An INT8 GEMM on Hopper: int32 sums, scaled by the rows of both operands before they are written.

    out [M, N] = cast(float32(A8 [M, K] @ B8 [N, K]^T) * scale_a [M, 1] * scale_b [N, 1]^T)

The sums are exact and the roundings are those of `core.numerics.reference.scale_sums`, in its order: the
result is the twin's, bit for bit. cuBLASLt has no epilogue that scales rows, and writes int32.

Two programs on a multiprocessor overlap one's epilogue with the other's products: int32 to float32 is a
conversion an element, at half the rate of other instructions. Where K is short and tiles are many, one wide
tile whose loop is one pipeline is faster (docs/log.md, 2026-12-01), though that keeps no product in flight
(kernels/triton/in_flight.py).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from loka.kernels.gemm.triton.gemm import tile_place
from loka.kernels.triton.in_flight import how_in_flight, kept_in_flight
from loka.kernels.triton.launch import launching_on
from loka.kernels.triton.pack import INTERPRETED
from loka.kernels.triton.processors import multiprocessors

_PROCESSORS_INTERPRETED = 2  # few, so that each has several tiles


@dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel is laid out; results do not depend on it.

    Attributes:
        block_m, block_n, block_k: a tile.
        stages, warps: of Triton's software pipeline.
        per_sm: programs on a multiprocessor.
        parts: 2 writes a tile in two halves of its columns, for half the shared memory.
        flatten: the loops over tiles and over K are one pipeline.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 128
    stages: int = 3
    warps: int = 4
    per_sm: int = 2
    parts: int = 2
    flatten: bool = False


SQUARE = Config()
WIDE = Config(block_n=256, warps=8, per_sm=1, parts=1, flatten=True)
LOW = Config(block_m=64, stages=4, parts=1)
NARROW = Config(block_m=64, block_n=32, block_k=256, stages=4, parts=1)
CONFIGS = (SQUARE, WIDE, LOW, NARROW)

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_SHORT = 512  # terms of a sum, up to which the epilogue is most of the time
_GROUP = 8  # rows of tiles that are worked through together, for the L2 cache


def choose(rows: int, columns: int, inner: int, processors: int = 132) -> Config:
    """The fastest of `CONFIGS` at 24 shapes on an H200, or within 8 % of it."""
    if inner <= _SHORT and _tiles(rows, columns, WIDE) >= processors:
        return WIDE
    if _tiles(rows, columns, SQUARE) >= processors:
        return SQUARE
    return LOW if 2 * _tiles(rows, columns, LOW) >= processors else NARROW


@triton.jit
def _write(
    out_ptr, acc, scale_a, scale_b_ptr, row, column, rows, columns,
    BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A tile of sums, or half of one."""
    c = column + tl.arange(0, WIDTH)
    scale_b = tl.load(scale_b_ptr + c, mask=c < columns, other=0.0)[None, :]
    value = acc.to(tl.float32) * scale_a * scale_b
    if TMA:
        out_ptr.store([row, column], value.to(OUT))
    else:
        r = row + tl.arange(0, BLOCK_M)
        place = r.to(tl.int64)[:, None] * columns + c[None, :]
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        tl.store(out_ptr + place, value.to(OUT), mask=inside)


@kept_in_flight
@triton.jit
def _multiply(
    a, b, out, scale_a_ptr, scale_b_ptr, rows, columns, inner,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    OUT: tl.constexpr, TMA: tl.constexpr, GROUP: tl.constexpr, FLATTEN: tl.constexpr, PROGRAMS: tl.constexpr,
    IN_FLIGHT: tl.constexpr,
):  # fmt: skip
    """A program takes every PROGRAMS-th tile. TMA: whether rows of the result begin at 16 bytes.
    IN_FLIGHT: nothing that it reads; how it was compiled, for Triton's caches."""
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    begin = tl.program_id(0)
    # Counted apart from the loop, so that in one pipeline the loads of the next tile need not wait
    # for the epilogue of this one.
    written = begin - PROGRAMS
    for tile in tl.range(begin, tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN):
        tile_m, tile_n = tile_place(tile, tiles_m, tiles_n, GROUP)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
        for step in range(tl.cdiv(inner, BLOCK_K)):
            left = a.load([tile_m * BLOCK_M, step * BLOCK_K])
            right = b.load([tile_n * BLOCK_N, step * BLOCK_K])
            acc = tl.dot(left, right.T, acc, out_dtype=tl.int32)

        written += PROGRAMS
        tile_m, tile_n = tile_place(written, tiles_m, tiles_n, GROUP)
        row = tile_m * BLOCK_M
        column = tile_n * BLOCK_N
        r = row + tl.arange(0, BLOCK_M)
        scale_a = tl.load(scale_a_ptr + r, mask=r < rows, other=0.0)[:, None]
        if PARTS == 1:
            _write(out, acc, scale_a, scale_b_ptr, row, column, rows, columns, BLOCK_M, BLOCK_N, OUT, TMA)
        else:
            half: tl.constexpr = BLOCK_N // 2
            first, second = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, half)), (0, 2, 1)))
            _write(out, first, scale_a, scale_b_ptr, row, column, rows, columns, BLOCK_M, half, OUT, TMA)
            column += half
            _write(out, second, scale_a, scale_b_ptr, row, column, rows, columns, BLOCK_M, half, OUT, TMA)


def int8_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    dtype: torch.dtype,
    *,
    config: Config | None = None,
) -> torch.Tensor:
    """out [M, N] in `dtype` = a [M, K] @ b [N, K]^T, times scale_a of its rows, times scale_b of its columns.

    Args:
        a, b: int8, row-major, 16-byte aligned; K a multiple of 16, at most 131,072. M and N are free.
        scale_a, scale_b: float32 of M and of N elements, dequantizing, on the operands' device.
        dtype: bfloat16, float16 or float32.
        config: None chooses.
    """
    (m, k), n = a.shape, b.shape[0]
    assert (scale_a.numel(), scale_b.numel()) == (m, n), "a scale for each row of both"
    out = torch.empty(m, n, dtype=torch.float32 if INTERPRETED else dtype, device=a.device)
    if out.numel():
        # Triton launches on the current device, which need not be the operand's.
        with launching_on(a):
            _launch(a, b, out, scale_a.reshape(-1), scale_b.reshape(-1), k, config)
    return out.to(dtype)


def _launch(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    inner: int,
    config: Config | None,
) -> None:
    processors = _PROCESSORS_INTERPRETED if INTERPRETED else multiprocessors(a.device)
    rows, columns = out.shape
    config = config or choose(rows, columns, inner, processors)
    if config is WIDE and out.element_size() > 2:
        config = SQUARE  # a wide tile of float32 and its operands do not fit into shared memory
    programs = min(config.per_sm * processors, _tiles(rows, columns, config))
    tma = columns * out.element_size() % 16 == 0
    part = [config.block_m, config.block_n // config.parts]
    _multiply[(programs,)](
        TensorDescriptor.from_tensor(a, [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(b, [config.block_n, config.block_k]),
        TensorDescriptor.from_tensor(out, part) if tma else out,
        scale_a,
        scale_b,
        rows,
        columns,
        inner,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        PARTS=config.parts,
        OUT=_TYPES[out.dtype],
        TMA=tma,
        GROUP=_GROUP,
        FLATTEN=config.flatten,
        PROGRAMS=programs,
        IN_FLIGHT=how_in_flight(),
        num_warps=config.warps,
        num_stages=config.stages,
    )


def _tiles(rows: int, columns: int, config: Config) -> int:
    return triton.cdiv(rows, config.block_m) * triton.cdiv(columns, config.block_n)
