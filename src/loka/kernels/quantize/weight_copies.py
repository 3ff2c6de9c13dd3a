"""FP8 copies of one weight: what they are, and the twin of the kernels in plain PyTorch.

    scale = 2^max(ceil(log2(max|W|)) - 8, -100)        row = fp8(W / scale),  column = row^T

A weight W [N, K] has sides N16 and K16, which are N and K rounded up to multiples of 16. The scale comes from
the weight as it is now: nothing saturates, since no |W| / scale exceeds 256, and nothing can be stale, since
no call leaves anything behind. It is a power of two, which the bits of a float32 tell: no device rounds it in
its own way. A weight that holds NaN or infinity has a scale and bytes of NaN, in the padding too:
every product with it is NaN, and none hides it.
"""

from typing import NamedTuple

import torch

from loka.core.problem import round_up

FP8 = torch.float8_e4m3fn
OCTAVES = 8  # 2^8 is the largest power of two that e4m3 holds
SMALLEST = (127 - 100) << 23  # the bits of 2^-100, the scale of a weight of zeros
NAN_SCALE = 0x7FC00000  # bits
NAN_BYTE = 0x7F
SIDE = 16  # of what FP8 GEMMs take
_INFINITY, _MANTISSA = 0x7F800000, 0x7FFFFF


class Copies(NamedTuple):
    """Of a weight [N, K]: FP8 row [N16, K16] and column [K16, N16], or [0] where nobody asked for it, and
    scale float32 [max(N16, K16)], one value all over: slices of it serve as scales of rows or of a tensor."""

    row: torch.Tensor
    column: torch.Tensor
    scale: torch.Tensor


def padded_sides(weight: torch.Tensor) -> tuple[int, int]:
    """N16 and K16 of a weight [N, K]."""
    return round_up(weight.shape[0], SIDE), round_up(weight.shape[1], SIDE)


def unwritten(weight: torch.Tensor, *, transposed: bool) -> Copies:
    rows, columns = padded_sides(weight)
    column = (columns, rows) if transposed else (0,)
    return Copies(
        torch.empty(rows, columns, dtype=FP8, device=weight.device),
        torch.empty(column, dtype=FP8, device=weight.device),
        torch.empty(torch.sym_max(rows, columns), dtype=torch.float32, device=weight.device),
    )


def scale_bits(weight: torch.Tensor) -> torch.Tensor:
    """The bits of the scale, int32 []."""
    if weight.numel() == 0:
        return torch.full((), SMALLEST, dtype=torch.int32, device=weight.device)
    return bits_of_scale(weight.abs().amax().float())


def bits_of_scale(largest: torch.Tensor) -> torch.Tensor:
    """The bits, int32, of the scales of weights whose largest magnitudes are `largest`, float32 of any
    shape."""
    finite = largest < float("inf")  # asked of the number: a NaN's bits may have a sign
    bits = torch.where(finite, largest, 0.0).view(torch.int32)
    power = ((bits + _MANTISSA) & _INFINITY) - (OCTAVES << 23)
    return torch.where(finite, power.clamp_min(SMALLEST), NAN_SCALE)


def quantize_weight(weight: torch.Tensor, *, transposed: bool) -> Copies:
    """The twin of the kernels: copies of one weight [N, K] in plain PyTorch."""
    weight = weight.detach()
    rows, columns = padded_sides(weight)
    scale = scale_bits(weight).view(torch.float32)
    values = weight.float() / scale  # by a power of two: exact wherever FP8 can tell
    data = torch.zeros(rows, columns, dtype=torch.uint8, device=weight.device)
    data[: weight.shape[0], : weight.shape[1]] = values.to(FP8).view(torch.uint8)
    data = torch.where(scale.isnan(), NAN_BYTE, data)
    column = data.t().clone(memory_format=torch.contiguous_format) if transposed else data.new_empty(0)
    return Copies(data.view(FP8), column.view(FP8), scale.repeat(max(rows, columns)))
