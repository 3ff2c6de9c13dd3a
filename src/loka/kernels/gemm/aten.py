"""GEMMs of quantized operands in aten's own ops, for graphs that run without LoKA."""

import torch

from loka.core.numerics.reference import Quantized, scaled_mm
from loka.kernels.gemm.registry import KERNELS


def aten_gemm(kernel: str, a: Quantized, b: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """a [M, K] b^T [K, N] in `dtype`: of a kernel of torch by the op that it calls, without looking at addresses;
    else by what emulates it. Padded operands; any number of rows, a symbol too."""
    kind = KERNELS[kernel]
    if kind.emulates:
        return scaled_mm(a, b, dtype=dtype)
    return torch._scaled_mm(a.data, b.data.t(), a.scale, b.scale.t(), out_dtype=dtype, use_fast_accum=kind.fast)
