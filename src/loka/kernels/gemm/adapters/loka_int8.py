"""LoKA's own INT8 GEMM, which scales rows and columns before it writes (kernels/gemm/triton/int8_gemm.py).

out [M, N] = float32(A @ B^T) * scale_A [M, 1] * scale_B [N, 1]^T        A [M, K], B [N, K] INT8
"""

import torch

from loka.core.numerics.reference import Quantized
from loka.core.problem import Problem
from loka.core.recipe import Recipe
from loka.kernels.gemm.kernel import Kernel, PaddedTo
from loka.kernels.gemm.legality import misaligned, not_float64, not_hopper
from loka.kernels.gemm.libraries import no_triton

_ALIGNED = 16  # bytes: the rows of what the tensor memory accelerator loads, whatever M and N are


def _unsupported(problem: Problem, recipe: Recipe) -> str | None:
    slow = "is built for the INT8 tensor cores of sm_90"  # later GPUs have few, as the B300
    return not_float64(problem) or not_hopper(problem.target, slow) or misaligned(problem, k=_ALIGNED)


def _run(a: Quantized, b: Quantized, dtype: torch.dtype, *, algorithm: int = 0) -> torch.Tensor:
    from loka.kernels.gemm.triton.int8_gemm import int8_gemm

    return int8_gemm(a.data, b.data, a.scale, b.scale, dtype)


LOKA_INT8 = Kernel(
    name="loka_int8",
    library="loka",
    recipes=("int8_row", "int8_row_centred"),
    unsupported=_unsupported,
    multiples=PaddedTo(1, 1, _ALIGNED),
    run=_run,
    missing=no_triton,
)
