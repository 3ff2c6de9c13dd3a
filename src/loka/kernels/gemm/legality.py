"""Reasons that several kernels give for refusing a problem. Each is a sentence, or None."""

import torch

from loka.core.numerics.reference import too_long
from loka.core.problem import Problem, capability
from loka.core.recipe import Format, Gemm, Granularity, Recipe
from loka.kernels.gemm.kernel import Multiples


def granularities(problem: Problem, recipe: Recipe) -> tuple[Granularity, Granularity]:
    """Of A and of B. The recipe must define the problem's GEMM."""
    casts = recipe.casts(problem.gemm)
    assert casts is not None, f"{recipe.name} does not define {problem.gemm}"
    return casts[0].granularity, casts[1].granularity


def overflows(problem: Problem, recipe: Recipe) -> str | None:
    """Whether the sums could leave the accumulator, by bound: those of INT8 beyond K = 131072."""
    casts = recipe.casts(problem.gemm)
    return too_long(problem.k, casts[0].format) if casts is not None else None


def too_narrow(problem: Problem, recipe: Recipe) -> str | None:
    """Whether hot columns would more than double it."""
    if problem.gemm is not Gemm.OUTPUT or problem.k >= 2 * recipe.hot:
        return None
    return f"K={problem.k} is less than the {2 * recipe.hot} columns of residuals behind it"


def not_hopper(target: str, what: str = "is built for sm_90") -> str | None:
    gpu = capability(target)
    if gpu is None:
        return "needs a CUDA GPU of sm_90"
    return None if gpu == (9, 0) else f"{what}, not for {target}"


def cublaslt_multiples(problem: Problem, recipe: Recipe) -> Multiples:
    """`Kernel.multiples` of cuBLASLt on a GPU, called by itself or by torch."""
    if Granularity.GROUP_1X128 in granularities(problem, recipe):
        return (4, 16, 128)  # M: 1x128 scales lie in columns of M floats, each at 16 bytes
    return (1, 16, 16)


def no_fp8(target: str) -> str | None:
    gpu = capability(target)
    if gpu is None:
        return "needs a CUDA GPU of sm_89 or newer"
    return f"{target} has no FP8 tensor cores (needs sm_89 or newer)" if gpu < (8, 9) else None


def not_e4m3(problem: Problem, recipe: Recipe) -> str | None:
    casts = recipe.casts(problem.gemm)
    if casts is not None and any(cast.format is not Format.E4M3 for cast in casts):
        return "takes e4m3 operands only"
    return None


def misaligned(problem: Problem, *, m: int = 1, n: int = 1, k: int = 1) -> str | None:
    for side, size, of in (("K", problem.k, k), ("N", problem.n, n), ("M", problem.m, m)):
        if size % of:
            return f"{side}={size} is not a multiple of {of}"
    return None


def not_float64(problem: Problem) -> str | None:
    return "float64 results: sums are scaled in float32" if problem.dtype == "float64" else None


def not_bfloat16(problem: Problem) -> str | None:
    """For GEMMs that write bfloat16. A float32 weight gradient is a cast of it, as autocast does."""
    if problem.dtype == "bfloat16" or (problem.gemm is Gemm.GRAD_WEIGHT and problem.dtype == "float32"):
        return None
    return f"{problem.dtype} results; writes bfloat16 only"


def bfloat16_on_the_way(problem: Problem, recipe: Recipe) -> float:
    """`Kernel.rounding` of a GEMM that writes bfloat16: what a cast to float32 does not bring back."""
    return 0.0 if problem.dtype == "bfloat16" else 2.0**-8


def before_cuda_12_9() -> str | None:
    """Whether this torch comes with a cuBLASLt that knows no scales of rows and blocks. A torch without CUDA says
    nothing."""
    version = torch.version.cuda
    if version and tuple(map(int, version.split(".")[:2])) < (12, 9):
        return f"needs CUDA 12.9, this torch was built with {version}"
    return None
