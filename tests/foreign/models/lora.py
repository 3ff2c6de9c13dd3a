"""LoRA by hand: a frozen base with a low-rank update, as modules, raw parameters and merged; a weight norm.

In the last two a GEMM's weight is computed from parameters: that GEMM has no parameter as its operand.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from foreign.spec import floats, per_row

RANK = 32


class LoRALinear(nn.Module):
    """base(x) + scaling * B(A(x)), the base frozen and held as a submodule, A and B as nn.Linear."""

    def __init__(self, base, rank=RANK):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        self.scaling = 0.5

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x)) * self.scaling


class RawLoRALinear(nn.Linear):
    """A subclass of nn.Linear with raw A and B: super().forward(x) + x @ A @ B."""

    def __init__(self, fan_in, fan_out, rank=RANK):
        super().__init__(fan_in, fan_out)
        self.weight.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(fan_in, rank) / fan_in**0.5)
        self.B = nn.Parameter(torch.randn(rank, fan_out) * 0.01)

    def forward(self, x):
        return super().forward(x) + x @ self.A @ self.B


class MergedLoRALinear(RawLoRALinear):
    """F.linear(x, weight + (A @ B).t()): the product of two parameters makes the weight of the layer."""

    def forward(self, x):
        return F.linear(x, self.weight + (self.A @ self.B).t(), self.bias)


def _wrapped():
    tower = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 1))
    tower[0], tower[2] = LoRALinear(tower[0]), LoRALinear(tower[2])
    return tower


def _tower(layer):
    return nn.Sequential(layer(64, 96), nn.ReLU(), layer(96, 64), nn.ReLU(), nn.Linear(64, 1))


_UPDATE = 2 * (64 + 96) * RANK
MODELS = [
    per_row(
        "lora_modules",
        _wrapped,
        floats(64),
        2 * 64 * 96 + _UPDATE + 64,
        without_gradient=("0.base.weight", "0.base.bias", "2.base.weight", "2.base.bias"),
        notes="Base weights are frozen: no grad_weight.",
    ),
    per_row(
        "lora_parameters",
        lambda: _tower(RawLoRALinear),
        floats(64),
        2 * 64 * 96 + _UPDATE + 64,
        without_gradient=("0.weight", "2.weight"),
        notes="A subclass of nn.Linear with GEMMs of its own.",
    ),
    per_row(
        "lora_merged",
        lambda: _tower(MergedLoRALinear),
        floats(64),
        64,
        flops_per_batch=2 * 2 * 64 * 96 * RANK,
        without_gradient=("0.weight", "2.weight"),
        notes="A @ B is a GEMM of two parameters; the weight is computed, in a subclass of nn.Linear.",
    ),
    per_row(
        "weight_norm",
        lambda: _tower(lambda fan_in, fan_out: weight_norm(nn.Linear(fan_in, fan_out))),
        floats(64),
        64,
        pickles=False,  # torch's parametrizations say so
        notes="torch.nn.utils.parametrizations.weight_norm: `weight` is computed on reading.",
    ),
]
