"""A cross layer behind an FP8 GEMM, in its epilogue, and the scale of the rows that it writes.

Twins and formulas: kernels/gemm/cross.py. With the 512 terms of low-rank layers the memory's speed bounds it:
seven bytes an element are read and written beside 1,024 products. Small tiles, of which three lie on a
multiprocessor at a time, overlap one's epilogue with another's products better than one pipeline over large ones does
(H200, docs/log.md, 2026-11-28); so do the accelerator's loads of p and r, which need no registers.

The interpreter's casts are wrong (tests/kernels/quantize/test_triton_quantize.py), so there the kernel reads and
writes float32 and the casts are torch's; all else is the same code.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from loka.kernels.edge.twin import E4M3_MAX, SCALE_CARRY, SCALE_EXPONENT, SCALE_LEAST
from loka.kernels.gemm.cross import LARGEST, SLACK, Crossed
from loka.kernels.gemm.triton.gemm import load_tile, store_tile, tile_place
from loka.kernels.triton.launch import cdiv, launch, launches_are_traced, launching_on
from loka.kernels.triton.pack import INTERPRETED, inverse_of_power, magnitude_bits
from loka.kernels.triton.processors import multiprocessors

_CARRY, _EXPONENT, _LEAST = (tl.constexpr(each) for each in (SCALE_CARRY, SCALE_EXPONENT, SCALE_LEAST))
_NONE, _OWN, _SAME = (tl.constexpr(each) for each in range(3))  # what is added: nothing, r, or p itself


@dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel is laid out; results do not depend on it beyond the order of float32 sums.

    Attributes:
        block_m, block_n, block_k: a tile.
        stages, warps: of Triton's software pipeline.
        group: rows of tiles that are worked through together, for the L2 cache.
        tma: tensor memory accelerator; without it plain loads and stores.
    """

    block_m: int = 64
    block_n: int = 128
    block_k: int = 128
    stages: int = 3
    warps: int = 4
    group: int = 8
    tma: bool = True


CONFIGS = {"wide": Config(), "narrow": Config(block_n=64)}
_FEW = 2  # tiles for each multiprocessor, up to which narrow ones are faster (16.9 for 18.6 us at 3 x 512 x 3,456)
_BOUND_ROWS, _BOUND_COLUMNS = 4, 1024


