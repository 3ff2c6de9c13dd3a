"""The transpose of a matrix of bytes by one launch, a word of four rows at a time."""

import torch
import triton
import triton.language as tl

from loka.kernels.edge.triton.device import transposed
from loka.kernels.triton.launch import allocated, cdiv, launch, launching_on

_HIGH, _WIDE = 128, 64


@triton.jit
def _transpose(from_ptr, to_ptr, rows, COLUMNS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr):
    tile = tl.program_id(0)
    across = (COLUMNS + WIDE - 1) // WIDE
    start = (tile // across).to(tl.int64) * HIGH
    transposed(from_ptr, to_ptr, start, tile % across * WIDE, rows, rows, COLUMNS, HIGH, WIDE)


def transpose_fused(matrix: torch.Tensor) -> torch.Tensor:
    """[K, N] of a contiguous [N, K] of a type of one byte, with a multiple of four rows."""
    rows, columns = matrix.shape
    out = allocated(torch.empty(columns, rows, dtype=matrix.dtype, device=matrix.device))
    with launching_on(matrix):
        args = matrix.view(torch.uint8), out.view(torch.int32), rows
        constants = {"COLUMNS": columns, "HIGH": _HIGH, "WIDE": _WIDE}
        launch(_transpose, (cdiv(rows, _HIGH) * cdiv(columns, _WIDE), 1), args, constants)
    return out
