"""PyTorch's own scaled GEMMs: cuBLASLt on Hopper and newer, an exact kernel on the CPU.

`torch` accumulates in float32 after every 128 of K; `torch_fast` stays in the tensor core's
register of about 14 bits, which is faster and less accurate (core/numerics/reference.py).

The CPU kernels accept any side and any layout, so the rules of the GPU are written down here
and asked on every machine: K and N must be multiples of 16, e5m2 cannot meet e5m2, and the
blockwise recipe needs K in multiples of 128, M of 4, Hopper, and CUDA 12.9. (Tried on an H200
with torch 2.11: M is free otherwise, and results in float16 and float32 are right too.)
"""

import functools

import torch
from torch.nn.functional import ScalingType, scaled_mm

from loka.core.numerics.reference import Quantized
from loka.core.problem import Problem, capability
from loka.core.recipe import Format, Gemm, Granularity, Recipe
from loka.kernels.gemm.kernel import Into, Kernel, Multiples
from loka.kernels.gemm.layouts import column_major, padded_rows, scalar, vector
from loka.kernels.gemm.legality import before_cuda_12_9, cublaslt_multiples, misaligned, no_fp8, not_float64

_RECIPES = ("tensorwise_e4m3", "tensorwise_e5m2", "rowwise_e4m3", "rowwise_e4m3_pow2", "blockwise_e4m3")
_HOT = ("rowwise_e4m3_hot32", "rowwise_e4m3_centred_hot32")
_WHOLE_K = (Granularity.TENSOR, Granularity.ROW)  # of one scale for all of K
_ROWS_ON_A_CPU = torch.__version__ >= "2.13"

# `_scaled_mm` has a C shim, `_scaled_mm_v2`, which blockwise scales need, has none in torch 2.13.
_PACKAGED = ("tensorwise_e4m3", "rowwise_e4m3", "rowwise_e4m3_pow2")


def _unsupported(problem: Problem, recipe: Recipe, *, fast: bool) -> str | None:
    casts = recipe.casts(problem.gemm)
    assert casts is not None
    blocks = any(cast.granularity not in _WHOLE_K for cast in casts)
    if refused := not_float64(problem):
        return refused
    if problem.target == "cpu":
        if fast:
            return "fast accumulation is a mode of the GPU's tensor cores"
        if casts[0].granularity is Granularity.ROW and not _ROWS_ON_A_CPU:
            return f"torch {torch.__version__} has only tensorwise scales on the CPU"
        return "torch has no blockwise kernel on the CPU" if blocks else None
    if refused := no_fp8(problem.target):
        return refused
    if casts[0].format is Format.E5M2 and casts[1].format is Format.E5M2:
        return "both operands are e5m2; cuBLASLt takes at most one"
    refused = misaligned(problem, n=16, k=16)
    if refused or not blocks:
        return refused
    if fast:
        return "blockwise scales are applied in float32; there is no fast accumulation"
    if capability(problem.target) != (9, 0):
        return f"blockwise FP8 scales are for sm_90; {problem.target} has MX formats instead"
    if refused := misaligned(problem, k=128):
        return refused
    if problem.m % 4:
        return f"M={problem.m} is not a multiple of 4, which the layout of the 1x128 scales needs"
    if problem.dtype not in ("bfloat16", "float32"):
        return f"{problem.dtype} results; the blockwise kernel writes bfloat16 or float32"
    return before_cuda_12_9()


def _multiples(problem: Problem, recipe: Recipe) -> Multiples:
    return (1, 1, 1) if problem.target == "cpu" else cublaslt_multiples(problem, recipe)


def _run(a: Quantized, b: Quantized, dtype: torch.dtype, *, algorithm: int = 0, fast: bool) -> torch.Tensor:
    if a.cast.granularity in _WHOLE_K:
        return _scaled(a, b, dtype, fast)
    # The form with recipes: the older one accepts unpadded 128x128 scales and returns garbage
    # when K / 128 is not a multiple of 4 (pytorch/ao#4209).
    if b.cast.granularity is Granularity.BLOCK_128X128:
        scale_b = padded_rows(b.scale).t()
        recipe_b = ScalingType.BlockWise128x128
    else:
        scale_b = column_major(b.scale)
        recipe_b = ScalingType.BlockWise1x128
    return scaled_mm(
        a.data,
        b.data.t(),
        column_major(a.scale),
        ScalingType.BlockWise1x128,
        scale_b,
        recipe_b,
        output_dtype=dtype,
        use_fast_accum=False,
    )


def _column(scale: torch.Tensor) -> torch.Tensor:
    """Row scales [R, 1] with stride 1, as the quantizer makes them; a view of one costs the host 3 us."""
    if scale.stride() == (1, 1) and scale.data_ptr() % 16 == 0:
        return scale
    return vector(scale)[:, None]


def takes_rows(a: Quantized) -> bool:
    """Whether one scale is better given as one for each row: on a CPU with AMX torch takes one scale to a loop of
    oneDNN's, 0.05 GFLOP/s, and row scales to its own GEMM."""
    return _ROWS_ON_A_CPU and not a.data.is_cuda and a.cast.granularity is Granularity.TENSOR


def by_rows(a: Quantized, b: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale of each as scales [M, 1] and [1, N]; M may be a symbol."""
    return a.scale.view(1, 1).repeat(a.data.shape[0], 1), b.scale.view(1, 1).repeat(1, b.data.shape[0])


def _scaled(
    a: Quantized, b: Quantized, dtype: torch.dtype, fast: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    if a.cast.granularity is not Granularity.TENSOR:
        scale_a, scale_b = _column(a.scale), _column(b.scale).t()
    elif takes_rows(a):
        scale_a, scale_b = by_rows(a, b)
    else:
        scale_a, scale_b = scalar(a.scale), scalar(b.scale)
    return torch._scaled_mm(a.data, b.data.t(), scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast, out=out)


def _into(recipe: Recipe, *, fast: bool) -> Into | None:
    """Blocks have an op of their own, which makes its result."""
    casts = recipe.casts(Gemm.OUTPUT)
    whole = casts is not None and all(cast.granularity in _WHOLE_K for cast in casts)
    return functools.partial(_write, fast=fast) if whole else None


def _write(a: Quantized, b: Quantized, out: torch.Tensor, *, fast: bool) -> None:
    _scaled(a, b, out.dtype, fast, out)


TORCH = Kernel(
    name="torch",
    library="torch",
    recipes=(*_RECIPES, *_HOT),
    unsupported=functools.partial(_unsupported, fast=False),
    multiples=_multiples,
    run=functools.partial(_run, fast=False),
    packaged=_PACKAGED,
    into=functools.partial(_into, fast=False),
)

TORCH_FAST = Kernel(
    name="torch_fast",
    library="torch",
    fast=True,
    recipes=(*(name for name in _RECIPES if not name.startswith("blockwise")), *_HOT),
    unsupported=functools.partial(_unsupported, fast=True),
    multiples=_multiples,
    run=functools.partial(_run, fast=True),
    packaged=_PACKAGED,
    into=functools.partial(_into, fast=True),
)
