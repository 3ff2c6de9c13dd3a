"""Quantization on the fastest path for the device: one Triton cast on CUDA, else the reference.

`health` int64 [3] of a site's GEMM counts [runs, non-finite A seen, non-finite B seen]. On
CUDA the cast kernel writes it, so watching for NaN costs no launch and no synchronization.
"""

from __future__ import annotations

import torch

from loka.core.recipe import Cast, Granularity
from loka.core.reference import Quantized, quantize, scale_of

RUNS, BAD_A, BAD_B = 0, 1, 2


def quantize_operand(
    hp: torch.Tensor, cast: Cast, *, padded: tuple[int, int], health: torch.Tensor | None, slot: int
) -> Quantized:
    """Quantizes `hp` [R, C] of any strides into `padded` sides; flags `health[slot]`."""
    if hp.device.type == "cuda":
        return _quantize_cuda(hp, cast, padded=padded, health=health, slot=slot)
    quantized = quantize(hp, cast, padded=padded)
    if health is not None:
        bad = (~torch.isfinite(quantized.scale)).any()
        health[slot].logical_or_(bad)
        if slot == BAD_A:
            health[RUNS] += 1
    return quantized


def _quantize_cuda(
    hp: torch.Tensor, cast: Cast, *, padded: tuple[int, int], health: torch.Tensor | None, slot: int
) -> Quantized:
    from loka.kernels.triton.cast import scaled_cast

    scale = scale_of(_group_amax(hp, cast, padded), cast)
    return scaled_cast(hp, scale, cast, padded=padded, health=health, slot=slot)


def _group_amax(hp: torch.Tensor, cast: Cast, padded: tuple[int, int]) -> torch.Tensor:
    """amax per group of the padded operand, in one read: the infinity norm keeps NaN."""
    rows, columns = padded
    group_rows, group_columns = cast.granularity.group(rows, columns)
    norm = torch.linalg.vector_norm
    infinity = float("inf")
    if cast.granularity is Granularity.TENSOR:
        return norm(hp, infinity, dtype=torch.float32).reshape(1, 1)
    if cast.granularity is Granularity.ROW:
        amax = norm(hp, infinity, dim=1, keepdim=True, dtype=torch.float32)
        return torch.nn.functional.pad(amax, (0, 0, 0, rows - amax.shape[0]))
    high, wide = -(-rows // group_rows), -(-columns // group_columns)
    spare = (0, wide * group_columns - hp.shape[1], 0, high * group_rows - hp.shape[0])
    whole = torch.nn.functional.pad(hp, spare) if any(spare) else hp
    groups = whole.unflatten(1, (wide, group_columns)).unflatten(0, (high, group_rows))
    return norm(groups, infinity, dim=(1, 3), dtype=torch.float32)
