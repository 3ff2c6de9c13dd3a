"""Models as people write them, small: what lies between their layers differs."""

import torch
import torch.nn.functional as F
from torch import nn

from loka.nn.block_norm import BlockNorm


def relu():
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 32))


def relu_narrow():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


def layer_norm_silu():
    return nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.SiLU(), nn.Linear(96, 32))


def block_norm_hard_swish():
    return nn.Sequential(nn.Linear(64, 512, bias=False), BlockNorm(512), nn.Hardswish(), nn.Linear(512, 32, bias=False))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(64, 128) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(128, 64) for _ in range(2))

    def forward(self, x):
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        return x


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.gate, self.up = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)
        self.down = nn.Linear(96, 64, bias=False)

    def forward(self, x):
        normal = self.norm(x)
        return x + self.down(F.silu(self.gate(normal)) * self.up(normal))


class Cross(nn.Module):
    """DCNv2's low-rank cross layers by raw parameters, as TorchRec writes them, and an MLP."""

    def __init__(self):
        super().__init__()
        self.v = nn.ParameterList(nn.Parameter(0.1 * torch.randn(32, 64)) for _ in range(2))
        self.w = nn.ParameterList(nn.Parameter(0.1 * torch.randn(64, 32)) for _ in range(2))
        self.bias = nn.ParameterList(nn.Parameter(torch.zeros(64)) for _ in range(2))
        self.top = nn.Linear(64, 32)

    def forward(self, x):
        x_0 = x
        for v, w, bias in zip(self.v, self.w, self.bias, strict=True):
            x = x_0 * (F.linear(F.linear(x, v), w) + bias) + x
        return F.relu(self.top(x))


class GeGLU(nn.Module):
    """One layer makes value and gate: a slice of its output on either side of a product."""

    def __init__(self):
        super().__init__()
        self.both, self.down = nn.Linear(64, 256), nn.Linear(128, 64)

    def forward(self, x):
        value, gate = self.both(x).chunk(2, dim=-1)
        return self.down(value * F.gelu(gate))


class GatedCross(nn.Module):
    """A cross layer behind a gate of its own, which no code of LoKA's mentions."""

    def __init__(self):
        super().__init__()
        self.down, self.up, self.gate = nn.Linear(64, 32, bias=False), nn.Linear(32, 64), nn.Linear(64, 64)
        self.top = nn.Linear(64, 32)

    def forward(self, x):
        crossed = x * self.up(self.down(x)) * torch.sigmoid(self.gate(x)) + x
        return self.top(F.softsign(crossed))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(64, 192), nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x):
        tokens = x.unflatten(0, (-1, 4))
        q, k, v = self.qkv(self.norm(tokens)).chunk(3, dim=-1)
        return (tokens + self.out(F.scaled_dot_product_attention(q, k, v))).flatten(0, 1)


MODELS = {
    "relu": relu,
    "layer_norm_silu": layer_norm_silu,
    "block_norm_hard_swish": block_norm_hard_swish,
    "residual": Residual,
    "gated": Gated,
    "cross": Cross,
    "geglu": GeGLU,
    "gated_cross": GatedCross,
    "tokens": Tokens,
}


def made(name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return relu_narrow() if name == "relu_narrow" else MODELS[name]()
