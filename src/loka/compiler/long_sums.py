"""The kernel of a weight's gradient in a region, where the batch is long and the layer narrow.

    dW [N, K]  =  sum over the T rows of the batch:  few tiles, and many terms of each

torch takes an algorithm of cuBLASLt that cuts no exact FP8 sum along its terms, so that few multiprocessors work. Asked
for algorithms that add up in float32 alone (kernels/gemm/adapters/cublaslt.py), cuBLASLt first names one that does.
"""

from loka.core.problem import Problem, capability
from loka.core.recipe import Gemm
from loka.kernels.gemm.adapters.cublaslt import CUBLASLT
from loka.kernels.gemm.adapters.torch_scaled import TORCH
from loka.kernels.gemm.registry import candidate_named

LONG_SUMS = f"{CUBLASLT.name}:tensorwise_e4m3"
"""Operands of `grad_weight` have one scale each in a region, whatever the plan's recipe (compiler/gemms.py)."""

# Tiles of 128 x 128, and terms from which on. On an H200 (docs/log.md, 2026-12-01) it takes 0.38 to 0.92 of the time of
# `torch` with 32,768 to 131,072 terms, and with 16,384 0.63 to 0.94 where tiles are few, else 0.92 to 1.09. Two tiles
# gain up to 2 us, and more than 64 were not timed.
_TILE, _TILES, _FEW_TILES = 128, range(4, 65), range(4, 17)
_TERMS, _TERMS_OF_FEW = 32_768, 16_384


def kernel_in_region(kernel: str, problem: Problem) -> str:
    """What runs in a region where a plan names `kernel`."""
    long = problem.k >= (_TERMS_OF_FEW if _tiles(problem) in _FEW_TILES else _TERMS)
    return CUBLASLT.name if long and splits_long_sums(kernel, problem) else kernel


def splits_long_sums(kernel: str, problem: Problem) -> bool:
    """Whether `LONG_SUMS` runs in the place of `kernel` where the batch is long enough."""
    return (
        kernel == TORCH.name
        and problem.gemm is Gemm.GRAD_WEIGHT
        and capability(problem.target) == (9, 0)
        and _tiles(problem) in _TILES
        and candidate_named(LONG_SUMS).unsupported(problem) is None
    )


def _tiles(problem: Problem) -> int:
    return -(-problem.m // _TILE) * -(-problem.n // _TILE)
