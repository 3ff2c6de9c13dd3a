"""A linear layer that writes what the next one reads, FP8 or 16 bits: GEMM, BlockNorm, activation, cast in one kernel.

    Z [M, N] = a [M, K] @ w [N, K]^T * scale_a * scale_w        e4m3 operands, float32 sums
    x        = cast(activation(Z / rms(Z)) / scale)             epilogue.py

Z itself is never in memory; what backward starts from is, in eight bits. On a CPU this is plain PyTorch,
which is the twin of the kernel in kernels/gemm/triton/gemm.py.
"""

import torch

from loka.core.recipe import Format
from loka.kernels.gemm.epilogue import Epilogue, Normed, apply_epilogue, inverse_rms, kept_inverse, rounded
from loka.kernels.gemm.legality import not_hopper

BLOCKS = (64, 128, 256)  # a norm's block lies inside a tile; 256 columns are the widest tile


def unsupported(epilogue: Epilogue, *, columns: int, inner: int, target: str) -> str | None:
    """Why data [M, columns] of operands [., inner] cannot be produced, or None.

    `target` is "cpu" or an architecture such as "sm_90"; M is free.
    """
    for side, size in (("N", columns), ("K", inner)):
        if size < 16 or size % 16:
            return f"{side}={size} is not a multiple of 16"
    if epilogue.block not in BLOCKS:
        return f"the norm's block of {epilogue.block} is none of {', '.join(map(str, BLOCKS))}"
    if columns % epilogue.block:
        return f"N={columns} is not a multiple of the norm's block of {epilogue.block}"
    return None if target == "cpu" else not_hopper(target)


def gemm_normed(
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: torch.Tensor,
    scale_w: torch.Tensor,
    epilogue: Epilogue,
    *,
    keep: bool,
    fast: bool = True,
) -> Normed:
    """E(a [M, K] @ w [N, K]^T) in the epilogue's dtype; with Z in eight bits where `keep`.

    Args:
        a, w: e4m3, row-major.
        scale_a: float32 [1], or [M] of rows; dequantizing, on the operands' device.
        scale_w: float32 [1].
        fast: leave sums in the tensor core's register, about 14 bits, for all of K; otherwise
            they move to float32 after every 128 (core/numerics/reference.py).

    Raises ValueError for operands that do not fit together and whatever `unsupported` names.
    """
    _check(a, w, scale_a, scale_w, epilogue)
    if a.device.type == "cuda":
        from loka.kernels.gemm.triton.gemm import gemm_normed_fused

        return gemm_normed_fused(a, w, scale_a, scale_w, epilogue, keep=keep, fast=fast)
    # The kernel's factors are scalars of rows, so its scale, too, comes after the sums.
    z = (a.float() @ w.float().t()) * (scale_a.view(-1, 1) * scale_w)
    if keep:
        return Normed(normed_data(z, epilogue), kept_inverse(z, epilogue), rounded(z, epilogue))
    return Normed(normed_data(z, epilogue), inverse_rms(z, epilogue), None)


def normed_data(z: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
    """E(z) [M, N] in the epilogue's dtype; a block that is not finite is NaN."""
    return (apply_epilogue(z, epilogue) / epilogue.scale).to(epilogue.dtype)


def _check(a: torch.Tensor, w: torch.Tensor, scale_a: torch.Tensor, scale_w: torch.Tensor, epilogue: Epilogue) -> None:
    for name, operand in (("a", a), ("w", w)):
        if operand.dim() != 2 or operand.dtype != Format.E4M3.dtype or not operand.is_contiguous():
            raise ValueError(
                f"{name} is {operand.dtype} {list(operand.shape)} with strides {operand.stride()}; "
                "the kernel reads row-major e4m3 matrices"
            )
    if a.shape[1] != w.shape[1] or a.device != w.device:
        raise ValueError(f"a {list(a.shape)} on {a.device} and w {list(w.shape)} on {w.device} do not fit together")
    for scale, sizes in ((scale_a, (1, a.shape[0])), (scale_w, (1,))):
        if scale.dtype != torch.float32 or scale.numel() not in sizes or scale.device != a.device:
            raise ValueError(
                f"a scale is {scale.dtype} {list(scale.shape)} on {scale.device}; "
                f"it has to be float32 of {' or '.join(map(str, sizes))} on {a.device}"
            )
    target = "cpu"
    if a.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(a.device)
        target = f"sm_{major}{minor}"
    reason = unsupported(epilogue, columns=w.shape[0], inner=a.shape[1], target=target)
    if reason is not None:
        raise ValueError(f"no GEMM with {epilogue}: {reason}")