@triton.jit
def _crossed(
    a,
    w,
    p,
    r,
    x,
    out,
    scale_a_ptr,
    scale_w_ptr,
    bias_ptr,
    scale_ptr,
    rows,
    columns,
    inner,
    BIAS: tl.constexpr,
    ADDED: tl.constexpr,
    KEEP: tl.constexpr,
    FAST: tl.constexpr,
    HARDWARE: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A program has one tile."""
    tile_m, tile_n = tile_place(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N), GROUP)
    row = tile_m * BLOCK_M
    column = tile_n * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(tl.cdiv(inner, BLOCK_K)):
        k = step * BLOCK_K
        left = load_tile(a, row, k, rows, inner, BLOCK_M, BLOCK_K, TMA)
        right = load_tile(w, column, k, columns, inner, BLOCK_N, BLOCK_K, TMA)
        if FAST:
            acc = tl.dot(left, right.T, acc)
        else:
            acc = tl.dot(left, right.T, acc, max_num_imprecise_acc=128)
    i = row + tl.arange(0, BLOCK_M)
    j = column + tl.arange(0, BLOCK_N)
    scale = tl.load(scale_a_ptr + i, mask=i < rows, other=1.0) * tl.load(scale_w_ptr)
    inverse = inverse_of_power(tl.load(scale_ptr + i, mask=i < rows, other=1.0))
    value = acc * scale[:, None]
    if BIAS:
        value += tl.load(bias_ptr + j, mask=j < columns, other=0.0).to(tl.float32)[None, :]
    factor = load_tile(p, row, column, rows, columns, BLOCK_M, BLOCK_N, TMA).to(tl.float32)
    value = value * factor
    if ADDED == _SAME:
        value += factor
    elif ADDED == _OWN:
        value += load_tile(r, row, column, rows, columns, BLOCK_M, BLOCK_N, TMA).to(tl.float32)
    if KEEP:
        kept = value
        if HARDWARE:
            kept = kept.to(tl.bfloat16)
        store_tile(x, kept, row, column, rows, columns, BLOCK_M, BLOCK_N, TMA)
    low = tl.where(tl.abs(value) < float("inf"), value * inverse[:, None], float("nan"))
    if HARDWARE:  # sm_90's only cast to e4m3 saturates and keeps NaN (cvt.rn.satfinite)
        low = low.to(tl.float8e4nv)
    store_tile(out, low, row, column, rows, columns, BLOCK_M, BLOCK_N, TMA)


@triton.jit
def _row_bound(
    a_ptr,
    scale_a_ptr,
    longest_ptr,
    bias_ptr,
    scale_p_ptr,
    scale_r_ptr,
    out_ptr,
    rows,
    inner,
    columns,
    MAX: tl.constexpr,
    SLACK: tl.constexpr,
    LARGEST: tl.constexpr,
    BIAS: tl.constexpr,
    ADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """ROWS rows a program."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, COLUMNS)
    squares = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for begin in range(0, inner, COLUMNS):
        inside = (i < rows)[:, None] & (begin + j < inner)[None, :]
        part = tl.load(a_ptr + i.to(tl.int64)[:, None] * inner + (begin + j)[None, :], mask=inside, other=0.0)
        part = part.to(tl.float32)
        squares += part * part
    largest = tl.sqrt(tl.sum(squares, axis=1)) * tl.load(scale_a_ptr + i, mask=i < rows, other=1.0)
    largest = largest * tl.load(longest_ptr)
    if BIAS:
        bits = tl.zeros((COLUMNS,), dtype=tl.int32)
        for begin in range(0, columns, COLUMNS):
            part = tl.load(bias_ptr + begin + j, mask=begin + j < columns, other=0.0).to(tl.float32)
            bits = tl.maximum(bits, magnitude_bits(part))  # NaN lies above infinity
        largest += tl.max(bits, axis=0).to(tl.float32, bitcast=True)
    bound = MAX * tl.load(scale_p_ptr + i, mask=i < rows, other=1.0) * largest
    if ADDED:
        bound += MAX * tl.load(scale_r_ptr + i, mask=i < rows, other=1.0)
    bound = bound * SLACK
    bits = tl.where(bound > LARGEST, LARGEST, bound).to(tl.int32, bitcast=True)  # NaN is no larger
    power = tl.maximum(((bits + _CARRY) & 0x7F800000) - _EXPONENT, _LEAST).to(tl.float32, bitcast=True)
    tl.store(out_ptr + i, tl.where(bound == bound, power, float("nan")), mask=i < rows)


def row_bound_fused(
    a: torch.Tensor,
    scale_a: torch.Tensor,
    longest: torch.Tensor,
    bias: torch.Tensor | None,
    scale_p: torch.Tensor,
    scale_r: torch.Tensor | None,
) -> torch.Tensor:
    """Arguments: kernels/gemm/crossed_gemm.py."""
    rows, inner = a.shape
    out = torch.empty(rows, 1, dtype=torch.float32, device=a.device)
    held = a.float() if INTERPRETED else a
    constants = {
        "MAX": E4M3_MAX,
        "SLACK": SLACK,
        "LARGEST": LARGEST,
        "BIAS": bias is not None,
        "ADDED": scale_r is not None,
        "ROWS": _BOUND_ROWS,
        "COLUMNS": min(_BOUND_COLUMNS, triton.next_power_of_2(inner)),
    }
    biases, added = longest if bias is None else bias, scale_p if scale_r is None else scale_r
    sizes = rows, inner, 0 if bias is None else bias.shape[0]
    arguments = (held, scale_a, longest, biases, scale_p, added, out, *sizes)
    if out.numel():
        with launching_on(a):
            launch(_row_bound, (cdiv(rows, _BOUND_ROWS), 1), arguments, constants)
    return out


def choose(*, rows: int | torch.SymInt, columns: int, processors: int) -> Config:
    """As raced on an H200. A file that runs without LoKA makes no descriptors for the accelerator of loads."""
    wide = CONFIGS["wide"]
    few = isinstance(rows, int) and cdiv(rows, wide.block_m) * cdiv(columns, wide.block_n) <= _FEW * processors
    config = CONFIGS["narrow"] if few else wide
    return replace(config, tma=False) if launches_are_traced() else config


def gemm_crossed_fused(
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: torch.Tensor,
    scale_w: torch.Tensor,
    bias: torch.Tensor | None,
    p: torch.Tensor,
    r: torch.Tensor | None,
    scale: torch.Tensor,
    *,
    keep: bool,
    fast: bool = True,
    config: Config | None = None,
) -> Crossed:
    """Arguments and what is legal: kernels/gemm/crossed_gemm.py, which checks them. `config`: None chooses."""
    (rows, inner), columns = a.shape, w.shape[0]
    if config is None:
        processors = 1 if INTERPRETED else multiprocessors(a.device)
        config = choose(rows=rows, columns=columns, processors=processors)
    low, high = (torch.float32, torch.float32) if INTERPRETED else (a.dtype, p.dtype)
    out = torch.empty(rows, columns, dtype=low, device=a.device)
    x = torch.empty(rows, columns, dtype=high, device=a.device) if keep else None
    if INTERPRETED:
        a, w = a.float(), w.float()
    operands: list[Any] = [a, w, p, p if r is None else r, out if x is None else x, out]
    if config.tma and rows:
        part = [config.block_m, config.block_n]
        tiling = [[config.block_m, config.block_k], [config.block_n, config.block_k], part, part, part, part]
        operands = [TensorDescriptor.from_tensor(each, tile) for each, tile in zip(operands, tiling, strict=True)]
    constants = {
        "BIAS": bias is not None,
        "ADDED": (_NONE if r is None else _SAME if r is p else _OWN).value,
        "KEEP": keep,
        "FAST": fast,
        "HARDWARE": not INTERPRETED,
        "TMA": config.tma,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP": config.group,
    }
    arguments = (*operands, scale_a, scale_w, scale if bias is None else bias, scale, rows, columns, inner)
    grid = (cdiv(rows, config.block_m) * cdiv(columns, config.block_n), 1)
    if out.numel():
        with launching_on(a):
            launch(_crossed, grid, arguments, constants, num_warps=config.warps, num_stages=config.stages)
    if INTERPRETED:
        return Crossed(None if x is None else x.to(p.dtype), out.to(torch.float8_e4m3fn))
    return Crossed(x, out)
