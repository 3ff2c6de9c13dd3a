"""An FP8 GEMM on Hopper that normalizes, activates and casts its result before it writes it.

    Z [M, N] = A8 [M, K] @ W8 [N, K]^T * scale_a * scale_w     float32 accumulators
    out = cast(activation(BlockNorm(Z)) / scale)               the scale is known beforehand

A tile of the result is whole blocks of the norm wide, so a row's statistic never leaves the
tile, and Z itself is written only where backward will want it, in eight bits with
steps of each row and block (rounded.py). Twin: kernels/gemm/normed_gemm.py.

The epilogue costs what the tensor cores wait for it: 128 x 256 accumulators take 256 cycles for
one instruction an element, and their 512 products each 4096. So factors of a row (the norm, the
scales) are multiplied first and an element pays once; and epilogues overlap with products, by
two programs on a multiprocessor (`per_sm`) or by loads of the next tile (`flatten`). Warps that only
load (triton 3.6's warp_specialize) gave wrong rows with scales of rows on an H200; they are not offered.

The interpreter's casts are wrong (tests/kernels/quantize/test_triton_quantize.py), NaN among them, so there
the kernel reads and writes float32 and the casts are torch's; all else is the same code.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from loka.kernels.edge.triton.device import scale_above
from loka.kernels.gemm.epilogue import Activation, Epilogue, Normed, Rounded
from loka.kernels.gemm.triton.rounded import step_of, to_byte
from loka.kernels.triton.launch import cdiv, launch, launches_are_traced, launching_on
from loka.kernels.triton.pack import INTERPRETED, inverse_of_power, magnitude_bits
from loka.kernels.triton.processors import multiprocessors

_PROGRAMS_INTERPRETED = 3  # few, so that each has several tiles

_NONE, _HARD_SWISH, _RELU, _SWISH, _GELU = (tl.constexpr(i) for i in range(5))
_ACTIVATIONS = {
    Activation.NONE: _NONE,
    Activation.HARD_SWISH: _HARD_SWISH,
    Activation.RELU: _RELU,
    Activation.SWISH: _SWISH,
    Activation.GELU: _GELU,
}
_DTYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel is laid out; results do not depend on it beyond the order of float32 sums.

    Attributes:
        block_m, block_n, block_k: a tile. `block_n` is raised to the norm's block and lowered to N.
        stages, warps: of Triton's software pipeline.
        per_sm: programs on a multiprocessor.
        parts: 2 writes a tile in two halves of its columns, for half the shared memory.
        flatten: the loops over tiles and over K are one pipeline.
        group: rows of tiles that are worked through together, for the L2 cache.
        tma: tensor memory accelerator; without it plain loads and stores.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 128
    stages: int = 3
    warps: int = 8
    per_sm: int = 1
    parts: int = 1
    flatten: bool = True
    group: int = 8
    tma: bool = True


@triton.jit
def tile_place(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """The row and column of a tile: GROUP rows of tiles at a time, column by column."""
    first = tile // (GROUP * tiles_n) * GROUP
    high = tl.minimum(tiles_m - first, GROUP)
    inside = tile % (GROUP * tiles_n)
    return first + inside % high, inside // high


@triton.jit
def _load(source, row, column, rows, columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, TMA: tl.constexpr):
    """A tile of a row-major operand, zeros beyond its sides."""
    if TMA:
        tile = source.load([row, column])
    else:
        r = row + tl.arange(0, BLOCK_R)
        c = column + tl.arange(0, BLOCK_C)
        offsets = r.to(tl.int64)[:, None] * columns + c[None, :]
        tile = tl.load(source + offsets, mask=(r < rows)[:, None] & (c < columns)[None, :], other=0.0)
    return tile


@triton.jit
def _store(target, tile, row, column, rows, columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        target.store([row, column], tile)
    else:
        r = row + tl.arange(0, BLOCK_R)
        c = column + tl.arange(0, BLOCK_C)
        offsets = r.to(tl.int64)[:, None] * columns + c[None, :]
        tl.store(target + offsets, tile, mask=(r < rows)[:, None] & (c < columns)[None, :])


@triton.jit
def _normalize(
    acc,
    scale,
    EPS: tl.constexpr,
    VANISHING: tl.constexpr,
    inverse_ptr,
    steps_ptr,
    scales_ptr,
    row,
    column,
    rows,
    columns,
    KEEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of z = acc * scale, `scale` a number or one a row, in a tile that begins at `row` and `column`: writes
    1 / rms of every row and block, and where z is kept its steps and the result's scales. Returns what acc is
    multiplied by to be normalized, and to be counted in steps: as wide as `acc`, or 1. VANISHING: Epilogue.vanishing.

    The sum is of unscaled squares, which neither overflow nor vanish: e4m3 products lie in 2^-18 .. 2^18.
    """
    mean = _sum_of_blocks(acc * acc, BLOCK_M, WIDTH, BLOCK) * (1.0 / BLOCK) * scale * scale
    inverse = tl.rsqrt(mean + EPS)
    inverse = tl.where(inverse > 0.0, inverse, float("nan"))  # a mean that is infinite
    r = row + tl.arange(0, BLOCK_M)
    b = column // BLOCK + tl.arange(0, WIDTH // BLOCK)
    count = columns // BLOCK
    indices = r.to(tl.int64)[:, None] * count + b[None, :]
    there = (r < rows)[:, None] & (b < count)[None, :]
    factor = _widened(inverse * scale, BLOCK_M, WIDTH, BLOCK)
    parts = factor
    kept = inverse
    if KEEP:
        largest = _largest_of_blocks(tl.abs(acc), BLOCK_M, WIDTH, BLOCK)
        kept = tl.where((largest > 0.0) & (largest * scale * inverse <= VANISHING), 0.0, inverse)
        step = step_of(tl.where(inverse > 0.0, largest, float("nan")))
        tl.store(steps_ptr + indices, step * scale, mask=there)
        alone, _ = scale_above(magnitude_bits(largest * scale * kept))
        tl.store(scales_ptr + indices, alone, mask=there)
        parts = _widened(inverse_of_power(step), BLOCK_M, WIDTH, BLOCK)
    tl.store(inverse_ptr + indices, kept, mask=there)
    return factor, parts


