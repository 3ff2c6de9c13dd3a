"""The emulated kernel: every recipe on every device, through dequantized float32.

Shows what FP8 does to a model without FP8 hardware. The rounding of operands is exact; what
it leaves out is the tensor cores' accumulation error (core/numerics/reference.py bounds it).
"""

import torch

from loka.core.numerics.reference import Quantized, scaled_mm
from loka.core.problem import Problem
from loka.core.recipe import RECIPES, Recipe
from loka.kernels.gemm.kernel import Kernel, PaddedTo
from loka.kernels.gemm.legality import not_float64


def _unsupported(problem: Problem, recipe: Recipe) -> str | None:
    return not_float64(problem)


def _run(a: Quantized, b: Quantized, dtype: torch.dtype, *, algorithm: int = 0) -> torch.Tensor:
    return scaled_mm(a, b, dtype=dtype)


EMULATED = Kernel(
    name="emulated",
    library="emulated",
    recipes=tuple(RECIPES),
    unsupported=_unsupported,
    multiples=PaddedTo(1, 1, 1),
    run=_run,
    packaged=tuple(RECIPES),
    emulates=True,
)
