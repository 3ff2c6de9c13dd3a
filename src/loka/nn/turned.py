"""TurnedLinear: a linear layer over tokens that reads a transposed view as it lies in memory.

    x [.., D, K], a view of X [.., K, D]:     y = x W^T [.., D, N]  =  (W X)^T

As one GEMM over all rows, x must first be copied into rows of K, and what follows reads y across
memory. Here W multiplies each X, in a batched GEMM, and y is a view of [.., N, D]: neither copy is
made, and the module that transposes back gets memory in order. `y.view(..)` as of a contiguous tensor is the
one thing it cannot take: Probe notes where that is done (probe/views.py). The dtype is that of the layer it
was; results differ by the order of sums. An input that lies otherwise takes the plain path.

It is the same module object with another class.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from loka.core.exceptions import NotConverted
from loka.nn.unwrap import named_modules

_VECTOR = 8  # elements of 16 bytes in bf16


def lies_turned(x: torch.Tensor) -> bool:
    """Whether x [.., D, K] is a transposed view of [.., K, D], whose outer sides are one batch."""
    if x.is_nested or x.layout is not torch.strided or x.dim() < 3:
        return False
    features, inner = x.shape[-1], x.shape[-2]
    if features < 2 or inner < 2 or x.stride(-2) != 1 or x.stride(-1) < inner:
        return False
    outer = list(zip(x.shape[:-2], x.stride()[:-2], strict=True))
    return all(stride == size * below for (_, stride), (size, below) in itertools.pairwise(outer))


class _TokenMap(torch.autograd.Function):
    """W [N, K], X [B, K, D] -> W X [B, N, D] of one dtype; a batched GEMM for it and for each gradient.

    Rows of odd lengths would cost twice the time: W lies in padded ones, and where K is odd the
    parts of its gradient [B, N, K], which are summed over B, are written transposed.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(_in_padded_rows(weight).expand(x.shape[0], -1, -1), x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        weight, x = ctx.saved_tensors
        grad_weight = grad_x = None
        if ctx.needs_input_grad[0]:
            if x.shape[1] % _VECTOR:
                parts = torch.bmm(x, grad.mT).sum(0, dtype=torch.float32).t()
            else:
                parts = torch.bmm(grad, x.mT).sum(0, dtype=torch.float32)
            grad_weight = parts.to(weight.dtype)
        if ctx.needs_input_grad[1]:
            grad_x = torch.bmm(_in_padded_rows(weight).t().expand(x.shape[0], -1, -1), grad)
        return grad_weight, grad_x


def _in_padded_rows(weight: torch.Tensor) -> torch.Tensor:
    features = weight.shape[1]
    return nn.functional.pad(weight, (0, -features % _VECTOR))[:, :features]


class TurnedLinear(nn.Linear):
    """See the module's text."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not lies_turned(input):
            return super().forward(input)
        inner, weight = input.shape[-2], self.weight
        x = input.mT.reshape(-1, self.in_features, inner)
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            weight, x = weight.to(dtype), x.to(dtype)
        out = _TokenMap.apply(weight, x)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype).unsqueeze(-1)
        return out.reshape(*input.shape[:-2], self.out_features, inner).mT


def turn_linear(linear: nn.Linear, *, path: str) -> None:
    """Turns `linear`, exactly an nn.Linear, into a TurnedLinear in place; NotConverted for others."""
    if type(linear) is not nn.Linear:
        raise NotConverted(
            f"cannot turn {path}",
            why=[f"it is a {type(linear).__name__}"],
            way_out="revert the model, or skip this layer",
        )
    linear.__class__ = TurnedLinear


def turned_linears(model: nn.Module) -> dict[str, TurnedLinear]:
    """By module path."""
    return {path: m for path, m in named_modules(model) if isinstance(m, TurnedLinear)}


def restore_turned(linear: TurnedLinear) -> None:
    linear.__class__ = nn.Linear  # type: ignore[assignment]
