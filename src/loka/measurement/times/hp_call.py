"""A GEMM in high precision as `torch.compile` runs it: with sides that fill memory lines, where that is faster.

A row of 479 numbers in bf16 begins in the middle of 16 bytes, and cuBLAS takes a slow kernel. Inductor pads such
operands (`shape_padding`). A plan that takes the slow kernel for bf16's time finds FP8, which is padded anyway,
faster than it is: on an H200 all GEMMs of MLPerf's DLRM, of which one layer is 479 wide, took 1,508 us for 1,053.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import pad

from loka.core.problem import DTYPES, Problem

_LINE = 16  # bytes
_ALIGNED = 8  # numbers of 16 bits, which operands are; results may be wider


def is_odd(problem: Problem) -> bool:
    """Whether a row of an operand or of the result does not fill whole lines of 16 bytes."""
    return any(side % _ALIGNED for side in (problem.n, problem.k))


def padded_call(sets: Sequence[tuple[torch.Tensor, torch.Tensor]], problem: Problem) -> Callable[[], torch.Tensor]:
    """out [M, N] = a [M, K] @ b [N, K]^T of each pair in turn.

    Operands lie padded before: the code that makes them writes zeros beside them for nothing.
    """
    dtype, n = DTYPES[problem.dtype], problem.n
    turn = itertools.cycle([(in_lines(a), in_lines(b.to(a.dtype))) for a, b in sets])

    def call() -> torch.Tensor:
        a, b = next(turn)
        with torch.autocast(a.device.type, enabled=False):
            return (a @ b.t()).to(dtype)[: problem.m, :n]

    return call


def in_lines(matrix: torch.Tensor) -> torch.Tensor:
    """Zeros up to whole lines behind both sides; of columns that lie side by side they still do."""
    turned = matrix.stride(1) != 1
    rows = matrix.t() if turned else matrix
    line = _LINE // matrix.element_size()
    grown = pad(rows, (0, -rows.shape[1] % line, 0, -rows.shape[0] % line))
    return grown.t() if turned else grown
