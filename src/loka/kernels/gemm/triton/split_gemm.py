"""An FP8 GEMM whose long K is cut into pieces for all multiprocessors at once.

    P_c [tile] = sum over the steps of K in chunk c of A8 [M, K] @ B8 [N, K]^T      float32
    out [M, N] = cast(scale_a * scale_b * sum over c of P_c)

The weight gradient of a narrow layer has few tiles and a very long K, the batch: 512 x 512 is 8
tiles of 128 x 256 for 132 multiprocessors. A step is one tile's share of `block_k` columns of K.
Chunks of steps are cut in two ways (`cut`):

* uniform: a tile has as many programs as fit, and program s of S takes steps s, s + S, ... So
  they read neighbouring columns at the same time, where ranges of K of their own would spread reads
  over rows 64 KB apart; and each is free of a remainder longer than a step.
* even: where tiles do not divide the programs, all steps of all tiles form one row that is cut into
  equal ranges, one a program, wherever tiles end. A program whose range meets two tiles has two parts.

Sums do not depend on timing: partial sums go to a workspace, and a second launch adds those of a
tile in order. Where a tile has one program that launch is not needed. The price of a partial sum is
4 bytes an element written and read, mostly in the L2 cache.

The interpreter's casts are wrong (tests/kernels/quantize/test_triton_quantize.py), so there the kernels
read and write float32 and the casts are torch's; all else is the same code.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from loka.kernels.triton.launch import launching_on
from loka.kernels.triton.pack import INTERPRETED
from loka.kernels.triton.processors import multiprocessors

_PROCESSORS_INTERPRETED = 5  # few, so that small problems are cut in both ways

_FULL = 0.9  # of the multiprocessors busy in the last round: what an even cut would not repay
_SHORTEST = 4  # steps: a tile's partial sums are as many bytes as two steps of its operands
# Elements that a program of the second launch adds up: few, as many programs wait for memory at once. With 1,024 an
# H200 took 6 to 22 us longer for two to four tiles (docs/log.md, 2026-11-29).
_REDUCED = 4096 if INTERPRETED else 256


@dataclass(frozen=True, kw_only=True)
class Config:
    """How a problem is laid out; results do not depend on it beyond the order of float32 sums.

    Attributes:
        block_m, block_n, block_k: a tile, and a step.
        stages, warps: of Triton's software pipeline.
        per_sm: programs on a multiprocessor.
        parts: 2 writes partial sums in two halves of a tile's columns, for half the shared memory.
        interleave: the programs of a tile take turns along K; otherwise each has a range of it.
        splits: programs of a tile; 0 cuts evenly, wherever tiles end; None leaves it to `cut`.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 128
    stages: int = 3
    warps: int = 8
    per_sm: int = 1
    parts: int = 2
    interleave: bool = True
    splits: int | None = None


