"""What may follow a GEMM in its own epilogue, in plain PyTorch: ground truth, and the CPU path.

    A = E(Z),  E = activation(norm(Z + bias) * gamma + beta)

A backward pass starts from Z, or behind a norm from Z in eight bits (`Rounded`):

    Z ~ s (ceil(Z / s) - 1/2)       s a power of two, 127 s not below the largest |Z| of a row and block

Uniform steps suit what a norm reads: of 256 normal values the largest is three times the rms, so that s is
a 32nd of the rms and the noise s^2 / 12 lies 41 dB below, where e4m3's lies 31.5. Steps end at zero, which
counts as negative: so every sign stays, and with it ReLU's slope, as long as nothing but a factor lies
between Z and the activation. A bias, a mean taken off and a beta are more (`may_round`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import nn

from loka.core.recipe import Format


class Norm(StrEnum):
    NONE = "none"
    BLOCK = "block"  # RMSNorm over fixed blocks of features
    RMS = "rms"
    LAYER = "layer"


class Activation(StrEnum):
    NONE = "none"
    HARD_SWISH = "hard_swish"
    RELU = "relu"
    SWISH = "swish"
    GELU = "gelu"  # the exact one, by erf


@dataclass(frozen=True, kw_only=True)
class Epilogue:
    """activation(norm(z) * gamma + beta). `block` is for Norm.BLOCK: features a norm reduces over.

    `gamma` and `beta` say whether the norm has them.
    """

    norm: Norm = Norm.NONE
    block: int = 0
    eps: float = 0.0
    gamma: bool = False
    beta: bool = False
    activation: Activation = Activation.NONE


class Parameters(NamedTuple):
    """Each [N] or None: the linear layer's bias, the norm's gamma and beta."""

    bias: torch.Tensor | None = None
    gamma: torch.Tensor | None = None
    beta: torch.Tensor | None = None


NO_PARAMETERS = Parameters()


class Rounded(NamedTuple):
    """What backward starts from instead of Z: values uint8 [T, N], ceil(Z / s) + 127, and the steps s
    float32 [T, blocks], of each row and block of the norm: 0 where all of Z is, NaN where some of it is
    not finite."""

    values: torch.Tensor
    steps: torch.Tensor


# A step's bits from those of the largest |Z|: a power of two is an exponent; 127 = 1.984375 * 2^6.
STEP_CARRY = 0x1FFFF  # carries mantissas above 1.984375 into the exponent
STEP_EXPONENT = 6 << 23
STEP_LEAST = 27 << 23  # 2^-100: its reciprocal is finite
ROUNDED_PARTS = 256  # of a step: what a value's place in it is rounded to first
ROUNDED_BLOCK = 256  # the widest norm behind which Z may be kept in eight bits
ROUNDED_LARGEST = 2.0**118  # 3e35; restoring what is larger would overflow, so it counts as infinite


def apply_epilogue(z: torch.Tensor, epilogue: Epilogue, parameters: Parameters) -> torch.Tensor:
    """E(z) [T, N] in float32."""
    values = z.float()
    if parameters.bias is not None:
        values = values + parameters.bias.float()
    if epilogue.norm is not Norm.NONE:
        values = torch.cat([_normalized(block, epilogue) for block in _blocks(values, epilogue)], dim=-1)
    if parameters.gamma is not None:
        values = values * parameters.gamma.float()
    if parameters.beta is not None:
        values = values + parameters.beta.float()
    return _activated(values, epilogue.activation)


def block_of(epilogue: Epilogue, features: int) -> int:
    """How many features are normalized together."""
    return min(epilogue.block, features) if epilogue.norm is Norm.BLOCK else features


def _blocks(values: torch.Tensor, epilogue: Epilogue) -> tuple[torch.Tensor, ...]:
    return values.split(block_of(epilogue, values.shape[-1]), dim=-1)


def _normalized(block: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
    if epilogue.norm is Norm.LAYER:
        block = block - block.mean(dim=-1, keepdim=True)
    return block * torch.rsqrt(block.square().mean(dim=-1, keepdim=True) + epilogue.eps)


def _activated(y: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation is Activation.HARD_SWISH:
        return y * (y / 6 + 0.5).clamp(0, 1)
    if activation is Activation.RELU:
        return nn.functional.relu(y)
    if activation is Activation.SWISH:
        return y * torch.sigmoid(y)
    if activation is Activation.GELU:
        return y * (0.5 * (1 + torch.erf(y * math.sqrt(0.5))))
    return y


def may_round(epilogue: Epilogue, features: int, *, bias: bool) -> bool:
    """Whether Z [T, `features`] may be kept in eight bits.

    It and what its activation sees have the same signs and the same relative noise: behind a norm that takes
    off no mean, and without a linear layer's bias or the norm's beta. And no value is so far above its block
    that the steps, which are made for it, are too coarse for the others: of b values the largest is at most
    sqrt(b) rms, so that wide norms are left out.
    """
    signs_stay = epilogue.norm in (Norm.BLOCK, Norm.RMS) and not epilogue.beta and not bias
    return signs_stay and block_of(epilogue, features) <= ROUNDED_BLOCK


def empty_rounded(rows: int, features: int, epilogue: Epilogue, device: torch.device) -> Rounded:
    blocks = -(-features // block_of(epilogue, features))
    return Rounded(
        torch.empty(rows, features, dtype=torch.uint8, device=device),
        torch.empty(rows, blocks, dtype=torch.float32, device=device),
    )


def keep_rounded(z: torch.Tensor, epilogue: Epilogue, into: Rounded) -> None:
    """Writes z [T, N], any float dtype, in eight bits, for backward."""
    for place, block in enumerate(_blocks(z.float(), epilogue)):
        steps = _step(block.abs().amax(dim=1)) if len(block) else block.new_empty(0)
        inverse = torch.where(steps == 0, 0.0, steps.reciprocal()).unsqueeze(1)
        # A NaN's byte says nothing: its step is NaN.
        parts = (block.double() * inverse * ROUNDED_PARTS - 1).nan_to_num(0).round().to(torch.int32)
        first = place * block_of(epilogue, z.shape[1])
        into.values[:, first : first + block.shape[1]] = (parts // ROUNDED_PARTS + 128).to(torch.uint8)
        into.steps[:, place] = steps


def _step(largest: torch.Tensor) -> torch.Tensor:
    bits = largest.view(torch.int32)
    power = (((bits + STEP_CARRY) & 0x7F800000) - STEP_EXPONENT).clamp_min(STEP_LEAST).view(torch.float32)
    finite = torch.where(largest < ROUNDED_LARGEST, power, torch.nan)
    return torch.where(largest == 0, 0.0, finite)


def restored(kept: Rounded, epilogue: Epilogue) -> torch.Tensor:
    """Z float32 [T, N] as it was kept."""
    features = kept.values.shape[1]
    steps = kept.steps.repeat_interleave(block_of(epilogue, features), dim=1)[:, :features]
    return (kept.values.float() - 127.5) * steps


def cast_given(values: torch.Tensor, scale: torch.Tensor, format: Format = Format.E4M3) -> torch.Tensor:
    """float32 values to FP8 under a power-of-two scale known beforehand; NaN and infinity become NaN."""
    values = values.where(values.isfinite(), torch.nan)
    return (values * scale.reciprocal()).clamp(-format.max, format.max).to(format.dtype)
