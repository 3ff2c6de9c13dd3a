"""FBGEMM GenAI's CUTLASS GEMMs for Hopper: rowwise, tensorwise, 128x128 blocks, 1x128 groups.

On Hopper with CUDA 12.9 or newer torch's own rowwise GEMM is cuBLASLt's, so these are other kernels.
All write bfloat16 from two e4m3 operands; a float32 weight gradient is cast afterwards, which is
what bfloat16 training rounds to anyway. Tensorwise uses `f8f8bf16`, which is CUTLASS too and takes the
product of the scales (one tiny launch); `f8f8bf16_cublas` takes both scales but is the GEMM that
`torch` already has. Its operand types are not checked there: e5m2 bytes would be read as e4m3.
"""

import functools

import torch

from loka.core.numerics.reference import Quantized
from loka.core.problem import Problem
from loka.core.recipe import Granularity, Recipe
from loka.kernels.gemm.kernel import Kernel, Multiples
from loka.kernels.gemm.layouts import column_major, row_major, scalar, vector
from loka.kernels.gemm.legality import (
    bfloat16_on_the_way,
    granularities,
    misaligned,
    not_bfloat16,
    not_e4m3,
    not_hopper,
)
from loka.kernels.gemm.libraries import why_missing

_FAST_RECIPES = ("tensorwise_e4m3", "rowwise_e4m3", "rowwise_e4m3_pow2")
_BLOCKS = (Granularity.GROUP_1X128, Granularity.BLOCK_128X128)


def unsupported(problem: Problem, recipe: Recipe) -> str | None:
    if refused := not_hopper(problem.target) or not_e4m3(problem, recipe) or not_bfloat16(problem):
        return refused
    both = granularities(problem, recipe)
    if both == (Granularity.GROUP_1X128, Granularity.GROUP_1X128):
        return "has no GEMM of two operands with 1x128 scales"
    m, n, k = multiples(problem, recipe)
    return misaligned(problem, m=m, n=n, k=k)


def multiples(problem: Problem, recipe: Recipe) -> Multiples:
    both = granularities(problem, recipe)
    if both[0] is Granularity.GROUP_1X128:
        return (4, 16, 128)  # 1x128 scales come by TMA, 16 bytes at a time
    return (1, 16, 128 if both[0] in _BLOCKS else 16)


def _run(a: Quantized, b: Quantized, dtype: torch.dtype, *, algorithm: int = 0, fast: bool) -> torch.Tensor:
    ops = torch.ops.fbgemm
    with torch.cuda.device_of(a.data):  # the op launches on the current device, whatever its operands
        if a.cast.granularity is Granularity.ROW:
            out = ops.f8f8bf16_rowwise(a.data, b.data, vector(a.scale), vector(b.scale), use_fast_accum=fast)
        elif a.cast.granularity is Granularity.TENSOR:
            out = ops.f8f8bf16(a.data, b.data, scalar(a.scale) * scalar(b.scale), use_fast_accum=fast)
        elif a.cast.granularity is Granularity.BLOCK_128X128:
            scale_a, scale_b = row_major(a.scale), row_major(b.scale)
            out = ops.f8f8bf16_blockwise(a.data, b.data, scale_a, scale_b, 128, 128, 128)
        else:  # scales [K/128, M] and [K/128, N/128]
            scale_a, scale_b = column_major(a.scale).t(), row_major(b.scale.t())
            out = ops.f8f8bf16_groupwise(a.data, b.data, scale_a, scale_b)
    return out.to(dtype)


FBGEMM, FBGEMM_FAST = (
    Kernel(
        name="fbgemm_fast" if fast else "fbgemm",
        library="fbgemm",
        recipes=_FAST_RECIPES if fast else (*_FAST_RECIPES, "blockwise_e4m3", "block128_e4m3"),
        unsupported=unsupported,
        multiples=multiples,
        run=functools.partial(_run, fast=fast),
        missing=functools.partial(why_missing, "fbgemm"),
        fast=fast,
        rounding=bfloat16_on_the_way,
    )
    for fast in (False, True)
)
