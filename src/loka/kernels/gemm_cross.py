"""A DCN-V2 cross layer in two launches, for serving: each GEMM writes what the next one reads.

    v8 = cast(x8 V8^T / s_v)                     e4m3
    x' = x_0 * (v8 U8^T + b) + x                 bfloat16, and in e4m3 where another layer reads it;
                                                 in e4m3 alone where a chain does (nn/handover.py)

u = U V x is never in memory, nor is v in high precision: backward would want u, and the maxima of
both that delayed scales follow are not noted, so training runs kernels/cross.py. Full and other long ranks
run it too (LONGEST). On a CPU this is plain PyTorch, which is the twin of the kernel in
kernels/triton/gemm_cross.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from loka.core import cross as reference
from loka.core.cross import Crossed
from loka.core.problem import round_up
from loka.core.producer import cast_given
from loka.core.recipe import Format
from loka.kernels.legality import not_hopper

CAST_GEMM = "cast_gemm"  # of the `output` site of V: a library's, with a result in FP8
FUSED_CROSS = "fused_cross"  # of the `output` site of U, or of W at full rank

LONGEST = 1024  # of K: tiles of 64 rows of A and 64 of W are then 128 KB of 227


def unsupported(dtype: torch.dtype, target: str, inner: int) -> str | None:
    """Why a cross layer in `dtype` cannot run in this way, or None. M and N are free.

    `target` is "cpu" or an architecture such as "sm_90"; `inner` is K, the rank.
    """
    if inner > LONGEST:
        return f"K is {inner}; the kernel holds all of K in shared memory, up to {LONGEST}"
    if dtype != torch.bfloat16:
        return f"x is {dtype}; what the kernel reads and writes besides FP8 is bfloat16"
    return None if target == "cpu" else not_hopper(target)


def gemm_cast(
    a: torch.Tensor, w: torch.Tensor, scale_a: torch.Tensor, scale_w: torch.Tensor, *, fast: bool = True
) -> torch.Tensor:
    """cast(a w^T * scale_a * scale_w), e4m3 [M, N], of e4m3 a [M, K] and w [N, K], both row-major.

    `scale_a` float32 [1] is a's scale over the result's, for torch._scaled_mm has no scale for
    that. What lies beyond 448 saturates, and NaN stays. `fast` as in `gemm_cross`; on a GPU cuBLASLt
    computes it, so K and N are multiples of 16.
    """
    _check_operands(a, w, (scale_a, scale_w))
    if a.is_cuda:
        scales = scale_a.view(()), scale_w.view(())
        return torch._scaled_mm(a, w.t(), *scales, out_dtype=Format.E4M3.dtype, use_fast_accum=fast)
    return cast_given((a.float() @ w.float().t()) * (scale_a * scale_w), torch.ones_like(scale_a))


def gemm_cross(
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: torch.Tensor,
    scale_w: torch.Tensor,
    bias: torch.Tensor | None,
    x0: torch.Tensor,
    x: torch.Tensor,
    *,
    scale_out: torch.Tensor | None = None,
    keep: bool = True,
    fast: bool = True,
) -> Crossed:
    """x' = x0 * (a w^T * scale_a * scale_w + bias) + x: `hp` [M, N] where `keep`, and `row` [M, N16]
    with `scale_out`.

    Args:
        a, w: e4m3 [M, K] and [N16, K], row-major; N16 is N rounded up to 16, and K a multiple of it.
        scale_a, scale_w, scale_out: float32 [1], dequantizing, on the operands' device; `scale_out`
            is a power of two. What lies beyond it saturates, NaN and infinity become NaN.
        bias: [N] in any float dtype, or None.
        x0, x: bfloat16 [M, N]; any distance between rows.
        keep: whether `hp` is written; False needs a `scale_out`.
        fast: leave sums in the tensor core's register, about 14 bits, for all of K; otherwise
            they move to float32 after every 128 (core/reference.py).

    Raises ValueError for operands that do not fit together and for what `unsupported` names.
    """
    _check_operands(a, w, (scale_a, scale_w, scale_out))
    rows, features = x.shape
    sides = round_up(features, 16), round_up(rows, 16)
    if x0.shape != x.shape or x0.dtype != x.dtype or (a.shape[0], w.shape[0]) != (rows, sides[0]):
        raise ValueError(
            f"a {list(a.shape)}, w {list(w.shape)}, x_0 {x0.dtype} {list(x0.shape)} and x {x.dtype} "
            f"{list(x.shape)} do not fit together: w has {sides[0]} rows for {features} features"
        )
    if bias is not None and (bias.shape != (features,) or not bias.is_contiguous()):
        raise ValueError(
            f"the bias is {list(bias.shape)}; it is contiguous, one for each of {features} features"
        )
    if not keep and scale_out is None:
        raise ValueError("neither x' in bfloat16 nor a scale for it in e4m3 was asked for")
    reason = unsupported(x.dtype, _target(x), a.shape[1])
    if reason is not None:
        raise ValueError(f"no fused GEMM for this cross layer: {reason}")
    if a.is_cuda:
        from loka.kernels.triton.gemm_cross import gemm_cross_fused

        return gemm_cross_fused(
            a, w, scale_a, scale_w, bias, _lying(x0), _lying(x), scale_out=scale_out, keep=keep, fast=fast
        )
    u = ((a.float() @ w.float().t()) * (scale_a * scale_w))[:, :features]
    made = reference.cross_produce(u, bias, x0, x, scale=scale_out, sides=sides)
    return made if keep else replace(made, hp=None)


def _check_operands(a: torch.Tensor, w: torch.Tensor, scales: tuple[torch.Tensor | None, ...]) -> None:
    for name, operand in (("a", a), ("w", w)):
        if operand.dim() != 2 or operand.dtype != Format.E4M3.dtype or not operand.is_contiguous():
            raise ValueError(
                f"{name} is {operand.dtype} {list(operand.shape)} with strides {operand.stride()}; "
                "the kernel reads row-major e4m3 matrices"
            )
    if a.shape[1] != w.shape[1] or a.device != w.device or a.shape[1] % 16 or w.shape[0] % 16:
        raise ValueError(
            f"a {list(a.shape)} on {a.device} and w {list(w.shape)} on {w.device} do not fit together, "
            "with K and the rows of w in multiples of 16"
        )
    for scale in scales:
        if scale is not None and (
            scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != a.device
        ):
            raise ValueError(
                f"a scale is {scale.dtype} {list(scale.shape)} on {scale.device}; "
                f"scales are float32 [1] on {a.device}"
            )


def _target(tensor: torch.Tensor) -> str:
    if not tensor.is_cuda:
        return "cpu"
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return f"sm_{major}{minor}"


def _lying(tensor: torch.Tensor) -> torch.Tensor:
    """With rows that lie in memory; any distance between them."""
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] == 1 else tensor.contiguous()
