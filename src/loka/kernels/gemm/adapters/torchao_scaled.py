"""torchao's scaled GEMMs: the float8 training path, and the prototype's blockwise Triton kernels.

`torchao` and `torchao_fast` are what `torchao.float8` runs (fast in its forward, not in its
backward). Both end in torch._scaled_mm. torchao's scales multiply (fp8 = hp * scale), so ours are
inverted here and inverted back there: four tiny launches. Without fast accumulation its rowwise
GEMM is a tensorwise one whose bfloat16 result is multiplied by the outer product of the scales;
eager, that is a pass over the output, and the result is rounded to bfloat16 twice.

`torchao_block` tunes itself at the first call for each N and K (and M in grad_weight).
"""

import functools

import torch

from loka.core.numerics.reference import Quantized
from loka.core.problem import Problem, round_up
from loka.core.recipe import Granularity, Recipe
from loka.kernels.gemm.kernel import Kernel, PaddedTo
from loka.kernels.gemm.layouts import column_major, row_major, scalar, vector
from loka.kernels.gemm.legality import bfloat16_on_the_way, granularities, misaligned, no_fp8, not_bfloat16, not_float64
from loka.kernels.gemm.libraries import why_missing

_RECIPES = ("tensorwise_e4m3", "tensorwise_e5m2", "rowwise_e4m3")
_TALLEST_TILE = 256  # of the Triton kernels' configurations


def _unsupported(problem: Problem, recipe: Recipe) -> str | None:
    refused = no_fp8(problem.target) or misaligned(problem, n=16, k=16)
    if refused:
        return refused
    if granularities(problem, recipe)[0] is Granularity.ROW:
        return not_bfloat16(problem)
    return not_float64(problem)


def _rounding(problem: Problem, recipe: Recipe, *, fast: bool) -> float:
    if granularities(problem, recipe)[0] is not Granularity.ROW:
        return 0.0
    return bfloat16_on_the_way(problem, recipe) + (0.0 if fast else 2.0**-8)


def _run(a: Quantized, b: Quantized, dtype: torch.dtype, *, algorithm: int = 0, fast: bool) -> torch.Tensor:
    from torchao.float8.float8_ops import addmm_float8_unwrapped

    if a.cast.granularity is Granularity.ROW:
        scale_a, scale_b = vector(a.scale)[:, None], vector(b.scale)[None, :]
    else:
        scale_a, scale_b = scalar(a.scale), scalar(b.scale)
    return addmm_float8_unwrapped(
        a.data, scale_a.reciprocal(), b.data.t(), scale_b.reciprocal(), output_dtype=dtype, use_fast_accum=fast
    )


def _unsupported_block(problem: Problem, recipe: Recipe) -> str | None:
    return no_fp8(problem.target) or misaligned(problem, k=128) or not_float64(problem)


def _run_block(a: Quantized, b: Quantized, dtype: torch.dtype, *, algorithm: int = 0) -> torch.Tensor:
    from torchao.prototype.blockwise_fp8_training import kernels

    tall_a, tall_b = (round_up(operand.shape[0], _TALLEST_TILE) for operand in (a, b))
    scale_a = _readable(column_major(a.scale), tall_a, (1, tall_a))
    if b.cast.granularity is Granularity.BLOCK_128X128:
        groups = b.scale.shape[1]
        scale_b = b.scale if b.scale.stride(1) == 1 else row_major(b.scale)
        scale_b = _readable(scale_b, tall_b // 128, (groups, 1))
        gemm = kernels.triton_fp8_gemm_1x128_128x128
    else:
        scale_b = _readable(column_major(b.scale), tall_b, (1, tall_b))
        gemm = kernels.triton_fp8_gemm_1x128_128x1
    return gemm(a.data, b.data.t(), scale_a, scale_b.t(), block_size=128, out_dtype=dtype)


def _readable(scale: torch.Tensor, rows: int, strides: tuple[int, int]) -> torch.Tensor:
    """`scale` [R, C], or a copy with `strides`, in memory in which `rows` >= R rows can be read.

    The kernels load the scales of a whole tile without a mask; those beyond R scale rows of the
    result that are not stored, but their addresses must exist. No copy where R fills the tiles.
    """
    last = scale.storage_offset() + (rows - 1) * scale.stride(0) + (scale.shape[1] - 1) * scale.stride(1)
    if last < scale.untyped_storage().nbytes() // scale.element_size():
        return scale
    grown = torch.empty_strided((rows, scale.shape[1]), strides, dtype=scale.dtype, device=scale.device)
    return grown[: scale.shape[0]].copy_(scale)


TORCHAO, TORCHAO_FAST = (
    Kernel(
        name="torchao_fast" if fast else "torchao",
        library="torchao",
        recipes=_RECIPES,
        unsupported=_unsupported,
        multiples=PaddedTo(1, 16, 16),
        run=functools.partial(_run, fast=fast),
        missing=functools.partial(why_missing, "torchao"),
        fast=fast,
        rounding=functools.partial(_rounding, fast=fast),
    )
    for fast in (False, True)
)

TORCHAO_BLOCK = Kernel(
    name="torchao_block",
    library="torchao",
    recipes=("blockwise_e4m3",),
    on_request="compiles and times 6 variants at the first call for each shape: minutes for a model",
    unsupported=_unsupported_block,
    multiples=PaddedTo(1, 1, 128),
    run=_run_block,
    missing=functools.partial(why_missing, "torchao"),
)
