"""A GEMM in high precision as `torch.compile` runs it: with sides that fill memory lines, where that is faster.

A row of 479 numbers in bf16 begins in the middle of 16 bytes, and cuBLAS takes a slow kernel: on an H200 the layer
479 - 1024 of MLPerf's DLRM. Inductor pads such operands (`shape_padding`). A plan that takes the slow kernel for
bf16's time finds FP8, which is padded anyway, faster than it is.
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import pad

from loka.core.problem import DTYPES, Problem

_LINE = 16  # bytes
_ALIGNED = 8  # numbers of 16 bits, which operands are; results may be wider


def is_odd(problem: Problem) -> bool:
    """Whether a row of an operand or of the result does not fill whole lines of 16 bytes."""
    return any(side % _ALIGNED for side in (problem.n, problem.k))


def multiply_padded(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """out [M, N] = a [M, K] @ b [N, K]^T; both are copied into lines, as they lie."""
    (m, _), n = a.shape, b.shape[0]
    return (_in_lines(a) @ _in_lines(b.to(a.dtype)).t()).to(dtype)[:m, :n]


def _in_lines(matrix: torch.Tensor) -> torch.Tensor:
    """Zeros up to whole lines behind both sides; of columns that lie side by side they still do."""
    turned = matrix.stride(1) != 1
    rows = matrix.t() if turned else matrix
    line = _LINE // matrix.element_size()
    grown = pad(rows, (0, -rows.shape[1] % line, 0, -rows.shape[0] % line))
    return grown.t() if turned else grown


def padded_call(operands: Callable[[], Sequence[torch.Tensor]], problem: Problem) -> Callable[[], torch.Tensor]:
    dtype = DTYPES[problem.dtype]

    def call() -> torch.Tensor:
        a, b = operands()
        with torch.autocast(a.device.type, enabled=False):
            return multiply_padded(a, b, dtype)

    return call
