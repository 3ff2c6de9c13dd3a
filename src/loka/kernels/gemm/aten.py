"""GEMMs of quantized operands in aten's own ops, for graphs that run without LoKA."""

import torch

from loka.core.numerics.reference import Quantized, scaled_mm
from loka.kernels.gemm.adapters.torch_scaled import by_rows, takes_rows
from loka.kernels.gemm.registry import KERNELS


def aten_gemm(kernel: str, a: Quantized, b: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """a [M, K] b^T [K, N] in `dtype`: of a kernel of torch by the op that it calls, without looking at addresses;
    else by what emulates it. Padded operands; any number of rows, a symbol too."""
    kind = KERNELS[kernel]
    if kind.emulates:
        return scaled_mm(a, b, dtype=dtype)
    scale_a, scale_b = by_rows(a, b) if takes_rows(a) else (a.scale, b.scale.t())
    return torch._scaled_mm(a.data, b.data.t(), scale_a, scale_b, out_dtype=dtype, use_fast_accum=kind.fast)
