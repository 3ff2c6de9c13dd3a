"""Spike: W resident in shared memory across tiles."""
import triton, triton.language as tl
from loka.kernels.gemm.triton.gemm import _load, _normalize, _finish

@triton.jit
def _gemm_resident(
    a, w, out, z, inverse_ptr, steps_ptr, scale_a_ptr, scale_w_ptr, rows, columns, inner,
    EPS: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr, INVERSE: tl.constexpr, KEEP: tl.constexpr,
    ROWS: tl.constexpr, FAST: tl.constexpr, HARDWARE: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr, FLATTEN: tl.constexpr, PROGRAMS: tl.constexpr, STAGES: tl.constexpr,
):
    tiles_m = tl.cdiv(rows, BLOCK_M)
    scale_w = tl.load(scale_w_ptr)
    right = w.load([0, 0])
    for tile in tl.range(tl.program_id(0), tiles_m, PROGRAMS, num_stages=STAGES):
        row = tile * BLOCK_M
        left = a.load([row, 0])
        acc = tl.dot(left, right.T)
        column = 0
        if ROWS:
            r = row + tl.arange(0, BLOCK_M)
            scale = tl.load(scale_a_ptr + r, mask=r < rows, other=1.0)[:, None] * scale_w
        else:
            scale = tl.load(scale_a_ptr) * scale_w
        if PARTS == 1 or NORM == BLOCK_N:
            factor, parts = _normalize(acc, scale, EPS, inverse_ptr, steps_ptr, row, column, rows, columns, KEEP, BLOCK_M, BLOCK_N, NORM)
        if PARTS == 1:
            _finish(acc, factor, parts, out, z, row, column, rows, columns, ACTIVATION, INVERSE, KEEP, HARDWARE, BLOCK_M, BLOCK_N, TMA)
        else:
            halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
            first, second = tl.split(halves)
            half = column + BLOCK_N // 2
            if NORM < BLOCK_N:
                factor, parts = _normalize(first, scale, EPS, inverse_ptr, steps_ptr, row, column, rows, columns, KEEP, BLOCK_M, BLOCK_N // 2, NORM)
            _finish(first, factor, parts, out, z, row, column, rows, columns, ACTIVATION, INVERSE, KEEP, HARDWARE, BLOCK_M, BLOCK_N // 2, TMA)
            if NORM < BLOCK_N:
                factor, parts = _normalize(second, scale, EPS, inverse_ptr, steps_ptr, row, half, rows, columns, KEEP, BLOCK_M, BLOCK_N // 2, NORM)
            _finish(second, factor, parts, out, z, row, half, rows, columns, ACTIVATION, INVERSE, KEEP, HARDWARE, BLOCK_M, BLOCK_N // 2, TMA)
