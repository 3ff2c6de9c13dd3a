"""Current scales: from the very tensor that is about to be written in FP8, in a pass of its own.

    scale = 2^ceil(log2(max |values| / largest))        largest: the format's, 448 for e4m3

The pass reads what the producer is going to read (core/producer.py) and writes one number. The scale is
monotone in the maximum, so that parts of a tensor may each raise it, and no launch has to follow. What
is not finite has no say: it becomes NaN in FP8 under any scale, and the rest keeps its precision.
"""

from __future__ import annotations

import struct

import torch

from loka.core.chain import Epilogue
from loka.core.producer import Parameters, Rounded, apply_epilogue, differentiate
from loka.core.recipe import Format

LIMIT = 100  # of |exponent|: far from zero, subnormals and infinity, for a scale and its inverse
_MANTISSA = 0x7FFFFF


def scale_for(amax: torch.Tensor, largest: torch.Tensor, margin: torch.Tensor | int = 0) -> torch.Tensor:
    """The scale for maxima float32, with `margin` octaves to spare; `largest` int32 holds a float32's bits.

    With amax = m 2^e and largest = m' 2^e', mantissas in [1, 2): the exponent is e - e' + (m > m').
    A subnormal amax counts as 2^-127: any margin leaves that below the lower limit.
    """
    bits = amax.view(torch.int32)
    exponent = (bits >> 23) - (largest >> 23) + margin
    exponent = exponent + ((bits & _MANTISSA) > (largest & _MANTISSA)).to(torch.int32)
    return ((exponent.clamp(-LIMIT, LIMIT) + 127) << 23).view(torch.float32)


def largest_bits(format: Format) -> int:
    return int.from_bytes(struct.pack(">f", format.max))


def scale_produced(
    z: torch.Tensor, epilogue: Epilogue, parameters: Parameters, *, scale: torch.Tensor
) -> None:
    """Raises `scale` float32 [1] until no finite element of A = E(z) [T, N] saturates in e4m3.

    It is zero before the first part of a tensor, and then at least 2^-100.
    """
    _raise(scale, apply_epilogue(z.detach(), epilogue, parameters), Format.E4M3)


def scale_derived(
    grad: torch.Tensor,
    z: torch.Tensor | Rounded | None,
    epilogue: Epilogue,
    parameters: Parameters,
    *,
    scale: torch.Tensor,
    units: torch.Tensor | None = None,
    real: bool = False,
    format: Format = Format.E4M3,
) -> None:
    """As `scale_produced`, of dZ [T, N] in units; arguments as those of core/producer.derive."""
    values = grad.float()
    if real and units is not None:
        values = values * torch.where(units == 0, 0.0, units.reciprocal()).view(-1, 1)
    if z is not None:
        values = differentiate(values, z, epilogue, parameters)[0]
    _raise(scale, values, format)


def _raise(scale: torch.Tensor, values: torch.Tensor, format: Format) -> None:
    if values.numel():
        amax = values.abs().where(values.isfinite(), 0.0).amax().view(1)
        largest = torch.tensor(largest_bits(format), device=values.device)
        torch.maximum(scale, scale_for(amax, largest), out=scale)
