"""What follows a GEMM in its own epilogue, in plain PyTorch: ground truth, and the CPU path.

    v = Z / sqrt(mean(Z^2 over a block) + eps)      E(Z) = activation(v)      x8 = e4m3(E(Z) / scale)

|v| <= sqrt(block) whatever Z is, and no activation makes it larger: so the scale is known beforehand. A result
that no FP8 GEMM reads leaves in 16 bits instead, without a scale.

A backward pass starts from Z in eight bits (`Rounded`) and from 1 / rms, 0 where all of a block came out as zero
though Z is not: what follows forward saw zeros, and a gradient that did not know would be up to 1 / sqrt(eps) times too
large at each norm.

    Z ~ s (ceil(Z / s) - 1/2)       s a power of two, 127 s not below the largest |Z| of a row and block

Uniform steps suit what a norm reads: of 256 normal values the largest is three times the rms, so that s is
a 32nd of the rms and the noise s^2 / 12 lies 41 dB below, where e4m3's lies 31.5. Steps end at zero, which
counts as negative: so every sign stays, and with it ReLU's slope.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import nn

from loka.core.recipe import Format
from loka.kernels.edge.twin import scale_above


class Activation(StrEnum):
    NONE = "none"
    HARD_SWISH = "hard_swish"
    RELU = "relu"
    SWISH = "swish"
    GELU = "gelu"  # the exact one, by erf


@dataclass(frozen=True, kw_only=True)
class Epilogue:
    """activation(z / rms(z)) over blocks of `block` features: BlockNorm, and what follows it. `dtype`: of the result,
    e4m3, bfloat16 or float16."""

    block: int
    eps: float
    activation: Activation
    dtype: torch.dtype = Format.E4M3.dtype

    @property
    def scale(self) -> float:
        """Of the result: the least power of two that the bound sqrt(block) leaves below 448 times it; 1 in 16 bits."""
        if self.dtype != Format.E4M3.dtype:
            return 1.0
        return 2.0 ** math.ceil(math.log2(math.sqrt(self.block) / Format.E4M3.max))

    @property
    def vanishing(self) -> float:
        """The largest |v| of which e4m3 leaves nothing but zeros, by half of its smallest number, 2^-9, and the
        activation's slope at 0; 0 in 16 bits.
        """
        if self.dtype != Format.E4M3.dtype:
            return 0.0
        slope = 1.0 if self.activation in (Activation.NONE, Activation.RELU) else 0.5
        return self.scale * 2.0**-10 / slope


class Rounded(NamedTuple):
    """Z for backward: values uint8 [T, N], ceil(Z / s) + 127, and the steps s float32 [T, N / block]: 0 where
    all of a block is 0, NaN where some of it is not finite. `scales` float32 [T, N / block]: what each block of the
    result would be scaled by if it were alone, a power of two up to `Epilogue.scale`; NaN likewise."""

    values: torch.Tensor
    steps: torch.Tensor
    scales: torch.Tensor


class Normed(NamedTuple):
    """data [M, N] in `Epilogue.dtype` under `Epilogue.scale`; inverse_rms float32 [M, N / block], NaN where Z is not
    finite; z: what backward starts from, or None: with it inverse_rms is 0 where a block vanished."""

    data: torch.Tensor
    inverse_rms: torch.Tensor
    z: Rounded | None


# A step's bits from those of the largest |Z|: a power of two is an exponent; 127 = 1.984375 * 2^6.
STEP_CARRY = 0x1FFFF  # carries mantissas above 1.984375 into the exponent
STEP_EXPONENT = 6 << 23
STEP_LEAST = 27 << 23  # 2^-100: its reciprocal is finite
ROUNDED_PARTS = 256  # of a step: what a value's place in it is rounded to first
ROUNDED_LARGEST = 2.0**118  # 3e35; restoring what is larger would overflow, so it counts as infinite
ROUNDED_MIDDLE = 127.5  # s (byte - this) is Z again


def inverse_rms(z: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
    """1 / sqrt(mean(z^2) + eps), float32 [T, N / block], of z [T, N]; NaN where a block is not finite."""
    mean = _blocks(z, epilogue).square().mean(dim=2)
    return torch.where(mean < torch.inf, torch.rsqrt(mean + epilogue.eps), torch.nan)


def kept_inverse(z: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
    """`inverse_rms` as backward reads it, 0 where nothing but zeros came out of a block that is not zero."""
    inverse, largest = inverse_rms(z, epilogue), _blocks(z, epilogue).abs().amax(dim=2)
    return torch.where((largest > 0) & (largest * inverse <= epilogue.vanishing), 0.0, inverse)


def apply_epilogue(z: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
    """E(z) float32 [T, N] of z [T, N]."""
    values = _blocks(z, epilogue) * inverse_rms(z, epilogue).unsqueeze(2)
    return _activated(values.view(z.shape), epilogue.activation)


def _blocks(z: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
    return z.float().reshape(z.shape[0], z.shape[1] // epilogue.block, epilogue.block)


def _activated(v: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation is Activation.HARD_SWISH:
        return v * (v / 6 + 0.5).clamp(0, 1)
    if activation is Activation.RELU:
        return nn.functional.relu(v)
    if activation is Activation.SWISH:
        return v * torch.sigmoid(v)
    if activation is Activation.GELU:
        return v * (0.5 * (1 + torch.erf(v * math.sqrt(0.5))))
    return v


def rounded(z: torch.Tensor, epilogue: Epilogue) -> Rounded:
    """z [T, N], any float dtype, in eight bits, for backward."""
    blocks = _blocks(z, epilogue)
    steps = _step(blocks.abs().amax(dim=2))
    steps = torch.where(inverse_rms(z, epilogue).isnan(), torch.nan, steps)
    inverse = torch.where(steps == 0, 0.0, steps.reciprocal()).unsqueeze(2)
    # A NaN's byte says nothing: its step is NaN.
    parts = (blocks.double() * inverse * ROUNDED_PARTS - 1).nan_to_num(0).round().to(torch.int32)
    values = (parts // ROUNDED_PARTS + 128).to(torch.uint8).view(z.shape)
    bounds = blocks.abs().amax(dim=2) * kept_inverse(z, epilogue)  # no activation makes a value larger
    return Rounded(values, steps, scale_above(bounds))


def _step(largest: torch.Tensor) -> torch.Tensor:
    bits = largest.view(torch.int32)
    power = (((bits + STEP_CARRY) & 0x7F800000) - STEP_EXPONENT).clamp_min(STEP_LEAST).view(torch.float32)
    finite = torch.where(largest < ROUNDED_LARGEST, power, torch.nan)
    return torch.where(largest == 0, 0.0, finite)


def restored(kept: Rounded, epilogue: Epilogue) -> torch.Tensor:
    """Z float32 [T, N] as it was kept."""
    return (_blocks(kept.values, epilogue) - ROUNDED_MIDDLE).mul(kept.steps.unsqueeze(2)).view_as(kept.values)
