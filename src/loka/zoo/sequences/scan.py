"""A state-space layer by chunked scan, in the manner of Mamba-2's SSD (arXiv 2405.21060).

    z, x, b, c, dt = split(W1 LN(X))          D -> 2 heads P + 2 N + heads; silu of x, b, c
    S_t = a_t S_{t-1} + dt_t x_t b_t^T        for each head, S [P, N], a_t = exp(-rate softplus(dt_t + bias))
    y_t = S_t c_t + skip x_t
    Y = W2 LN(y * silu(z)) + X                heads P -> D

Inside a chunk of tokens it is a product with a matrix of decays, between chunks the same recurrence over
their last states. These are products of activations, which no plan puts in FP8: W1 and W2 are the sites.
Under autocast the products are bf16, the decays float32.

Ours: no short convolution before the scan, LayerNorm for RMSNorm, one group of b and c; rates and steps
start spaced over the ranges that Mamba-2 draws them from.
"""

import math

import torch
from torch import nn
from torch.nn import functional


def decays(log_a: torch.Tensor) -> torch.Tensor:
    """[..., T] -> [..., T, T]: what is left at i of what came at j, exp(sum of log_a over j < t <= i)."""
    total = log_a.cumsum(-1)
    apart = total.unsqueeze(-1) - total.unsqueeze(-2)
    past = torch.ones(apart.shape[-2:], dtype=torch.bool, device=apart.device).tril()
    return apart.masked_fill(~past, float("-inf")).exp()


def chunked_scan(x: torch.Tensor, log_a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *, chunk: int) -> torch.Tensor:
    """S_t = exp(log_a_t) S_{t-1} + x_t b_t^T, y_t = S_t c_t, from S = 0.

    x [B, T, heads, P], log_a [B, T, heads], b and c [B, T, N] -> y of the shape of x.
    """
    length = x.shape[1]
    short = -length % chunk
    x = functional.pad(x, (0, 0, 0, 0, 0, short)).unflatten(1, (-1, chunk))  # [B, C, Q, heads, P]
    b, c = (functional.pad(part, (0, 0, 0, short)).unflatten(1, (-1, chunk)) for part in (b, c))
    log_a = functional.pad(log_a, (0, 0, 0, short)).unflatten(1, (-1, chunk)).permute(0, 3, 1, 2)
    total = log_a.cumsum(-1)  # [B, heads, C, Q]
    within = torch.einsum("bcin,bcjn->bcij", c, b).unsqueeze(1) * decays(log_a)
    found = torch.einsum("bhcij,bcjhp->bcihp", within.to(x.dtype), x)
    left = (total[..., -1:] - total).exp().permute(0, 2, 3, 1).unsqueeze(-1)
    states = torch.einsum("bcjn,bcjhp->bhcpn", b, x * left.to(x.dtype))
    ends = torch.einsum("bhzc,bhcpn->bhzpn", decays(total[..., -1]).to(states.dtype), states)
    before = functional.pad(ends[:, :, :-1], (0, 0, 0, 0, 1, 0))  # the state that a chunk starts from
    carried = torch.einsum("bcin,bhcpn->bcihp", c.to(before.dtype), before)
    found = found + carried * total.exp().permute(0, 2, 3, 1).unsqueeze(-1)
    return found.flatten(1, 2)[:, :length]


class ScanLayer(nn.Module):
    """x [B, T, D] -> the same; token t reads those up to t. Called as an HSTU layer is."""

    def __init__(self, width: int, *, heads: int, value_dim: int, state_dim: int, chunk: int) -> None:
        super().__init__()
        self.heads = heads
        self.chunk = chunk
        self.sizes = [heads * value_dim, heads * value_dim, state_dim, state_dim, heads]
        self.input_norm = nn.LayerNorm(width)
        self.into = nn.Linear(width, sum(self.sizes))
        self.activation = nn.SiLU()
        # Rates of 1 to 16, steps of 0.001 to 0.1: a head forgets in 1 to 1000 tokens.
        self.log_rate = nn.Parameter(torch.linspace(0.0, math.log(16.0), heads))
        step = torch.logspace(-3, -1, heads)
        self.step = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus of it is the step
        self.skip = nn.Parameter(torch.ones(heads, 1))
        self.norm = nn.LayerNorm(heads * value_dim)
        self.out = nn.Linear(heads * value_dim, width)

    def forward(self, x: torch.Tensor, sees: torch.Tensor, times: torch.Tensor | None = None) -> torch.Tensor:
        z, v, b, c, dt = self.into(self.input_norm(x)).split(self.sizes, dim=-1)
        v = self.activation(v).unflatten(2, (self.heads, -1))
        dt = functional.softplus(dt.to(self.step.dtype) + self.step)
        y = chunked_scan(
            v * dt.unsqueeze(-1).to(v.dtype),
            -dt * self.log_rate.exp(),
            self.activation(b),
            self.activation(c),
            chunk=self.chunk,
        )
        y = (y + self.skip * v).flatten(2)
        return self.out(self.norm(y * self.activation(z))) + x
