"""What the kernels of DCN-V2's cross layers compute, in plain PyTorch: ground truth, and the CPU path.

    forward     x' = x_0 * (u + b) + x                     u = U V x, or W x where the rank is full
    backward    g = dL/dx',  du = g * x_0,  t = (du U) V,  dL/dx = g + t
                dx_0 = sum over layers of g * (u + b)

Gradients inside a layer travel in units of rows (core/producer.py): du' = du / r in, t' = t / r out.
g itself is not in units: it is kept in high precision, and nothing multiplies it in FP8.

The transposed copies, for grad_weight, carry the unit on the side of the gradient: r du'^T. So the
other operand can be written in forward, where x is made, and x itself need not be kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loka.core.producer import cast_given, largest_unit, note, padded
from loka.core.recipe import Format


@dataclass(frozen=True, kw_only=True)
class Crossed:
    """x' [T, N] in the dtype of x, None where only FP8 is read; in e4m3 `row` [T, N16] and
    `turned` [N16, T16], where asked."""

    hp: torch.Tensor | None
    row: torch.Tensor | None = None
    turned: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class CrossGrad:
    """What backward makes at one cross layer.

    grad [T, N]: g, without units, in high precision.
    row [T, N16]: du' in e4m3 under `grad_scale`.
    turned [N16, T16]: r du'^T in e4m3 under `turned_scale` [1, 1] = grad_scale * max r.
    bias: float32 [N], without units; None where there is none.
    """

    grad: torch.Tensor
    row: torch.Tensor
    turned: torch.Tensor
    turned_scale: torch.Tensor
    bias: torch.Tensor | None


def cross_produce(
    u: torch.Tensor,
    bias: torch.Tensor | None,
    x0: torch.Tensor,
    x: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    sides: tuple[int, int],
    turned: bool = False,
    seen: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> Crossed:
    """x' = x0 * (u + bias) + x, computed in float32.

    Args:
        u, x0, x: [T, N] in high precision; bias: [N] or None.
        scale: float32 [1], a power of two: asks for `row`, and for `turned` too where that is set.
        sides: (N16, T16), what N and T are padded to, with zeros, in the FP8 results.
        seen, counts: as in core/producer.note, of x'.
    """
    outer = u.float() if bias is None else u.float() + bias.float()
    value = x0.float() * outer + x.float()
    row = column = None
    if scale is not None:
        note(value, scale, seen, counts)
        row = _cast(value, scale, (value.shape[0], sides[0]))
        column = _cast(value.t(), scale, sides) if turned else None
    return Crossed(hp=value.to(x.dtype), row=row, turned=column)


def cross_derive(
    grad: torch.Tensor,
    inner: torch.Tensor | None,
    x0: torch.Tensor,
    *,
    units: torch.Tensor,
    largest: torch.Tensor,
    grad_scale: torch.Tensor,
    sides: tuple[int, int],
    bias: bool = False,
    seen: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> CrossGrad:
    """g and du' = g * x0 / r of one layer, in one pass.

    Args:
        grad: [T, N], g of the layer above, whose `inner` is given; else g of this layer.
        inner: t' [T, N], in units, of the layer above: g = grad + r t'. None for the last layer.
        x0: [T, N] in high precision.
        units, largest: float32 [T] and int32 [1], from core/producer.row_units of the stack's g.
        grad_scale: float32 [1], a power of two: scale of du'.
        sides: (N16, T16), what N and T are padded to, with zeros, in the FP8 results.
        bias: asks for the gradient of the layer's bias.
        seen, counts: as in core/producer.note, of du'.
    """
    unit = units.view(-1, 1)
    top = largest_unit(largest)
    value = grad.float() * torch.where(unit == 0, 0.0, unit.reciprocal())
    if inner is not None:
        value = value + inner.float()
    du = value * x0.float()
    note(du, grad_scale, seen, counts)
    turned_scale = grad_scale * top
    return CrossGrad(
        grad=grad if inner is None else (value * unit).to(grad.dtype),
        row=_cast(du, grad_scale, (du.shape[0], sides[0])),
        turned=_cast((du * unit).t(), turned_scale, sides),
        turned_scale=turned_scale.view(1, 1),
        bias=(du * unit).sum(0) if bias else None,
    )


def cross_gather(
    grads: Sequence[torch.Tensor],
    outers: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    inner: torch.Tensor,
    *,
    units: torch.Tensor,
    joint: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dx_0 = sum over layers of g * (u + b), and dx = g + r t' of the first layer, both [T, N].

    Args:
        grads, outers, biases: g [T, N], u [T, N] and b [N] or None of every layer, the first first.
        inner: t' [T, N] of the first layer, in units.
        units: float32 [T].
        joint: the stack's first x is x_0 itself, so that dx is part of dx_0; then only that is returned.
    """
    dx = grads[0].float() + inner.float() * units.view(-1, 1)
    dx0 = dx if joint else torch.zeros_like(dx)
    for grad, outer, bias in zip(grads, outers, biases, strict=True):
        dx0 = dx0 + grad.float() * (outer.float() if bias is None else outer.float() + bias.float())
    dtype = grads[0].dtype
    return dx0.to(dtype), None if joint else dx.to(dtype)


def _cast(values: torch.Tensor, scale: torch.Tensor, sides: tuple[int, int]) -> torch.Tensor:
    return padded(cast_given(values, scale).view(torch.uint8), *sides).view(Format.E4M3.dtype)
