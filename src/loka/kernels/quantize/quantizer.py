"""Quantization on the fastest path for the device: Triton on CUDA, else the reference.

Hopper's FP8 tensor cores contract over K-major operands only, so a tensor is wanted twice in
training: the input [T, in] for `output` and transposed for `grad_weight`, grad_output for both
gradients, the weight for `output` and `grad_input`. `quantize_pair` makes both copies from one
read; `quantize_operand` makes the one that a GEMM by itself needs.

`health` (side.py) is written by the quantizing kernel, so watching for NaN costs no launch and no
synchronization.
"""

from collections.abc import Sequence

import torch

from loka.core.numerics.hot_columns import append
from loka.core.numerics.reference import Quantized, quantize
from loka.core.recipe import Cast
from loka.kernels.quantize.side import Copies, Operand, Side, run_index


def quantize_operand(
    hp: torch.Tensor, cast: Cast, *, padded: tuple[int, int], health: torch.Tensor | None, slot: int
) -> Quantized:
    """Quantizes `hp` [R, C] of any strides into `padded` sides; flags `health[slot]`, counts operand A."""
    side = Side(cast=cast, padded=padded, flag=slot, count=run_index(slot))
    if hp.stride(1) != 1 and hp.stride(0) == 1:  # a transposed view: read it as it lies in memory
        quantized = quantize_pair(hp.t(), row=None, column=side, health=health)[1]
    else:
        quantized = quantize_pair(hp, row=side, column=None, health=health)[0]
    assert quantized is not None
    return quantized


def quantize_pair(
    hp: torch.Tensor,
    *,
    row: Side | None,
    column: Side | None,
    given: torch.Tensor | None = None,
    health: torch.Tensor | None = None,
) -> Copies:
    """Quantizes `hp` [R, C] by `row` and `hp`^T [C, R] by `column`, either or both.

    Args:
        given: float32 [1], a scale known beforehand (a server's) for tensor casts; values beyond it
            saturate. Without it scales are current.
        health: int64, flat or not; `Side.flag` and `Side.count` are places in it.
    """
    return quantize_pairs(((hp, row, column),), given=given, health=health)[0]


def quantize_pairs(
    operands: Sequence[Operand], *, given: torch.Tensor | None = None, health: torch.Tensor | None = None
) -> list[Copies]:
    """`quantize_pair` of operands of one device, each a (hp, row, column): on CUDA together, which spares the host."""
    # No recipe has INT8 under a given scale; the kernels could not show in it what is not finite.
    integers = any(side is not None and side.cast.format.uniform for _, *sides in operands for side in sides)
    if operands[0][0].device.type == "cuda" and not (integers and given is not None):
        from loka.kernels.quantize.triton.quantize import quantize_fused

        return quantize_fused(operands, given=given, health=health)
    return [
        (
            _reference(hp, row, given, health) if row else None,
            _reference(hp.t(), column, given, health) if column else None,
        )
        for hp, row, column in operands
    ]


def append_residuals(low: Quantized, hp: torch.Tensor, columns: torch.Tensor | None, *, second: bool = False) -> None:
    """`append` (core/numerics/hot_columns.py); nothing where `low.cast` is not hot, or without columns."""
    if columns is None or not low.cast.hot:
        return
    if hp.device.type == "cuda":
        from loka.kernels.quantize.triton.residuals import append_residuals_fused

        append_residuals_fused(low, hp, columns, second=second)
    else:
        append(low, hp, columns, second=second)


def _reference(hp: torch.Tensor, side: Side, given: torch.Tensor | None, health: torch.Tensor | None) -> Quantized:
    quantized = quantize(hp, side.cast, padded=side.padded, scale=given)
    if health is not None:
        flat = health.view(-1)
        if side.flag >= 0:
            shown = quantized.scale if given is None else hp
            flat[side.flag].logical_or_((~torch.isfinite(shown)).any())
        if side.count >= 0:
            flat[side.count] += 1
    return quantized
