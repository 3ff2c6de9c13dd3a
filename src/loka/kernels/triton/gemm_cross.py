"""An FP8 GEMM on Hopper whose epilogue is the rest of a DCN-V2 cross layer, for serving.

    x' [M, N] = x_0 * (A8 [M, K] @ W8 [N, K]^T * scale_a * scale_w + b) + x      float32
    written in bfloat16, and as cast(x' / scale_out) in e4m3 where another layer reads it

The product itself is never in memory. K is short, the rank of a cross layer, so time goes into
bytes: 7 an element of x_0, x and x' from and to memory, and what the L2 cache has to hand to the
multiprocessors, which is more. A program therefore keeps its columns of W in shared memory and goes
down the rows, with the next tiles of A, x_0 and x on their way. A tile is not divided along K, which
bounds K (kernels/gemm_cross.LONGEST).
Twin: kernels/gemm_cross.py.

The interpreter's casts are wrong (tests/kernels/test_triton_quantize.py), NaN among them, so there
the kernel reads and writes float32 and the casts are torch's; all else is the same code.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from loka.core.cross import Crossed
from loka.core.problem import round_up
from loka.core.recipe import Format
from loka.kernels.triton.pack import INTERPRETED, inverse_of_power
from loka.kernels.triton.processors import multiprocessors

_PROGRAMS_INTERPRETED = 3  # few, so that each has several tiles


@dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel is laid out; results do not depend on it beyond the order of float32 sums.

    Attributes:
        block_m, block_n: a tile; `block_n` is lowered to what N needs.
        stages: tiles of A, x_0 and x that are on their way at once, in shared memory; with 1, those of a
            tile are asked for when it begins. Lowered to what fits.
        warps: of a program.
        per_sm: programs on a multiprocessor.
    """

    block_m: int = 64
    block_n: int = 64
    stages: int = 3
    warps: int = 4
    per_sm: int = 1


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
def _put(
    target, row, column, rows, features, tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Writes what of a tile lies inside. Not by a descriptor: a program would wait until it is written."""
    r = row + tl.arange(0, BLOCK_M)
    c = column + tl.arange(0, BLOCK_N)
    place = target + r.to(tl.int64)[:, None] * features + c[None, :]
    tl.store(place, tile, mask=(r < rows)[:, None] & (c < features)[None, :])


@triton.jit
def _shares(rows, features, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """What is this program's: numbers begin .. end of tiles, counted down columns of `height` tiles whose
    first one is row `top`; of a column every `step`-th.

    As many programs as divide by the columns have one column each, and share its upper rows in turns.
    The lower rows, as many as leave all programs an equal share, go to the programs that are left over.
    """
    tiles_m = tl.cdiv(rows, BLOCK_M)
    columns = tl.cdiv(features, BLOCK_N)
    lanes = tl.num_programs(0) // columns
    share = tl.cdiv(tiles_m.to(tl.int64) * columns, tl.num_programs(0)).to(tl.int32)
    upper = tl.minimum(tiles_m, lanes * share)
    lower = tl.maximum(tiles_m - upper, 1)  # a height has to be one; without lower rows no one is left over
    program = tl.program_id(0)
    begin = program % columns * upper + program // columns
    end = (program % columns + 1) * upper
    height, top, step = upper, 0, lanes
    if program >= lanes * columns:
        left = tl.num_programs(0) - lanes * columns
        tiles = (tiles_m - upper).to(tl.int64) * columns
        begin = (tiles * (program - lanes * columns) // left).to(tl.int32)
        end = (tiles * (program - lanes * columns + 1) // left).to(tl.int32)
        height, top, step = lower, upper, 1
    return begin, end, height, top, step


# Sizes equal to 1 would become constants, and ptxas miscompiles FP8 casts of the zeros that follow.
@triton.jit(do_not_specialize=["rows", "features"])
def _gemm_cross(
    a,
    w,
    bias_ptr,
    x0,
    x,
    out,
    low,
    scale_a_ptr,
    scale_w_ptr,
    scale_out_ptr,
    rows,
    features,
    x0_stride,
    x_stride,
    BIAS: tl.constexpr,
    JOINT: tl.constexpr,
    KEEP: tl.constexpr,
    FP8: tl.constexpr,
    PADDED: tl.constexpr,
    FAST: tl.constexpr,
    HARDWARE: tl.constexpr,
    TAKE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program has a column of tiles, and every so many of its rows (`_shares`).

    Programs of all columns go down the rows together, so that rows are read and written whole.
    TAKE: x_0 and x by descriptors.
    """
    if not PADDED:
        features = features // 16 * 16  # so the compiler knows, and masks whole vectors
    wide = (features + 15) // 16 * 16  # with the padding of what is in FP8
    scale = tl.load(scale_a_ptr) * tl.load(scale_w_ptr)
    if FP8:
        by = inverse_of_power(tl.load(scale_out_ptr))
    begin, end, height, top, step = _shares(rows, features, BLOCK_M, BLOCK_N)
    for tile_n in tl.range(begin // height, tl.cdiv(end, height), num_stages=1):
        column = tile_n * BLOCK_N
        c = column + tl.arange(0, BLOCK_N)
        right = w.load([column, 0]).T
        EXACT: tl.constexpr = min(128, right.shape[0])
        if BIAS:
            bias = tl.load(bias_ptr + c, mask=c < features, other=0.0).to(tl.float32)
        first_m = top + tl.maximum(begin - tile_n * height, 0)
        last_m = top + tl.minimum(end - tile_n * height, height)
        for tile_m in tl.range(first_m, last_m, step, num_stages=STAGES):
            row = tile_m * BLOCK_M
            left = a.load([row, 0])
            first = _take(x0, row, column, rows, features, x0_stride, BLOCK_M, BLOCK_N, TAKE)
            second = first
            if not JOINT:
                second = _take(x, row, column, rows, features, x_stride, BLOCK_M, BLOCK_N, TAKE)
            outer = (
                tl.dot(left, right) if FAST else tl.dot(left, right, max_num_imprecise_acc=EXACT)
            ) * scale
            if BIAS:
                outer += bias[None, :]
            value = first.to(tl.float32) * outer + second.to(tl.float32)
            if KEEP:
                kept = value.to(tl.bfloat16) if HARDWARE else value
                _put(out, row, column, rows, features, kept, BLOCK_M, BLOCK_N)
            if FP8:
                # Infinity would saturate and hide; times zero it becomes NaN, which the cast keeps.
                scaled = (value * 0.0 + value) * by
                if PADDED:  # a row of A with NaN has NaN there
                    scaled = tl.where((c < features)[None, :], scaled, 0.0)
                if HARDWARE:  # sm_90's only cast to e4m3 saturates and keeps NaN (cvt.rn.satfinite)
                    scaled = scaled.to(tl.float8e4nv)
                _put(low, row, column, rows, wide, scaled, BLOCK_M, BLOCK_N)


BEST = Config()  # the best of those that benchmarks/fused/cross.py races on an H200, at every batch size

_SHARED = 200 * 1024  # bytes of shared memory for W and stages, of 227 on sm_90; results take the rest


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
    keep: bool = True,
    fast: bool = True,
    config: Config | None = None,
) -> Crossed:
    """Twin: kernels/gemm_cross.gemm_cross, which checks the arguments. One launch. `config`: None chooses."""
    rows, features = x.shape
    if config is None:
        config = BEST
    low = scale_out is not None
    held = (torch.float32, torch.float32) if INTERPRETED else (torch.bfloat16, Format.E4M3.dtype)
    out = torch.empty(rows, features, dtype=held[0], device=x.device) if keep else None
    row = torch.empty(rows, round_up(features, 16), dtype=held[1], device=x.device) if low else None
    if x.numel():
        # Triton launches on the current device, which need not be the operand's.
        with torch.cuda.device_of(a) if a.is_cuda else contextlib.nullcontext():
            _launch(a, w, out, row, scale_a, scale_w, scale_out, bias, x0, x, fast, config)
    if INTERPRETED:
        out = None if out is None else out.to(x.dtype)
        row = None if row is None else row.clamp(-Format.E4M3.max, Format.E4M3.max).to(Format.E4M3.dtype)
    return Crossed(hp=out, row=row)


def _launch(
    a: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor | None,
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
    rows, features = x.shape
    take = all(_describable(side) for side in (x0, x))
    if INTERPRETED:
        a, w, x0, x = a.float(), w.float(), x0.float(), x.float()
    inner = max(triton.next_power_of_2(a.shape[1]), 32)  # the shortest that a product takes
    block_n = min(config.block_n, triton.next_power_of_2(max(features, 64)))
    programs = _PROGRAMS_INTERPRETED if INTERPRETED else config.per_sm * multiprocessors(a.device)
    columns = triton.cdiv(features, block_n)
    programs = max(columns, min(programs, columns * triton.cdiv(rows, config.block_m)))
    tile = [config.block_m, block_n]

    def described(side: torch.Tensor, tile: list[int]) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(side, tile)

    _gemm_cross[(programs,)](
        described(a, [config.block_m, inner]),
        described(w, [block_n, inner]),
        scale_a if bias is None else bias,
        described(x0, tile) if take else x0,
        described(x, tile) if take else x,
        out,
        row,
        scale_a,
        scale_w,
        scale_a if scale_out is None else scale_out,
        rows,
        features,
        x0.stride(0),
        x.stride(0),
        BIAS=bias is not None,
        JOINT=joint,
        KEEP=out is not None,
        FP8=row is not None,
        PADDED=features % 16 != 0,
        FAST=fast,
        HARDWARE=not INTERPRETED,
        TAKE=take,
        BLOCK_M=config.block_m,
        BLOCK_N=block_n,
        STAGES=_stages(config, block_n, inner),
        num_warps=config.warps,
        num_stages=1,
    )


def _stages(config: Config, block_n: int, inner: int) -> int:
    weights, stage = block_n * inner, config.block_m * (inner + 2 * 2 * block_n)
    return max(1, min(config.stages, (_SHARED - weights) // stage))


def _describable(side: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator can read it: 16 bytes are 8 of its elements."""
    return side.stride(0) % 8 == 0 and side.data_ptr() % 16 == 0
