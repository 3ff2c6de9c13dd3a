"""The site's GEMM as one opaque custom op: quantization and kernel, invisible to a compiler.

An exposed scale tensor would let Inductor change its strides, which kernels with a fixed
scale layout then read out of bounds; inside one op nothing can be rearranged. The op has a
fake, so torch.compile sees shapes and dtypes and graphs stay whole.
"""

from __future__ import annotations

from typing import Any

import torch

from loka.core.recipe import Gemm
from loka.kernels.run import run_gemm

GEMMS = (Gemm.OUTPUT, Gemm.GRAD_INPUT, Gemm.GRAD_WEIGHT)


@torch.library.custom_op("loka::site_gemm", mutates_args=())
def site_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    health: torch.Tensor,
    gemm: int,
    candidate: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """a [M, K] @ b [N, K]^T in `dtype` through `candidate`; `gemm` indexes GEMMS.

    `health` int64 [3, 3]: one row a GEMM, see kernels/quantizer.py. It is write-only telemetry
    that no result depends on, so the op is declared without side effects and writes through
    `.data`: a declared mutation would make autograd refuse the backward of a compiled model
    after any other forward, because the buffer that backward also takes had changed.
    """
    return run_gemm(candidate, a, b, gemm=GEMMS[gemm], dtype=dtype, health=health.data[gemm])


@site_gemm.register_fake
def _(
    a: torch.Tensor,
    b: torch.Tensor,
    health: torch.Tensor,
    gemm: int,
    candidate: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


class LinearGemms(torch.autograd.Function):
    """y [T, out] = x [T, in] @ weight [out, in]^T, each of the three GEMMs by its candidate.

    Saves x and weight in high precision; both are quantized again in backward, in the layouts
    that the gradient GEMMs contract over.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        health: torch.Tensor,
        candidates: tuple[str, str, str],
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.health = health
        ctx.candidates = candidates
        return site_gemm(x, weight, health, 0, candidates[0], x.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        health, candidates = ctx.health, ctx.candidates
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_input = site_gemm(grad_output, weight.t(), health, 1, candidates[1], x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = site_gemm(grad_output.t(), x.t(), health, 2, candidates[2], x.dtype)
            grad_weight = grad_weight.to(weight.dtype)
        return grad_input, grad_weight, None, None
