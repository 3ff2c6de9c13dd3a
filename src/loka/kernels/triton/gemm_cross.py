"""An FP8 GEMM on Hopper whose epilogue is the rest of a DCN-V2 cross layer, for serving.

    x' [M, N] = x_0 * (A8 [M, K] @ W8 [N, K]^T * scale_a * scale_w + b) + x      float32
    written in bfloat16, and as cast(x' / scale_out) in e4m3 where another layer reads it

The product itself is never in memory. K is short, the rank of a cross layer, so time is what x_0
and x read and x' written take: 7 bytes an element. Three things keep memory busy meanwhile:
programs of one multiprocessor that are at different places (`per_sm`), epilogues in `parts`, whose
tiles of x_0 and x leave shared memory for that, and asking for x_0 and x before a tile's products
begin: for its first part into registers (`ahead`), for all of it into the L2 cache (`prefetch`).
Twin: kernels/gemm_cross.py.

The interpreter's casts are wrong (tests/kernels/test_triton_quantize.py), NaN among them, so there
the kernel reads and writes float32 and the casts are torch's; all else is the same code.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from loka.core.chain import NOTHING
from loka.core.cross import Crossed
from loka.core.problem import round_up
from loka.core.recipe import Format
from loka.kernels.triton import gemm
from loka.kernels.triton.pack import INTERPRETED, inverse_of_power

_PROGRAMS_INTERPRETED = 3  # few, so that each has several tiles
_LINE = tl.constexpr(64)  # bfloat16 in a line of the L2 cache


@dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel is laid out; results do not depend on it beyond the order of float32 sums.

    Attributes:
        block_m, block_n, block_k: a tile. `block_n` is lowered to what N needs.
        stages, warps: of Triton's software pipeline.
        per_sm: programs on a multiprocessor.
        parts: 1, 2 or 4 pieces of a tile's columns, one after the other in the epilogue.
        flatten: the loops over tiles and over K are one pipeline.
        prefetch: asks for x_0 and x of a tile before its products.
        tma: x_0 and x through the tensor memory accelerator, which waits for one before it asks
            for the other; plain loads are both on their way at once, but take registers.
        ahead: loads x_0 and x of a part before the one before it is written, and of the first before
            the products. For plain loads without `flatten`.
        registers: of a thread, at most; None leaves it to the compiler.
        group: rows of tiles that are worked through together, for the L2 cache.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 128
    stages: int = 3
    warps: int = 8
    per_sm: int = 1
    parts: int = 2
    flatten: bool = False
    prefetch: bool = True
    tma: bool = True
    ahead: bool = False
    registers: int | None = None
    group: int = 8


@triton.jit
def _place(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """The row and column of a tile: GROUP rows of tiles at a time, column by column."""
    first = tile // (GROUP * tiles_n) * GROUP
    high = tl.minimum(tiles_m - first, GROUP)
    inside = tile % (GROUP * tiles_n)
    return first + inside % high, inside // high


@triton.jit
def _prefetch(ptr, row, column, rows, features, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile into the L2 cache, by one address a line; beyond its sides, the last that is there."""
    r = tl.minimum(row + tl.arange(0, BLOCK_M), rows - 1).to(tl.int64)
    c = tl.minimum(column + _LINE * tl.arange(0, BLOCK_N // _LINE), features - 1)
    place = (ptr + r[:, None] * stride + c[None, :]).to(tl.uint64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [place], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _take(
    source, row, column, rows, features, stride,
    BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A tile of x_0 or x, zeros beyond its sides."""
    if TMA:
        tile = source.load([row, column])
    else:
        r = row + tl.arange(0, BLOCK_M)
        c = column + tl.arange(0, WIDTH)
        place = source + r.to(tl.int64)[:, None] * stride + c[None, :]
        tile = tl.load(place, mask=(r < rows)[:, None] & (c < features)[None, :], other=0.0)
    return tile


@triton.jit
def _sides(
    x0, x, row, column, rows, features, x0_stride, x_stride,
    JOINT: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, TAKE: tl.constexpr,
):  # fmt: skip
    """A tile of x_0 and of x, which may be the same."""
    first = _take(x0, row, column, rows, features, x0_stride, BLOCK_M, WIDTH, TAKE)
    second = first
    if not JOINT:
        second = _take(x, row, column, rows, features, x_stride, BLOCK_M, WIDTH, TAKE)
    return first, second


@triton.jit
def _finish(
    acc, first, second, scale, by, bias_ptr, out, low, row, column, rows, features,
    BIAS: tl.constexpr, FP8: tl.constexpr, PADDED: tl.constexpr,
    HARDWARE: tl.constexpr, PUT: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Writes a tile, or a part of one, from its x_0 and x."""
    c = column + tl.arange(0, WIDTH)
    outer = acc * scale
    if BIAS:
        outer += tl.load(bias_ptr + c, mask=c < features, other=0.0).to(tl.float32)[None, :]
    value = first.to(tl.float32) * outer + second.to(tl.float32)
    kept = value
    if HARDWARE:
        kept = value.to(tl.bfloat16)
    if PUT:
        out.store([row, column], kept)
    else:
        r = row + tl.arange(0, BLOCK_M)
        place = out + r.to(tl.int64)[:, None] * features + c[None, :]
        tl.store(place, kept, mask=(r < rows)[:, None] & (c < features)[None, :])
    if FP8:
        # Infinity would saturate and hide; times zero it becomes NaN, which the cast keeps.
        scaled = (value * 0.0 + value) * by
        if PADDED:  # a row of A with NaN has NaN there
            scaled = tl.where((c < features)[None, :], scaled, 0.0)
        if HARDWARE:  # sm_90's only cast to e4m3 saturates and keeps NaN (cvt.rn.satfinite)
            scaled = scaled.to(tl.float8e4nv)
        low.store([row, column], scaled)


@triton.jit
def _halves(acc, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, WIDTH // 2)), (0, 2, 1)))


# Sizes equal to 1 would become constants, and ptxas miscompiles FP8 casts of the zeros that follow.
@triton.jit(do_not_specialize=["rows", "features"])
def _gemm_cross(
    a,
    w,
    bias_ptr,
    x0,
    x,
    x0_ptr,
    x_ptr,
    out,
    low,
    scale_a_ptr,
    scale_w_ptr,
    scale_out_ptr,
    rows,
    features,
    inner,
    x0_stride,
    x_stride,
    BIAS: tl.constexpr,
    JOINT: tl.constexpr,
    FP8: tl.constexpr,
    PADDED: tl.constexpr,
    FAST: tl.constexpr,
    HARDWARE: tl.constexpr,
    TAKE: tl.constexpr,
    PUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    FLATTEN: tl.constexpr,
    PREFETCH: tl.constexpr,
    AHEAD: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """A program takes every PROGRAMS-th tile. TAKE: x_0 and x by descriptors, PUT: x' by one."""
    if not PADDED:
        features = features // 16 * 16  # so the compiler knows, and masks whole vectors
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(features, BLOCK_N)
    scale = tl.load(scale_a_ptr) * tl.load(scale_w_ptr)
    by = 1.0
    if FP8:
        by = inverse_of_power(tl.load(scale_out_ptr))
    WIDTH: tl.constexpr = BLOCK_N // PARTS
    begin = tl.program_id(0)
    # Counted apart from the loop, so that in one pipeline the loads of the next tile need not wait
    # for the epilogue of this one.
    written = begin - PROGRAMS
    for tile in tl.range(begin, tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN):
        tile_m, tile_n = _place(tile, tiles_m, tiles_n, GROUP)
        if PREFETCH:
            _prefetch(x0_ptr, tile_m * BLOCK_M, tile_n * BLOCK_N, rows, features, x0_stride, BLOCK_M, BLOCK_N)
            if not JOINT:
                _prefetch(
                    x_ptr, tile_m * BLOCK_M, tile_n * BLOCK_N, rows, features, x_stride, BLOCK_M, BLOCK_N
                )
        if AHEAD:
            first, second = _sides(
                x0, x, tile_m * BLOCK_M, tile_n * BLOCK_N, rows, features, x0_stride, x_stride,
                JOINT, BLOCK_M, WIDTH, TAKE,
            )  # fmt: skip
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(tl.cdiv(inner, BLOCK_K)):
            left = a.load([tile_m * BLOCK_M, step * BLOCK_K])
            right = w.load([tile_n * BLOCK_N, step * BLOCK_K])
            if FAST:
                acc = tl.dot(left, right.T, acc)
            else:
                acc = tl.dot(left, right.T, acc, max_num_imprecise_acc=128)

        written += PROGRAMS
        tile_m, tile_n = _place(written, tiles_m, tiles_n, GROUP)
        row = tile_m * BLOCK_M
        column = tile_n * BLOCK_N
        if PARTS > 1:
            left_half, right_half = _halves(acc, BLOCK_M, BLOCK_N)
        for part in tl.static_range(PARTS):
            if PARTS == 1:
                piece = acc
            elif PARTS == 2:
                piece = right_half if part else left_half
            else:
                if part % 2 == 0:
                    even, odd = _halves(right_half if part else left_half, BLOCK_M, BLOCK_N // 2)
                piece = odd if part % 2 else even
            if AHEAD:
                here, there = first, second
                if part + 1 < PARTS:
                    first, second = _sides(
                        x0, x, row, column + (part + 1) * WIDTH, rows, features, x0_stride, x_stride,
                        JOINT, BLOCK_M, WIDTH, TAKE,
                    )  # fmt: skip
            else:
                here, there = _sides(
                    x0, x, row, column + part * WIDTH, rows, features, x0_stride, x_stride,
                    JOINT, BLOCK_M, WIDTH, TAKE,
                )  # fmt: skip
            _finish(
                piece, here, there, scale, by, bias_ptr, out, low, row, column + part * WIDTH, rows, features,
                BIAS, FP8, PADDED, HARDWARE, PUT, BLOCK_M, WIDTH,
            )  # fmt: skip


# The best of those that benchmarks/fused/cross.py races, at every batch size on an H200, whose multiprocessor
# has 227 KB of shared memory and 65536 registers: four programs of 4 warps have 128 each. Nothing spills.
FAST = {
    "four, ahead": Config(
        block_m=64, stages=2, warps=4, per_sm=4, parts=4, tma=False, ahead=True, registers=128
    ),
    "three": Config(block_m=64, stages=2, warps=4, per_sm=3),
}
EXACT = {"exact, three": Config(block_m=64, stages=2, warps=4, per_sm=3, parts=4, tma=False)}

# Of the GEMM before it, whose result is narrow and K long. Where that has few tiles it is not asked
# (kernels/gemm_cross.worth_casting).
CAST = gemm.Config(stages=3)


def choose(features: int, *, fast: bool) -> Config:
    """Plain loads are of single elements where the features are no multiple of 16."""
    if fast:
        return FAST["three" if features % 16 else "four, ahead"]
    return EXACT["exact, three"]


def gemm_cast_fused(
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: torch.Tensor,
    scale_w: torch.Tensor,
    *,
    scale_out: torch.Tensor,
    fast: bool = True,
    config: gemm.Config | None = None,
) -> torch.Tensor:
    """Twin: kernels/gemm_cross.gemm_cast. One launch, of triton/gemm.py's kernel."""
    if config is None:
        config = CAST if fast else gemm.EXACT
    return gemm.gemm_produce_fused(
        a, w, scale_a, scale_w, NOTHING, scale_out=scale_out, keep=False, fast=fast, config=config
    )[0]


def gemm_cross_fused(
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: torch.Tensor,
    scale_w: torch.Tensor,
    bias: torch.Tensor | None,
    x0: torch.Tensor,
    x: torch.Tensor,
    *,
    scale_out: torch.Tensor | None,
    fast: bool = True,
    config: Config | None = None,
) -> Crossed:
    """Twin: kernels/gemm_cross.gemm_cross, which checks the arguments. One launch. `config`: None chooses."""
    rows, features = x.shape
    if config is None:
        config = choose(features, fast=fast)
    low = scale_out is not None
    held = (torch.float32, torch.float32) if INTERPRETED else (torch.bfloat16, Format.E4M3.dtype)
    out = torch.empty(rows, features, dtype=held[0], device=x.device)
    row = torch.empty(rows, round_up(features, 16), dtype=held[1], device=x.device) if low else None
    if out.numel():
        # Triton launches on the current device, which need not be the operand's.
        with torch.cuda.device_of(a) if a.is_cuda else contextlib.nullcontext():
            _launch(a, w, out, row, scale_a, scale_w, scale_out, bias, x0, x, fast, config)
    if not INTERPRETED:
        return Crossed(hp=out, row=row)
    if row is not None:
        row = row.clamp(-Format.E4M3.max, Format.E4M3.max).to(Format.E4M3.dtype)
    return Crossed(hp=out.to(x.dtype), row=row)


def _launch(
    a: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    row: torch.Tensor | None,
    scale_a: torch.Tensor,
    scale_w: torch.Tensor,
    scale_out: torch.Tensor | None,
    bias: torch.Tensor | None,
    x0: torch.Tensor,
    x: torch.Tensor,
    fast: bool,
    config: Config,
) -> None:
    joint = x is x0
    take = config.tma and all(_describable(side) for side in (x0, x))
    put = out.shape[1] % 8 == 0
    if INTERPRETED:
        a, w, x0, x = a.float(), w.float(), x0.float(), x.float()
    rows, features = out.shape
    block_n = min(config.block_n, triton.next_power_of_2(max(features, 64)))
    programs = _PROGRAMS_INTERPRETED if INTERPRETED else config.per_sm * _multiprocessors(a.device)
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(features, block_n)
    part = [config.block_m, block_n // config.parts]

    def described(side: torch.Tensor, tile: list[int]) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(side, tile)

    _gemm_cross[(min(programs, tiles),)](
        described(a, [config.block_m, config.block_k]),
        described(w, [block_n, config.block_k]),
        scale_a if bias is None else bias,
        described(x0, part) if take else x0,
        described(x, part) if take else x,
        x0,
        x,
        described(out, part) if put else out,
        out if row is None else described(row, part),
        scale_a,
        scale_w,
        scale_a if scale_out is None else scale_out,
        rows,
        features,
        a.shape[1],
        x0.stride(0),
        x.stride(0),
        BIAS=bias is not None,
        JOINT=joint,
        FP8=row is not None,
        PADDED=features % 16 != 0,
        FAST=fast,
        HARDWARE=not INTERPRETED,
        TAKE=take,
        PUT=put,
        BLOCK_M=config.block_m,
        BLOCK_N=block_n,
        BLOCK_K=config.block_k,
        PARTS=config.parts,
        GROUP=config.group,
        FLATTEN=config.flatten,
        PREFETCH=config.prefetch and not INTERPRETED,
        AHEAD=config.ahead,
        PROGRAMS=programs,
        num_warps=config.warps,
        num_stages=config.stages,
        maxnreg=config.registers,
    )


def _describable(side: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator can read it: 16 bytes are 8 of its elements."""
    return side.stride(0) % 8 == 0 and side.data_ptr() % 16 == 0


@functools.lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