@triton.jit
def _sum_of_blocks(values, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK_M, WIDTH / BLOCK] of a tile. One block is summed as it lies in registers."""
    if WIDTH == BLOCK:
        found = tl.sum(values, axis=1, keep_dims=True)
    else:
        found = tl.sum(tl.reshape(values, (BLOCK_M, WIDTH // BLOCK, BLOCK)), axis=2)
    return found


@triton.jit
def _largest_of_blocks(values, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    if WIDTH == BLOCK:
        found = tl.max(values, axis=1, keep_dims=True)
    else:
        found = tl.max(tl.reshape(values, (BLOCK_M, WIDTH // BLOCK, BLOCK)), axis=2)
    return found


@triton.jit
def _widened(values, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One of every block [BLOCK_M, WIDTH / BLOCK], as wide as a tile, or 1."""
    if WIDTH == BLOCK:
        wide = values
    else:
        wide = tl.broadcast_to(tl.expand_dims(values, 2), (BLOCK_M, WIDTH // BLOCK, BLOCK))
        wide = tl.reshape(wide, (BLOCK_M, WIDTH))
    return wide


@triton.jit
def _activated(acc, factor, inverse, ACTIVATION: tl.constexpr, HARDWARE: tl.constexpr):
    """activation(acc * factor) * inverse. Keeps NaN."""
    value = acc * (factor * inverse)
    if ACTIVATION == _HARD_SWISH:
        # One instruction an element, where add, minimum, maximum and multiply are four. It makes
        # NaN 0, and NaN * 0 is NaN.
        if HARDWARE:
            gate = tl.inline_asm_elementwise(
                "fma.rn.sat.f32 $0, $1, $2, 0f3F000000;",
                "=f,f,f",
                [acc, factor * (1.0 / 6.0)],
                dtype=tl.float32,
                is_pure=True,
                pack=1,
            )
        else:
            gate = tl.minimum(tl.maximum(acc * (factor * (1.0 / 6.0)) + 0.5, 0.0), 1.0)
        value = value * gate
    elif ACTIVATION == _RELU:
        value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == _SWISH:
        value = value / (1.0 + tl.exp(-(acc * factor)))
    elif ACTIVATION == _GELU:
        value = value * (0.5 + 0.5 * tl.erf(acc * (factor * 0.7071067811865476)))
    return value


@triton.jit
def _finish(
    acc,
    factor,
    parts,
    out,
    z,
    row,
    column,
    rows,
    columns,
    ACTIVATION: tl.constexpr,
    INVERSE: tl.constexpr,
    OUT: tl.constexpr,
    KEEP: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
    TMA: tl.constexpr,
):
    """Writes a tile, or half of one: the bytes of Z where kept, and the result."""
    if KEEP:
        _store(z, to_byte(acc, parts), row, column, rows, columns, BLOCK_M, WIDTH, TMA)
    value = _activated(acc, factor, INVERSE, ACTIVATION, HARDWARE)
    if HARDWARE:  # sm_90's only cast to e4m3 saturates and keeps NaN (cvt.rn.satfinite)
        value = value.to(OUT)
    _store(out, value, row, column, rows, columns, BLOCK_M, WIDTH, TMA)


@triton.jit
def _gemm(
    a,
    w,
    out,
    z,
    inverse_ptr,
    steps_ptr,
    scales_ptr,
    scale_a_ptr,
    scale_w_ptr,
    rows,
    columns,
    inner,
    EPS: tl.constexpr,
    VANISHING: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INVERSE: tl.constexpr,
    OUT: tl.constexpr,
    KEEP: tl.constexpr,
    ROWS: tl.constexpr,
    FAST: tl.constexpr,
    HARDWARE: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """A program takes every PROGRAMS-th tile. NORM: features a norm reduces over. INVERSE: 1 / the result's
    scale. OUT: its dtype. KEEP: whether Z is kept. ROWS: whether `scale_a` has one for each row."""
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    scale_w = tl.load(scale_w_ptr)
    begin = tl.program_id(0)
    # Counted apart from the loop, so that in one pipeline the loads of the next tile need not wait
    # for the epilogue of this one.
    written = begin - PROGRAMS
    for tile in tl.range(begin, tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN):
        tile_m, tile_n = tile_place(tile, tiles_m, tiles_n, GROUP)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(tl.cdiv(inner, BLOCK_K)):
            k = step * BLOCK_K
            left = _load(a, tile_m * BLOCK_M, k, rows, inner, BLOCK_M, BLOCK_K, TMA)
            right = _load(w, tile_n * BLOCK_N, k, columns, inner, BLOCK_N, BLOCK_K, TMA)
            if FAST:
                acc = tl.dot(left, right.T, acc)
            else:
                acc = tl.dot(left, right.T, acc, max_num_imprecise_acc=128)

        written += PROGRAMS
        tile_m, tile_n = tile_place(written, tiles_m, tiles_n, GROUP)
        row = tile_m * BLOCK_M
        column = tile_n * BLOCK_N
        if ROWS:
            r = row + tl.arange(0, BLOCK_M)
            scale = tl.load(scale_a_ptr + r, mask=r < rows, other=1.0)[:, None] * scale_w
        else:
            scale = tl.load(scale_a_ptr) * scale_w
        if PARTS == 1 or NORM == BLOCK_N:
            factor, parts = _normalize(
                acc, scale, EPS, VANISHING, inverse_ptr, steps_ptr, scales_ptr, row, column, rows, columns,
                KEEP, BLOCK_M, BLOCK_N, NORM,
            )  # fmt: skip
        if PARTS == 1:
            _finish(
                acc, factor, parts, out, z, row, column, rows, columns,
                ACTIVATION, INVERSE, OUT, KEEP, HARDWARE, BLOCK_M, BLOCK_N, TMA,
            )  # fmt: skip
        else:
            halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
            first, second = tl.split(halves)
            half = column + BLOCK_N // 2
            if NORM < BLOCK_N:
                factor, parts = _normalize(
                    first, scale, EPS, VANISHING, inverse_ptr, steps_ptr, scales_ptr, row, column, rows, columns,
                    KEEP, BLOCK_M, BLOCK_N // 2, NORM,
                )  # fmt: skip
            _finish(
                first, factor, parts, out, z, row, column, rows, columns,
                ACTIVATION, INVERSE, OUT, KEEP, HARDWARE, BLOCK_M, BLOCK_N // 2, TMA,
            )  # fmt: skip
            if NORM < BLOCK_N:
                factor, parts = _normalize(
                    second, scale, EPS, VANISHING, inverse_ptr, steps_ptr, scales_ptr, row, half, rows, columns,
                    KEEP, BLOCK_M, BLOCK_N // 2, NORM,
                )  # fmt: skip
            _finish(
                second, factor, parts, out, z, row, half, rows, columns,
                ACTIVATION, INVERSE, OUT, KEEP, HARDWARE, BLOCK_M, BLOCK_N // 2, TMA,
            )  # fmt: skip


# What is worth a race (`loka_gemms` in benchmarks/README.md). Shared memory of an H200 is 227 KB: a stage
# of 128 x 256 x 128 takes 48 KB and half a tile of Z 32 KB. Nothing spills registers (triton
# 3.6) but GELU under the last two.
CONFIGS = {
    "one pipeline": Config(stages=3, parts=2),
    "whole": Config(stages=3),
    "low": Config(block_m=64, stages=4, warps=4, flatten=False),
    "low, in halves": Config(block_m=64, stages=4, warps=4, parts=2),
    "short sums": Config(block_m=64, block_k=64, stages=4, warps=4, per_sm=2, parts=2),
}
# Terms: with Z two programs take 0.89 to 0.96 of one's time up to 256, 0.98 at 384, 1.03 at 512. Results in 16 bits
# take 0.92 to 1.05 up to 384, the most where they are 256 wide.
_SHORT = 384
_MANY = 4096  # rows, where their number is a symbol
EXACT = Config(block_n=128, stages=3)
EXACT_WIDE = Config(block_m=64, stages=3, parts=2)


def choose(*, rows: int, columns: int, inner: int, epilogue: Epilogue, fast: bool, keep: bool) -> Config:
    """The configuration for a problem, as raced on an H200 (`loka_gemms` in benchmarks/README.md).

    Exact accumulation needs registers for a second tile. Large tiles want one for nearly every
    multiprocessor, and with Z besides they do not fit whole into shared memory. An epilogue waits for itself, Z's most
    of all: behind few products two programs that take turns are faster.
    """
    if not fast:
        return EXACT if epilogue.block <= EXACT.block_n else EXACT_WIDE
    if triton.cdiv(rows, 128) * triton.cdiv(columns, 256) < 100:
        return CONFIGS["low, in halves" if keep else "low"]
    if keep and inner <= _SHORT and epilogue.dtype.itemsize == 1:
        return CONFIGS["short sums"]
    return CONFIGS["one pipeline" if keep else "whole"]


def gemm_normed_fused(
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: torch.Tensor,
    scale_w: torch.Tensor,
    epilogue: Epilogue,
    *,
    keep: bool,
    fast: bool = True,
    config: Config | None = None,
) -> Normed:
    """Arguments and what is legal: kernels/gemm/normed_gemm.py, which checks them. `config`: None chooses."""
    rows, columns = a.shape[0], w.shape[0]
    if config is None:
        known = rows if isinstance(rows, int) else _MANY
        config = choose(rows=known, columns=columns, inner=a.shape[1], epilogue=epilogue, fast=fast, keep=keep)
        if launches_are_traced():  # a file that runs without LoKA makes no descriptors for the accelerator of loads
            config = replace(config, tma=False, flatten=False, parts=2)
    held = torch.float32 if INTERPRETED else epilogue.dtype
    out = torch.empty(rows, columns, dtype=held, device=a.device)
    inverse = torch.empty(rows, columns // epilogue.block, dtype=torch.float32, device=a.device)
    z = None
    if keep:
        values = torch.empty(rows, columns, dtype=torch.uint8, device=a.device)
        z = Rounded(values, torch.empty_like(inverse), torch.empty_like(inverse))
    if INTERPRETED:
        a, w = a.float(), w.float()
    if out.numel():
        # Triton launches on the current device, which need not be the operand's.
        with launching_on(a):
            _launch(a, w, out, inverse, z, scale_a, scale_w, epilogue, fast, config)
    if INTERPRETED:
        out = out.to(epilogue.dtype)
    return Normed(out, inverse, z)


def _launch(
    a: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    inverse: torch.Tensor,
    z: Rounded | None,
    scale_a: torch.Tensor,
    scale_w: torch.Tensor,
    epilogue: Epilogue,
    fast: bool,
    config: Config,
) -> None:
    norm = epilogue.block
    block_n = max(norm, min(config.block_n, triton.next_power_of_2(max(out.shape[1], 64))))
    programs = _PROGRAMS_INTERPRETED if INTERPRETED else config.per_sm * multiprocessors(a.device)
    tiles = cdiv(out.shape[0], config.block_m) * cdiv(out.shape[1], block_n)
    operands: list[Any] = [a, w, out, z.values if z is not None else out]
    if config.tma:
        part = (config.block_m, block_n // config.parts)
        tiling = ((config.block_m, config.block_k), (block_n, config.block_k), part, part)
        operands = [
            TensorDescriptor.from_tensor(operand, list(tile)) for operand, tile in zip(operands, tiling, strict=True)
        ]
    constants = {
        "EPS": epilogue.eps,
        "VANISHING": epilogue.vanishing,
        "NORM": norm,
        "ACTIVATION": _ACTIVATIONS[epilogue.activation].value,
        "INVERSE": 1.0 / epilogue.scale,
        "OUT": _DTYPES[epilogue.dtype],
        "KEEP": z is not None,
        "ROWS": scale_a.numel() > 1,
        "FAST": fast,
        "HARDWARE": not INTERPRETED,
        "TMA": config.tma,
        "BLOCK_M": config.block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": config.block_k,
        "PARTS": config.parts,
        "GROUP": config.group,
        "FLATTEN": config.flatten,
        "PROGRAMS": programs,
    }
    kept = (z.steps, z.scales) if z is not None else (inverse, inverse)
    arguments = (*operands, inverse, *kept, scale_a, scale_w, *out.shape, a.shape[1])
    grid = (torch.sym_min(programs, tiles), 1)
    launch(_gemm, grid, arguments, constants, num_warps=config.warps, num_stages=config.stages)
