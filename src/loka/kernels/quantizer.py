"""Quantization on the fastest path for the device: one Triton cast on CUDA, else the reference.

`health` int64 [3] of a site's GEMM counts [runs, non-finite A seen, non-finite B seen]. On
CUDA the quantizing kernel writes it, so watching for NaN costs no launch and no synchronization.
"""

from __future__ import annotations

import torch

from loka.core.recipe import Cast
from loka.core.reference import Quantized, quantize

RUNS, BAD_A, BAD_B = 0, 1, 2


def quantize_operand(
    hp: torch.Tensor, cast: Cast, *, padded: tuple[int, int], health: torch.Tensor | None, slot: int
) -> Quantized:
    """Quantizes `hp` [R, C] of any strides into `padded` sides; flags `health[slot]`."""
    if hp.device.type == "cuda":
        from loka.kernels.triton.quantize import quantize_fused

        return quantize_fused(hp, cast, padded=padded, health=health, slot=slot)
    quantized = quantize(hp, cast, padded=padded)
    if health is not None:
        bad = (~torch.isfinite(quantized.scale)).any()
        health[slot].logical_or_(bad)
        if slot == BAD_A:
            health[RUNS] += 1
    return quantized
