"""A linear layer that produces the next one's FP8 input: GEMM, norm, activation and cast at once.

    Z [M, N] = a [M, K] @ w [N, K]^T * scale_a * scale_w      e4m3 operands, float32 sums
    out = cast(activation(norm(Z)) / scale_out)               e4m3, or bfloat16 without a scale

Nothing between the GEMM and the cast is ever in memory, except Z in bfloat16 where a backward
pass will want it, or Z in eight bits (core/epilogue.Rounded). On a CPU this is plain PyTorch, which is
the twin of the kernel in kernels/gemm/triton/gemm.py.
"""

from __future__ import annotations

import torch

from loka.core.recipe import Format
from loka.kernels.gemm.epilogue import (
    NO_PARAMETERS,
    Epilogue,
    Norm,
    Rounded,
    apply_epilogue,
    cast_given,
    keep_rounded,
)
from loka.kernels.gemm.legality import not_hopper

_BLOCKS = (64, 128, 256)  # a norm's block lies inside a tile; 256 columns are the widest tile


def unsupported(epilogue: Epilogue, *, columns: int, inner: int, target: str) -> str | None:
    """Why out [M, columns] of operands [., inner] cannot be produced, or None.

    `target` is "cpu" or an architecture such as "sm_90"; M is free.
    """
    for side, size in (("N", columns), ("K", inner)):
        if size < 16 or size % 16:
            return f"{side}={size} is not a multiple of 16"
    if epilogue.norm not in (Norm.NONE, Norm.BLOCK):
        return f"a {epilogue.norm} norm reduces over more than a tile; takes a block norm or none"
    if epilogue.gamma or epilogue.beta:
        return "the norm has elementwise parameters"
    if epilogue.norm is Norm.BLOCK and epilogue.block not in _BLOCKS:
        return f"the norm's block of {epilogue.block} is none of {', '.join(map(str, _BLOCKS))}"
    if epilogue.norm is Norm.BLOCK and columns % epilogue.block:
        return f"N={columns} is not a multiple of the norm's block of {epilogue.block}"
    return None if target == "cpu" else not_hopper(target)


def gemm_produce(
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: torch.Tensor,
    scale_w: torch.Tensor,
    epilogue: Epilogue,
    *,
    scale_out: torch.Tensor | None,
    keep: bool,
    into: Rounded | None = None,
    fast: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out [M, N] of a [M, K] and w [N, K], and Z [M, N] in bfloat16 where `keep`, else None.

    Args:
        a, w: e4m3, row-major.
        scale_a, scale_w, scale_out: float32 [1], dequantizing, on the operands' device.
        scale_out: of the e4m3 result; what lies beyond it saturates, NaN and infinity become NaN.
            None for a result in bfloat16.
        into: before a norm, where to write what backward starts from, instead of `keep`.
        fast: leave sums in the tensor core's register, about 14 bits, for all of K; otherwise
            they move to float32 after every 128 (core/numerics/reference.py).

    Raises ValueError for operands that do not fit together and whatever `unsupported` names.
    """
    _check(a, w, (scale_a, scale_w, scale_out), epilogue)
    if a.device.type == "cuda":
        from loka.kernels.gemm.triton.gemm import gemm_produce_fused

        return gemm_produce_fused(
            a, w, scale_a, scale_w, epilogue, scale_out=scale_out, keep=keep, into=into, fast=fast
        )
    # The kernel's factors are scalars of rows, so its scale, too, comes after the sums.
    z = (a.float() @ w.float().t()) * (scale_a * scale_w)
    if into is not None:
        keep_rounded(z, epilogue, into)
    return produce(z, epilogue, scale_out=scale_out), z.bfloat16() if keep else None


def produce(z: torch.Tensor, epilogue: Epilogue, *, scale_out: torch.Tensor | None) -> torch.Tensor:
    """cast(activation(norm(z)) / scale_out) of z [M, N] in any float dtype, computed in float32."""
    value = apply_epilogue(z, epilogue, NO_PARAMETERS)
    return value.bfloat16() if scale_out is None else cast_given(value, scale_out)


def _check(
    a: torch.Tensor, w: torch.Tensor, scales: tuple[torch.Tensor | None, ...], epilogue: Epilogue
) -> None:
    for name, operand in (("a", a), ("w", w)):
        if operand.dim() != 2 or operand.dtype != Format.E4M3.dtype or not operand.is_contiguous():
            raise ValueError(
                f"{name} is {operand.dtype} {list(operand.shape)} with strides {operand.stride()}; "
                "the kernel reads row-major e4m3 matrices"
            )
    if a.shape[1] != w.shape[1] or a.device != w.device:
        raise ValueError(
            f"a {list(a.shape)} on {a.device} and w {list(w.shape)} on {w.device} do not fit together"
        )
    for scale in scales:
        if scale is not None and (
            scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != a.device
        ):
            raise ValueError(
                f"a scale is {scale.dtype} {list(scale.shape)} on {scale.device}; "
                f"scales are float32 [1] on {a.device}"
            )
    target = "cpu"
    if a.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(a.device)
        target = f"sm_{major}{minor}"
    reason = unsupported(epilogue, columns=w.shape[0], inner=a.shape[1], target=target)
    if reason is not None:
        raise ValueError(f"no fused GEMM for {epilogue}: {reason}")
