"""What a fused producer computes, in plain PyTorch: ground truth, and the CPU path.

    forward    A = E(Z),  E = activation(norm(Z + bias) * gamma + beta)        written in FP8
    backward   dZ = E'(Z) dA                                                   written in FP8, twice

Gradients travel in *units*: row i of dA is r_i times what is stored, where r_i is a power of two
next to the largest |dA| of the chain's last row. Backward is linear in each row, so a tensor scale
for the stored rows is a row scale r_i * scale for the gradient itself, and the GEMM need not know.
The unit comes back in by way of the other operand of grad_weight:

    dW = dZ^T A = sum_i (dZ_i / r_i) (r_i A_i)^T

All scales are powers of two, so moving r_i from one side to the other changes no bit.

Backward starts from Z, or behind a norm from Z in eight bits (`Rounded`):

    Z ~ s (ceil(Z / s) - 1/2)       s a power of two, 127 s not below the largest |Z| of a row and block

Uniform steps suit what a norm reads: of 256 normal values the largest is three times the rms, so that s is
a 32nd of the rms and the noise s^2 / 12 lies 41 dB below, where e4m3's lies 31.5. Steps end at zero, which
counts as negative: so every sign stays, and with it ReLU's slope, as long as nothing but a factor lies
between Z and the activation. A bias, a mean taken off and a beta are more (`may_round`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from loka.core.chain import Activation, Epilogue, Norm
from loka.core.recipe import Format

SMALLEST_UNIT = 2.0**-126  # float32's smallest normal number: its reciprocal is finite


class Parameters(NamedTuple):
    """Of one link, each [N] or None: the linear layer's bias, the norm's gamma and beta."""

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


def empty_rounded(rows: int, features: int, epilogue: Epilogue, device: torch.device) -> Rounded:
    blocks = -(-features // block_of(epilogue, features))
    return Rounded(
        torch.empty(rows, features, dtype=torch.uint8, device=device),
        torch.empty(rows, blocks, dtype=torch.float32, device=device),
    )


@dataclass(frozen=True, kw_only=True)
class Derived:
    """What backward makes at one link; None for what was not asked.

    row [T, N16] and turned [N16, T16]: dZ in FP8, under `grad_scale` and `turned_scale` [1, 1].
    activation [N16, T16]: r A^T in FP8 under `activation_scale` [1, 1].
    hp [T, N]: dZ without its units, in the dtype of the gradient.
    bias, gamma, beta: float32 [N], without units.
    """

    row: torch.Tensor | None = None
    turned: torch.Tensor | None = None
    turned_scale: torch.Tensor | None = None
    activation: torch.Tensor | None = None
    activation_scale: torch.Tensor | None = None
    hp: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    gamma: torch.Tensor | None = None
    beta: torch.Tensor | None = None


def apply_epilogue(z: torch.Tensor, epilogue: Epilogue, parameters: Parameters) -> torch.Tensor:
    """E(z) [T, N] in float32."""
    return _applied(z, epilogue, parameters)[0]


def _applied(
    z: torch.Tensor, epilogue: Epilogue, parameters: Parameters
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """E(z); its slope in what the activation sees; the normalized values; 1 / std of their blocks [T, N]."""
    values = z.float()
    if parameters.bias is not None:
        values = values + parameters.bias.float()
    inverse = torch.ones_like(values)
    if epilogue.norm is not Norm.NONE:
        parts = [_normalized(block, epilogue) for block in _blocks(values, epilogue)]
        values, inverse = (torch.cat(both, dim=-1) for both in zip(*parts, strict=True))
    normal = values
    if parameters.gamma is not None:
        values = values * parameters.gamma.float()
    if parameters.beta is not None:
        values = values + parameters.beta.float()
    out, slope = _activated(values, epilogue.activation)
    return out, slope, normal, inverse


def block_of(epilogue: Epilogue, features: int) -> int:
    """How many features are normalized together."""
    return min(epilogue.block, features) if epilogue.norm is Norm.BLOCK else features


def _blocks(values: torch.Tensor, epilogue: Epilogue) -> tuple[torch.Tensor, ...]:
    return values.split(block_of(epilogue, values.shape[-1]), dim=-1)


def _normalized(block: torch.Tensor, epilogue: Epilogue) -> tuple[torch.Tensor, torch.Tensor]:
    if epilogue.norm is Norm.LAYER:
        block = block - block.mean(dim=-1, keepdim=True)
    inverse = torch.rsqrt(block.square().mean(dim=-1, keepdim=True) + epilogue.eps)
    return block * inverse, inverse.expand_as(block)


def _activated(y: torch.Tensor, activation: Activation) -> tuple[torch.Tensor, torch.Tensor]:
    """act(y) and act'(y)."""
    if activation is Activation.HARD_SWISH:
        gate = (y / 6 + 0.5).clamp(0, 1)
        return y * gate, torch.where(y.abs() < 3, y / 6 + gate, gate)
    if activation is Activation.RELU:
        return nn.functional.relu(y), (y > 0).float()
    if activation is Activation.SWISH:
        gate = torch.sigmoid(y)
        return y * gate, gate * (1 + y * (1 - gate))
    if activation is Activation.GELU:
        gate = 0.5 * (1 + torch.erf(y * math.sqrt(0.5)))
        return y * gate, gate + y * torch.exp(-0.5 * y.square()) / math.sqrt(2 * math.pi)
    return y, torch.ones_like(y)


