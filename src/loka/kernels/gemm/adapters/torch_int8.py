"""PyTorch's INT8 GEMM, `torch._int_mm`: int32 sums, then the scales of rows in ops of their own.

    out [M, N] = float32(A @ B^T) * scale_A [M, 1] * scale_B [N, 1]^T        A [M, K], B [N, K] INT8

The sums are exact and the roundings after them are those of `core.numerics.reference.scale_sums`, so the
result is the twin's, bit for bit. The sums go through memory as int32, four bytes an output, which costs the
time that INT8 could save: whether it pays is for `measure` to say.

The rules of CUDA (aten/src/ATen/native/cuda/Blas.cpp, `_int_mm_out_cuda`): M above 16, K and N multiples
of 8. LoKA pads to them; zeros are exact. On the CPU any side does but K = 1, where torch 2.13 returns other
numbers (tests/core/numerics/test_int8.py); it is padded to 2.
"""

import torch

from loka.core.numerics.reference import Quantized, scale_sums
from loka.core.problem import Problem, capability
from loka.core.recipe import Recipe
from loka.kernels.gemm.kernel import Kernel, Multiples
from loka.kernels.gemm.legality import misaligned, not_float64

_FEW_ROWS = 16  # CUDA takes more


def _unsupported(problem: Problem, recipe: Recipe) -> str | None:
    if reason := not_float64(problem):
        return reason
    if problem.target == "cpu":
        return "K=1, where torch's CPU kernel is wrong" if problem.k == 1 else None
    gpu = capability(problem.target)
    if gpu is None or gpu < (7, 5):
        return f"{problem.target} has no INT8 tensor cores that torch uses (needs a CUDA GPU of sm_75 or newer)"
    if problem.m <= _FEW_ROWS:
        return f"M={problem.m} is not above {_FEW_ROWS}"
    return misaligned(problem, n=8, k=8)


def _multiples(problem: Problem, recipe: Recipe) -> Multiples:
    if problem.target == "cpu":
        return (1, 1, 2 if problem.k == 1 else 1)
    return (2 * _FEW_ROWS if problem.m <= _FEW_ROWS else 1, 8, 8)


def _run(a: Quantized, b: Quantized, dtype: torch.dtype, *, algorithm: int = 0) -> torch.Tensor:
    return scale_sums(torch._int_mm(a.data, b.data.t()), a.scale, b.scale, dtype=dtype)


TORCH_INT8 = Kernel(
    name="torch_int8",
    library="torch",
    recipes=("int8_row", "int8_row_centred"),
    unsupported=_unsupported,
    multiples=_multiples,
    run=_run,
)
