"""Runs one candidate on high-precision operands: pad, quantize, multiply, count.

This is the only place that calls a kernel, so its counter proves what ran.
"""

from __future__ import annotations

from collections import Counter

import torch

from loka.core.problem import Problem, dtype_name, target_of
from loka.core.recipe import Gemm
from loka.core.report import HP
from loka.kernels.quantizer import BAD_A, BAD_B, quantize_operand
from loka.kernels.registry import require_supported

_RUNS: Counter[tuple[str, str]] = Counter()


def kernel_runs() -> dict[tuple[str, str], int]:
    """How often each (candidate, gemm) was launched from Python in this process.

    A CUDA-graph capture counts once and its replays do not: `nn.health_of` counts those.
    """
    return dict(_RUNS)


def reset_kernel_runs() -> None:
    _RUNS.clear()


def run_gemm(
    candidate: str,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    gemm: Gemm,
    dtype: torch.dtype,
    health: torch.Tensor | None = None,
) -> torch.Tensor:
    """out [M, N] = a [M, K] @ b [N, K]^T in `dtype`, through `candidate`.

    Args:
        candidate: "hp", or "kernel:recipe".
        a, b: high-precision operands with any strides.
        health: int64 [3] that receives [runs, non-finite A, non-finite B].

    Raises:
        NoKernelFits: the candidate cannot run this problem; nothing else is tried.
    """
    m, k = a.shape
    n = b.shape[0]
    # Autocast would recast the float32 operands of the emulated kernel.
    with torch.autocast(a.device.type, enabled=False):
        if candidate == HP:
            _RUNS[candidate, gemm.value] += 1
            return a.to(dtype) @ b.to(dtype).t()
        if 0 in (m, n, k):
            return torch.zeros(m, n, dtype=dtype, device=a.device)
        problem = Problem(gemm=gemm, m=m, n=n, k=k, dtype=dtype_name(dtype), target=target_of(a.device))
        chosen = require_supported(candidate, problem)
        casts = chosen.recipe.casts(gemm)
        assert casts is not None
        padded = chosen.padded(problem)
        quantized_a = quantize_operand(a, casts[0], padded=(padded.m, padded.k), health=health, slot=BAD_A)
        quantized_b = quantize_operand(b, casts[1], padded=(padded.n, padded.k), health=health, slot=BAD_B)
        out = chosen.run(quantized_a, quantized_b, dtype)
        _RUNS[candidate, gemm.value] += 1
        return out[:m, :n].contiguous()