def may_round(epilogue: Epilogue, features: int, *, bias: bool) -> bool:
    """Whether Z [T, `features`] may be kept in eight bits.

    It and what its activation sees have the same signs and the same relative noise: behind a norm that takes
    off no mean, and without a linear layer's bias or the norm's beta. And no value is so far above its block
    that the steps, which are made for it, are too coarse for the others: of b values the largest is at most
    sqrt(b) rms, so that wide norms are left out.
    """
    signs_stay = epilogue.norm in (Norm.BLOCK, Norm.RMS) and not epilogue.beta and not bias
    return signs_stay and block_of(epilogue, features) <= ROUNDED_BLOCK


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


def differentiate(
    grad: torch.Tensor, z: torch.Tensor | Rounded, epilogue: Epilogue, parameters: Parameters
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dZ [T, N] float32 for dA = `grad`; E(z); what gamma, and what beta gets of each element.

    Written out, because autograd does not record inside of a custom op.
    """
    z = restored(z, epilogue) if isinstance(z, Rounded) else z
    out, slope, normal, inverse = _applied(z, epilogue, parameters)
    shifted = grad.float() * slope
    flow = shifted if parameters.gamma is None else shifted * parameters.gamma.float()
    if epilogue.norm is not Norm.NONE:
        parts = []
        for part, y, by in zip(*(_blocks(t, epilogue) for t in (flow, normal, inverse)), strict=True):
            inner = part - y * (part * y).mean(dim=-1, keepdim=True)
            if epilogue.norm is Norm.LAYER:
                inner = inner - part.mean(dim=-1, keepdim=True)
            parts.append(by * inner)
        flow = torch.cat(parts, dim=-1)
    return flow, out, shifted * normal, shifted


def cast_given(values: torch.Tensor, scale: torch.Tensor, format: Format = Format.E4M3) -> torch.Tensor:
    """float32 values to FP8 under a power-of-two scale known beforehand; NaN and infinity become NaN."""
    values = values.where(values.isfinite(), torch.nan)
    return (values * scale.reciprocal()).clamp(-format.max, format.max).to(format.dtype)


def padded(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return nn.functional.pad(values, (0, columns - values.shape[1], 0, rows - values.shape[0]))


def note(
    values: torch.Tensor, scale: torch.Tensor, seen: torch.Tensor | None, counts: torch.Tensor | None
) -> None:
    """Raises `seen` int32 [1] to the bits of max |values|; adds to `counts` int64 [2] what
    saturates under `scale` and what is rounded to zero."""
    if not values.numel():
        return
    if seen is not None:
        torch.maximum(seen, values.abs().amax().float().view(1).view(torch.int32), out=seen)
    if counts is not None:
        scaled = (values.float() * scale.reciprocal()).abs()
        counts[0] += (scaled > Format.E4M3.max).sum()
        counts[1] += ((scaled > 0) & (scaled <= Format.E4M3.smallest_subnormal / 2)).sum()


def produce(
    z: torch.Tensor,
    epilogue: Epilogue,
    parameters: Parameters,
    *,
    scale: torch.Tensor | None,
    columns: int,
    seen: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    into: Rounded | None = None,
) -> torch.Tensor:
    """A = E(z) in e4m3 [T, columns] under `scale` float32 [1]; without one in the dtype of z, [T, N].

    `into`, before a norm: where to write what backward starts from.
    """
    if into is not None:
        keep_rounded(z.detach(), epilogue, into)
    values = apply_epilogue(z.detach(), epilogue, parameters)
    if scale is None:
        return values.to(z.dtype)
    note(values, scale, seen, counts)
    return padded(cast_given(values, scale).view(torch.uint8), z.shape[0], columns).view(Format.E4M3.dtype)


def row_units(
    grad: torch.Tensor, largest: torch.Tensor, *, factors: tuple[torch.Tensor, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """units r float32 [T]: the least power of two that is not below max |grad_i|, zero for a zero row.

    Raises `largest` int32 [1] to the bits of max r. Also returns r times `factors` (float32 [1]
    each) [T, 1]: the row scales of a GEMM that leads out of the chain.
    """
    amax = grad.abs().amax(dim=1).float() if grad.numel() else grad.new_zeros(grad.shape[0]).float()
    mantissa, exponent = torch.frexp(amax.clamp_min(SMALLEST_UNIT))
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    units = torch.ldexp(torch.ones_like(amax), exponent)
    units = torch.where(amax == 0, 0.0, torch.where(amax.isfinite(), units, torch.nan))
    if units.numel():
        bits = units.view(torch.int32).where(units.isfinite(), 0x7FC00000)
        torch.maximum(largest, bits.amax().view(1).to(torch.int32), out=largest)
    row_scale = units.clone()
    for factor in factors:
        row_scale = row_scale * factor
    return units, row_scale.view(-1, 1)


def largest_unit(largest: torch.Tensor) -> torch.Tensor:
    """float32 [1] from the bits that `row_units` raised; 1 where all rows were zero."""
    value = largest.view(torch.float32)
    return torch.where(value == 0, 1.0, value)


def derive(
    grad: torch.Tensor,
    z: torch.Tensor | Rounded | None,
    epilogue: Epilogue,
    parameters: Parameters,
    *,
    sides: tuple[int, int],
    units: torch.Tensor | None = None,
    largest: torch.Tensor | None = None,
    real: bool = False,
    grad_scale: torch.Tensor | None = None,
    format: Format = Format.E4M3,
    row: bool = False,
    turned: bool = False,
    unit_in_turned: bool = False,
    activation_scale: torch.Tensor | None = None,
    hp: bool = False,
    seen: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> Derived:
    """Everything that backward needs of one link, from dA and Z, in one pass.

    Args:
        grad: dA [T, N] in high precision: in units, or as it is where `real`.
        z: Z [T, N], or what was kept instead; None where E is the identity.
        sides: (N16, T16), what N and T are padded to in the FP8 results.
        units: r float32 [T], with `largest` from `row_units`; None for all one.
        grad_scale: float32 [1], scale of dZ in units, for `row` and `turned`.
        unit_in_turned: `turned` is r dZ^T, its scale grad_scale * max r. For the chain's first
            linear layer, whose other operand was written in forward, without units.
        activation_scale: float32 [1], scale of A; asks for r A^T, under that times max r.
        hp: asks for dZ without units, in the dtype of `grad`: for the prologue.
        seen, counts: as in `note`, of dZ in units.
    """
    values = grad.float()
    row_unit = torch.ones_like(values[:, :1]) if units is None else units.view(-1, 1)
    top = largest_unit(largest) if largest is not None else values.new_ones(1)
    if real:
        values = values * torch.where(row_unit == 0, 0.0, row_unit.reciprocal())
    if z is None:
        dz, a, to_gamma, to_beta = values, None, values, values
    else:
        dz, a, to_gamma, to_beta = differentiate(values, z, epilogue, parameters)
    bias, gamma, beta = (
        None if parameter is None else (element * row_unit).sum(dim=0)
        for parameter, element in zip(parameters, (dz, to_gamma, to_beta), strict=True)
    )
    low_row = low_turned = turned_scale = low_activation = scaled_by = None
    columns, _ = sides
    if grad_scale is not None:
        note(dz, grad_scale, seen, counts)
        if row:
            low_row = _cast(dz, grad_scale, (dz.shape[0], columns), format)
        if turned:
            turned_scale = grad_scale * top if unit_in_turned else grad_scale
            value = dz * row_unit if unit_in_turned else dz
            low_turned = _cast(value.t(), turned_scale, sides, format)
    if activation_scale is not None:
        assert a is not None, "a link without a norm and an activation has no A of its own"
        scaled_by = activation_scale * top
        low_activation = _cast((a * row_unit).t(), scaled_by, sides, Format.E4M3)
    return Derived(
        row=low_row,
        turned=low_turned,
        turned_scale=None if turned_scale is None else turned_scale.view(1, 1),
        activation=low_activation,
        activation_scale=None if scaled_by is None else scaled_by.view(1, 1),
        hp=(dz * row_unit).to(grad.dtype) if hp else None,
        bias=bias,
        gamma=gamma,
        beta=beta,
    )


def _cast(values: torch.Tensor, scale: torch.Tensor, sides: tuple[int, int], format: Format) -> torch.Tensor:
    return padded(cast_given(values, scale, format).view(torch.uint8), *sides).view(format.dtype)
