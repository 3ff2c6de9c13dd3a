"""Quantization on the fastest path for the device: Triton on CUDA, else the reference.

Hopper's FP8 tensor cores contract over K-major operands only, so a tensor is wanted twice in
training: the input [T, in] for `output` and transposed for `grad_weight`, grad_output for both
gradients, the weight for `output` and `grad_input`. `quantize_pair` makes both copies from one
read; `quantize_operand` makes the one that a GEMM by itself needs.

`health` int64 of a site counts [runs, non-finite A seen, non-finite B seen]. The quantizing
kernel writes it, so watching for NaN costs no launch and no synchronization.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loka.core.problem import round_up
from loka.core.recipe import Cast, Granularity
from loka.core.reference import Quantized, quantize

RUNS, BAD_A, BAD_B = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Side:
    """One copy of a tensor: how it is cast and the sides it is padded to with zeros.

    `flag` is the place in `health` that is set when a group holds NaN or infinity, `count` the
    place that counts this quantization as a run; -1 for neither.
    """

    cast: Cast
    padded: tuple[int, int]
    flag: int = -1
    count: int = -1


def empty_scale(cast: Cast, sides: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Unwritten scales [groups of rows, groups of columns] of a quantized tensor, as they lie in memory.

    On CUDA 1x128 scales are column-major with rows padded to 4 floats, 128x128 scales row-major
    with columns padded to 4: what cuBLASLt, CUTLASS and DeepGEMM read without a copy.
    """
    group_rows, group_columns = cast.granularity.group(*sides)
    high, wide = -(-sides[0] // group_rows), -(-sides[1] // group_columns)
    if device.type == "cuda" and cast.granularity is Granularity.GROUP_1X128:
        return torch.empty(wide, round_up(high, 4), dtype=torch.float32, device=device).t()[:high]
    if device.type == "cuda" and cast.granularity is Granularity.BLOCK_128X128:
        return torch.empty(high, round_up(wide, 4), dtype=torch.float32, device=device)[:, :wide]
    return torch.empty(high, wide, dtype=torch.float32, device=device)


def quantize_operand(
    hp: torch.Tensor, cast: Cast, *, padded: tuple[int, int], health: torch.Tensor | None, slot: int
) -> Quantized:
    """Quantizes `hp` [R, C] of any strides into `padded` sides; flags `health[slot]`, counts operand A."""
    side = Side(cast=cast, padded=padded, flag=slot, count=RUNS if slot == BAD_A else -1)
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
    seen: torch.Tensor | None = None,
    health: torch.Tensor | None = None,
) -> tuple[Quantized | None, Quantized | None]:
    """Quantizes `hp` [R, C] by `row` and `hp`^T [C, R] by `column`, either or both.

    Args:
        given: float32 [1], a scale known beforehand (delayed scaling: from the maxima of earlier
            steps) for tensor casts; values beyond it saturate. Without it scales are current.
        seen: int32 [1], raised to the bits of max |hp| as float32, for the next step's scale.
        health: int64, flat or not; `Side.flag` and `Side.count` are places in it.
    """
    if hp.device.type == "cuda":
        from loka.kernels.triton.quantize import quantize_pair_fused

        if hp.stride(1) != 1 and hp.stride(0) == 1:  # a weight [K, N] that is read as [N, K], as it lies
            turned, lying = quantize_pair_fused(
                hp.t(), row=column, column=row, given=given, seen=seen, health=health
            )
            return lying, turned
        return quantize_pair_fused(hp, row=row, column=column, given=given, seen=seen, health=health)
    if seen is not None and hp.numel():
        torch.maximum(seen, hp.abs().amax().float().view(1).view(torch.int32), out=seen)
    return (
        _reference(hp, row, given, health) if row else None,
        _reference(hp.t(), column, given, health) if column else None,
    )


def _reference(
    hp: torch.Tensor, side: Side, given: torch.Tensor | None, health: torch.Tensor | None
) -> Quantized:
    quantized = quantize(hp, side.cast, padded=side.padded, scale=given)
    if health is not None:
        flat = health.view(-1)
        if side.flag >= 0:
            shown = quantized.scale if given is None else hp
            flat[side.flag].logical_or_((~torch.isfinite(shown)).any())
        if side.count >= 0:
            flat[side.count] += 1
    return quantized
