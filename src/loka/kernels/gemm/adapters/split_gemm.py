"""LoKA's own GEMM for weight gradients of narrow layers: few tiles, and a K as long as the batch.

    out [M, N] = A [M, K] @ B [N, K]^T * scale_a * scale_b

K is cut so that all multiprocessors work, and partial sums are added in float32 in a fixed order, by
the Triton kernels in kernels/gemm/triton/split_gemm.py. Whether that is faster than other kernels is
measured, not ruled here: it takes any side.

`loka_split` moves sums to float32 after every 128 of K; `loka_split_fast` after a program's share
of K, which is no more than all of it.
"""

import functools

import torch

from loka.core.numerics.reference import Quantized
from loka.core.problem import Problem, capability
from loka.core.recipe import Gemm, Recipe
from loka.kernels.gemm.kernel import Kernel, PaddedTo
from loka.kernels.gemm.layouts import vector
from loka.kernels.gemm.legality import misaligned, not_float64, undefined
from loka.kernels.gemm.libraries import no_triton

_RECIPES = ("tensorwise_e4m3", "tensorwise_e5m2")
_ALIGNED = 16  # bytes: the rows of what the tensor memory accelerator loads, whatever M and N are


def _unsupported(problem: Problem, recipe: Recipe) -> str | None:
    refused = undefined(problem, recipe)
    if refused:
        return refused
    if problem.gemm is not Gemm.GRAD_WEIGHT:
        return f"is for grad_weight, whose K is long, not for {problem.gemm}"
    gpu = capability(problem.target)
    if gpu is None:
        return "needs a CUDA GPU of sm_90 or newer"
    if gpu < (9, 0):
        return f"{problem.target} has no tensor memory accelerator (needs sm_90 or newer)"
    if gpu >= (12, 0):
        return f"{problem.target} has less shared memory than its tiles take"
    return not_float64(problem) or misaligned(problem, k=_ALIGNED)


def _algorithms(problem: Problem, recipe: Recipe, *, fast: bool) -> int:
    from loka.kernels.gemm.triton.split_gemm import EXACT, FAST

    return len(FAST if fast else EXACT)


def _run(a: Quantized, b: Quantized, dtype: torch.dtype, *, algorithm: int = 0, fast: bool) -> torch.Tensor:
    from loka.kernels.gemm.triton.split_gemm import choose, split_gemm

    config = choose(a.shape[0], b.shape[0], fast=fast, algorithm=algorithm)
    return split_gemm(a.data, b.data, vector(a.scale), vector(b.scale), dtype, fast=fast, config=config)


LOKA_SPLIT, LOKA_SPLIT_FAST = (
    Kernel(
        name="loka_split_fast" if fast else "loka_split",
        library="loka",
        fast=fast,
        recipes=_RECIPES,
        unsupported=_unsupported,
        multiples=PaddedTo(1, 1, _ALIGNED),
        run=functools.partial(_run, fast=fast),
        missing=no_triton,
        algorithms=functools.partial(_algorithms, fast=fast),
    )
    for fast in (False, True)
)