@triton.jit
def _segment(
    a,
    b,
    target,
    scale_a_ptr,
    scale_b_ptr,
    tile,
    first,
    stride,
    count,
    slot,
    rows,
    columns,
    FAST: tl.constexpr,
    DIRECT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
):
    """`count` steps of a tile, every stride-th from `first`, and where their sum goes."""
    tiles_n = tl.cdiv(columns, BLOCK_N)
    row = tile // tiles_n * BLOCK_M
    column = tile % tiles_n * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(count):
        k = (first + step * stride) * BLOCK_K
        left = a.load([row, k])
        right = b.load([column, k])
        if FAST:
            acc = tl.dot(left, right.T, acc)
        else:
            acc = tl.dot(left, right.T, acc, max_num_imprecise_acc=128)
    if DIRECT:
        value = acc * (tl.load(scale_a_ptr) * tl.load(scale_b_ptr))
        target += row.to(tl.int64) * columns + column
        r = tl.arange(0, BLOCK_M)
        c = tl.arange(0, BLOCK_N)
        inside = (r < rows - row)[:, None] & (c < columns - column)[None, :]
        place = r[:, None] * columns + c[None, :]
        tl.store(target + place, value.to(target.dtype.element_ty), mask=inside)
    elif PARTS == 1:
        target.store([slot * BLOCK_M, 0], acc)
    else:
        halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
        low, high = tl.split(halves)
        target.store([slot * BLOCK_M, 0], low)
        target.store([slot * BLOCK_M, BLOCK_N // 2], high)


@triton.jit(do_not_specialize=["chunks", "splits"])  # else compiled anew for 1, 16 and the rest
def _multiply(
    a,
    b,
    target,
    scale_a_ptr,
    scale_b_ptr,
    rows,
    columns,
    inner,
    chunks,
    splits,
    FAST: tl.constexpr,
    TURNS: tl.constexpr,
    DIRECT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A program takes a chunk. TURNS: `splits` programs of a tile take turns; otherwise ranges.

    Tile t's part of chunk c is slot c + t of the workspace, for ranges: c, t or both grow from one
    part to the next, so no two meet.
    """
    chunk = tl.program_id(0)
    steps = tl.cdiv(inner, BLOCK_K)
    if TURNS:
        first = chunk % splits
        _segment(
            a, b, target, scale_a_ptr, scale_b_ptr,
            chunk // splits, first, splits, tl.cdiv(steps - first, splits), chunk, rows, columns,
            FAST, DIRECT, BLOCK_M, BLOCK_N, BLOCK_K, PARTS,
        )  # fmt: skip
    else:
        units = tl.cdiv(rows, BLOCK_M) * tl.cdiv(columns, BLOCK_N) * steps
        begin = chunk * (units // chunks) + tl.minimum(chunk, units % chunks)
        end = (chunk + 1) * (units // chunks) + tl.minimum(chunk + 1, units % chunks)
        for tile in range(begin // steps, (end - 1) // steps + 1):
            first = tl.maximum(begin - tile * steps, 0)
            last = tl.minimum(end - tile * steps, steps)
            _segment(
                a, b, target, scale_a_ptr, scale_b_ptr,
                tile, first, 1, last - first, chunk + tile, rows, columns,
                FAST, DIRECT, BLOCK_M, BLOCK_N, BLOCK_K, PARTS,
            )  # fmt: skip


@triton.jit
def _chunk_of(unit, each, longer):
    """The chunk that holds a unit, where the first `longer` chunks have one more than `each`."""
    return tl.where(unit < longer * (each + 1), unit // (each + 1), longer + (unit - longer * (each + 1)) // each)


@triton.jit(do_not_specialize=["chunks", "splits"])
def _add_up(
    partials_ptr,
    out_ptr,
    scale_a_ptr,
    scale_b_ptr,
    rows,
    columns,
    inner,
    chunks,
    splits,
    TURNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """A program adds the partial sums of ROWS rows of a tile in the order of chunks, AT_ONCE in flight."""
    tiles_n = tl.cdiv(columns, BLOCK_N)
    tile = tl.program_id(0) // (BLOCK_M // ROWS)
    inner_row = tl.program_id(0) % (BLOCK_M // ROWS) * ROWS
    if TURNS:
        slot = tile * splits
        end = slot + splits
    else:
        steps = tl.cdiv(inner, BLOCK_K)
        units = tl.cdiv(rows, BLOCK_M) * tiles_n * steps
        slot = _chunk_of(tile * steps, units // chunks, units % chunks) + tile
        end = _chunk_of((tile + 1) * steps - 1, units // chunks, units % chunks) + tile + 1
    r = inner_row + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK_N)
    place = r[:, None] * BLOCK_N + c[None, :]
    r += tile // tiles_n * BLOCK_M
    c += tile % tiles_n * BLOCK_N
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    total = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    partials_ptr += slot.to(tl.int64) * (BLOCK_M * BLOCK_N)
    size = (end - slot) * (BLOCK_M * BLOCK_N)
    for begin in range(0, end - slot, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            partial = (begin + i) * (BLOCK_M * BLOCK_N) + place
            total += tl.load(partials_ptr + partial, mask=inside & (partial < size), other=0.0)
    value = total * (tl.load(scale_a_ptr) * tl.load(scale_b_ptr))
    offsets = r.to(tl.int64)[:, None] * columns + c[None, :]
    tl.store(out_ptr + offsets, value.to(out_ptr.dtype.element_ty), mask=inside)


# What measuring chooses among, by index: the first is the candidate's default. Exact sums need registers
# for a second tile, so they have half of one. 128 x 256 takes 48 KB of shared memory a stage.
FAST = (Config(), Config(interleave=False), Config(block_n=128, stages=3, warps=4, per_sm=2))
EXACT = (Config(block_n=128, stages=4), Config(block_n=128, stages=4, interleave=False))


def choose(m: int, n: int, *, fast: bool, algorithm: int = 0) -> Config:
    """The configuration of that index, or the last; its tile turned or halved where that pads less."""
    configs = FAST if fast else EXACT
    config = configs[min(algorithm, len(configs) - 1)]
    high, wide = config.block_m, config.block_n
    tiles = ((high, wide), (wide, high), (min(high, wide),) * 2)
    high, wide = min(tiles, key=lambda tile: _tiles(m, n, *tile) * tile[0] * tile[1])
    return replace(config, block_m=high, block_n=wide)


def cut(tiles: int, steps: int, programs: int) -> int:
    """How many programs share a tile, or 0 for an even cut into `programs` ranges of all steps."""
    splits = max(min(programs // tiles, steps // _SHORTEST), 1)
    rounds = -(-tiles * splits // programs)
    long_enough = tiles * steps >= _SHORTEST * programs
    return 0 if tiles * splits < _FULL * rounds * programs and long_enough else splits


def split_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    dtype: torch.dtype,
    *,
    fast: bool,
    config: Config | None = None,
) -> torch.Tensor:
    """out [M, N] in `dtype` = a [M, K] @ b [N, K]^T * scale_a * scale_b.

    Args:
        a, b: e4m3 or e5m2, row-major, 16-byte aligned; K a multiple of 16. M and N are free.
        scale_a, scale_b: float32 of one element, dequantizing, on the operands' device.
        dtype: bfloat16, float16 or float32.
        fast: partial sums stay in the tensor core's register, about 14 bits, for all of a chunk;
            otherwise they move to float32 after every 128 of K (core/numerics/reference.py).
        config: None chooses.
    """
    (m, k), n = a.shape, b.shape[0]
    out = torch.empty(m, n, dtype=torch.float32 if INTERPRETED else dtype, device=a.device)
    if k == 0:
        out.zero_()
    elif out.numel():
        if INTERPRETED:
            a, b = a.float(), b.float()
        # Triton launches on the current device, which need not be the operand's.
        with launching_on(a):
            _launch(a, b, out, scale_a, scale_b, fast, config or choose(m, n, fast=fast))
    return out.to(dtype)


def _launch(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    fast: bool,
    config: Config,
) -> None:
    """Writes A B^T with its scales to `out` [M, N]; operands are not empty.

    The first kernel multiplies: each program has a chunk of the tiles' steps along K. Where tiles are not split it
    writes `out` itself, else partial sums, which the second kernel adds up.
    """
    (m, k), n = a.shape, b.shape[0]
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    programs = config.per_sm * _processors(a.device)
    tiles, steps = _tiles(m, n, block_m, block_n), triton.cdiv(k, block_k)
    splits = cut(tiles, steps, programs) if config.splits is None else min(config.splits, steps)
    chunks = tiles * splits if splits else min(programs, tiles * steps)
    direct = splits == 1
    # Otherwise `chunks` ranges, which end where tiles do if a tile's steps divide into its splits.
    turns = direct or (splits > 0 and config.interleave)
    target = out
    if not direct:
        slots = chunks if turns else chunks + tiles - 1
        partials = torch.empty(slots * block_m, block_n, dtype=torch.float32, device=a.device)
        target = TensorDescriptor.from_tensor(partials, [block_m, block_n // config.parts])
    _multiply[(chunks,)](
        TensorDescriptor.from_tensor(a, [block_m, block_k]),
        TensorDescriptor.from_tensor(b, [block_n, block_k]),
        target,
        scale_a,
        scale_b,
        m,
        n,
        k,
        chunks,
        splits,
        FAST=fast,
        TURNS=turns,
        DIRECT=direct,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        PARTS=config.parts,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    if direct:
        return
    high = min(block_m, max(1, _REDUCED // block_n))
    _add_up[(tiles * (block_m // high),)](
        partials,
        out,
        scale_a,
        scale_b,
        m,
        n,
        k,
        chunks,
        splits,
        TURNS=turns,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        ROWS=high,
        AT_ONCE=8,
        num_warps=4,
    )


def _tiles(m: int, n: int, block_m: int, block_n: int) -> int:
    return -(-m // block_m) * -(-n // block_n)


def _processors(device: torch.device) -> int:
    return _PROCESSORS_INTERPRETED if INTERPRETED else multiprocessors(device)
