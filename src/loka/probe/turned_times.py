"""Timing a linear layer over tokens in both of its forms: on copied rows, and as the input lies.

    [B, K, D] -> transposed view [B, D, K] -> linear -> transposed back [B, N, D]

What is timed is the layer between the two transpositions, which is how models write it (nn/turned.py).
Both arms are compiled, in the layer's own precision.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from loka.core.compiling import compile_in_place
from loka.core.problem import DTYPES
from loka.core.report import HP, Measurement
from loka.core.signature import LinearShape
from loka.core.stats import LinearStats
from loka.nn.turned import turn_linear
from loka.probe.chain_times import race
from loka.probe.settings import Settings

TURNED = "turned"


class TokenMap(nn.Module):
    """[B, K D] -> [B, N D]: a linear layer between two transpositions."""

    def __init__(self, shape: LinearShape, inner: int) -> None:
        super().__init__()
        self.inner = inner
        self.linear = nn.Linear(shape.in_features, shape.out_features, bias=shape.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.unflatten(1, (self.linear.in_features, self.inner))
        return self.linear(tokens.transpose(1, 2)).transpose(1, 2).flatten(1)


def turned_key(layer: LinearStats, shape: LinearShape) -> str:
    """Equal for layers that take equally long."""
    gradients = layer.needs_input_grad, layer.needs_weight_grad
    return repr((shape, layer.turned, layer.rows, layer.dtype, layer.weight_dtype, gradients))


def time_turned(
    layer: LinearStats,
    shape: LinearShape,
    *,
    device: torch.device,
    settings: Settings,
    deadline: float | None = None,
) -> Mapping[str, Measurement]:
    """Times of "hp" and "turned", by name; a reason where one cannot run. For layers with `turned`."""
    plain = TokenMap(shape, layer.turned).to(device, DTYPES[layer.weight_dtype])
    turned = copy.deepcopy(plain)
    turn_linear(turned.linear, path="linear")
    for arm in (plain, turned):
        compile_in_place(arm)
    sides = shape.in_features * layer.turned, shape.out_features * layer.turned
    whole = replace(layer, rows=max(layer.rows // layer.turned, 1))
    return race(
        {HP: plain, TURNED: turned}, sides, whole, device=device, settings=settings, deadline=deadline
    )
