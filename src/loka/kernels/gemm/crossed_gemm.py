"""A linear layer and a cross layer behind it, which writes the next one's FP8 input: one kernel. Formulas: cross.py.

On a CPU this is plain PyTorch, which is the twin of the kernels in triton/crossed.py.
"""

import torch

from loka.core.recipe import Format
from loka.kernels.gemm.cross import Crossed, bound_of_rows, crossed
from loka.kernels.gemm.legality import not_hopper


def unsupported(*, columns: int, inner: int, target: str) -> str | None:
    """Why x [T, columns] of operands [., inner] cannot be produced, or None. `target` is "cpu" or as "sm_90"."""
    for side, size in (("N", columns), ("K", inner)):
        if size < 16 or size % 16:
            return f"{side}={size} is not a multiple of 16"
    return None if target == "cpu" else not_hopper(target)


def row_bound(
    a: torch.Tensor,
    scale_a: torch.Tensor,
    longest: torch.Tensor,
    bias: torch.Tensor | None,
    scale_p: torch.Tensor,
    scale_r: torch.Tensor | None,
) -> torch.Tensor:
    """u float32 [T, 1].

    Args:
        a: e4m3 [T, K]; scale_a: float32 [T], or [T, 1].
        longest: float32 [1], as `longest_row` gives it.
        bias: [N], or None for none.
        scale_p, scale_r: float32 [T], or [T, 1]: 448 times them is no less than the largest |p| and |r| of a row.
            None for no r.
    """
    if a.device.type == "cuda":
        from loka.kernels.gemm.triton.crossed import row_bound_fused

        return row_bound_fused(a, scale_a, longest, bias, scale_p, scale_r)
    return bound_of_rows(a, scale_a, longest, bias, scale_p, scale_r)


def gemm_crossed(
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: torch.Tensor,
    scale_w: torch.Tensor,
    bias: torch.Tensor | None,
    p: torch.Tensor,
    r: torch.Tensor | None,
    scale: torch.Tensor,
    *,
    keep: bool,
    fast: bool = True,
) -> Crossed:
    """x8 of operands that `row_bound` gave `scale` for, and x where `keep`.

    Args:
        a, w: e4m3 [T, K], [N, K], row-major. scale_a: float32 [T] or [T, 1]; scale_w: float32, all one number.
        bias: bfloat16 [N] or None. p, r: bfloat16 [T, N], row-major; r may be p, or None.
        scale: float32 [T, 1], u.
        fast: as `gemm_normed` has it.

    Raises ValueError for operands that do not fit together and whatever `unsupported` names.
    """
    _check(a, w, scale_a, scale_w, bias, p, r, scale)
    if a.device.type == "cuda":
        from loka.kernels.gemm.triton.crossed import gemm_crossed_fused

        return gemm_crossed_fused(a, w, scale_a, scale_w, bias, p, r, scale, keep=keep, fast=fast)
    y = (a.float() @ w.float().t()) * (scale_a.view(-1, 1) * scale_w.flatten()[0])
    x, low = crossed(y, bias, p, r, scale)
    return Crossed(x.bfloat16() if keep else None, low)


def _check(
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: torch.Tensor,
    scale_w: torch.Tensor,
    bias: torch.Tensor | None,
    p: torch.Tensor,
    r: torch.Tensor | None,
    scale: torch.Tensor,
) -> None:
    for name, operand in (("a", a), ("w", w)):
        if operand.dim() != 2 or operand.dtype != Format.E4M3.dtype or not operand.is_contiguous():
            raise ValueError(
                f"{name} is {operand.dtype} {list(operand.shape)} with strides {operand.stride()}; "
                "the kernel reads row-major e4m3 matrices"
            )
    if a.shape[1] != w.shape[1]:
        raise ValueError(f"a {list(a.shape)} and w {list(w.shape)} do not fit together")
    rows, columns = a.shape[0], w.shape[0]
    for name, beside, shape in (("p", p, (rows, columns)), ("r", r, (rows, columns)), ("bias", bias, (columns,))):
        if beside is not None and (
            beside.dtype != torch.bfloat16 or tuple(beside.shape) != shape or not beside.is_contiguous()
        ):
            raise ValueError(
                f"{name} is {beside.dtype} {list(beside.shape)} with strides {beside.stride()}; "
                f"it has to be row-major bfloat16 {list(shape)}"
            )
    for name, each, sizes in (("scale_a", scale_a, (rows,)), ("scale", scale, (rows,)), ("scale_w", scale_w, None)):
        if each.dtype != torch.float32 or (sizes is not None and each.numel() not in sizes):
            raise ValueError(f"{name} is {each.dtype} {list(each.shape)}; it has to be float32 of {rows} rows")
    target = "cpu"
    if a.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(a.device)
        target = f"sm_{major}{minor}"
    reason = unsupported(columns=columns, inner=a.shape[1], target=target)
    if reason is not None:
        raise ValueError(f"no cross layer in a GEMM: {reason}")
