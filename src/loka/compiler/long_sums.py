"""The kernel of a weight's gradient in a region, where the batch is long and the layer narrow.

    dW [N, K]  =  sum over the T rows of the batch:  few tiles, and many terms of each

cuBLASLt cuts no exact FP8 sum along its terms, so that few multiprocessors work. `loka_split` does.
"""

from loka.core.problem import Problem, capability
from loka.core.recipe import Gemm
from loka.kernels.gemm.adapters.split_gemm import LOKA_SPLIT
from loka.kernels.gemm.adapters.torch_scaled import TORCH
from loka.kernels.gemm.registry import candidate_named

SPLIT = f"{LOKA_SPLIT.name}:tensorwise_e4m3"
"""Operands of `grad_weight` have one scale each in a region, whatever the plan's recipe (compiler/gemms.py)."""

# On an H200 (docs/log.md, 2026-11-29) `loka_split` takes 0.54 to 0.92 of the time of `torch` from here on, and longer
# with more tiles, of 128 x 128, or fewer. Four tiles were timed at 32,768 terms (1.03) and at 131,072 (0.84), not at
# 65,536. From 16,384 terms on eight and more would gain up to 2 us, which the call costs the host.
_TILE, _TILES = 128, range(4, 17)
_TERMS, _UNITS = 32_768, 262_144  # of a tile, of all


def kernel_in_region(kernel: str, problem: Problem) -> str:
    """What runs in a region where a plan names `kernel`."""
    long = problem.k >= _TERMS and _tiles(problem) * problem.k >= _UNITS
    return LOKA_SPLIT.name if long and splits_long_sums(kernel, problem) else kernel


def splits_long_sums(kernel: str, problem: Problem) -> bool:
    """Whether `SPLIT` runs in the place of `kernel` where the batch is long enough."""
    return (
        kernel == TORCH.name
        and problem.gemm is Gemm.GRAD_WEIGHT
        and capability(problem.target) == (9, 0)
        and _tiles(problem) in _TILES
        and candidate_named(SPLIT).unsupported(problem) is None
    )


def _tiles(problem: Problem) -> int:
    return -(-problem.m // _TILE) * -(-problem.n // _TILE)
