"""Attention over tokens, written out: softmax(q k^T / sqrt(d_h)) v.

Not `scaled_dot_product_attention`: its fused backward passes add in no fixed order, and a run that
is resumed has to end with the same bits. The price is memory, [B, heads, T, T] scores.
`qk_norm` and `post_norm` are places for the mod AttentionNorm, and do nothing without it.
Every map is an `nn.Linear`, so that its GEMM can be probed and planned; `nn.MultiheadAttention` hides them.
"""

import torch
from torch import nn


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
    """[..., T, d_h], keys and values [..., S, d_h] -> [..., T, d_h]; `seen` broadcasts to [..., T, S].

    Every query needs a key that it may see.
    """
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    return torch.matmul(scores.softmax(dim=-1), v)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions (arXiv 2104.09864): x [..., T, d_h] -> the same; pairs turn by t * 10000^(-i / half).

    Pair i is (x_i, x_{i + half}), t the place. The angles are computed in float32 or wider.
    """
    half = x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, torch.float32)
    place = torch.arange(x.shape[-2], device=x.device, dtype=dtype)
    speed = 10000.0 ** (-torch.arange(half, device=x.device, dtype=dtype) / half)
    angle = place.unsqueeze(1) * speed
    cos, sin = angle.cos(), angle.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)


def check_heads(dim: int, heads: int) -> None:
    if dim % (2 * heads):
        raise ValueError(f"{heads} heads need a width that {2 * heads} divides, not {dim}")


class SelfAttention(nn.Module):
    """x [B, T, dim], seen [B, T] or [B or 1, T, T] bool or None -> [B, T, dim]; i sees j where it is true.

    `rotary` turns queries and keys by place.
    """

    def __init__(self, dim: int, *, heads: int, rotary: bool) -> None:
        super().__init__()
        check_heads(dim, heads)
        self.heads = heads
        self.rotary = rotary
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.qk_norm, self.post_norm = nn.Identity(), nn.Identity()

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None = None) -> torch.Tensor:
        # [B, T, 3 dim] -> [3, B, heads, T, d_h]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = self.qk_norm(q), self.qk_norm(k)
        if self.rotary:
            q, k = rotate(q), rotate(k)
        if seen is not None:
            seen = seen[:, None, None, :] if seen.dim() == 2 else seen[:, None]
        return self.post_norm(self.out(attend(q, k, v, seen).transpose(1, 2).flatten(2)))


class AttentionPool(nn.Module):
    """PMA (Set Transformer, arXiv 1810.00825): learned queries read x [B, T, dim] -> [B, outputs, dim].

    The queries are the parameter itself: a Linear of a constant would add nothing.
    """

    def __init__(self, dim: int, *, heads: int, outputs: int) -> None:
        super().__init__()
        check_heads(dim, heads)
        self.heads = heads
        self.queries = nn.Parameter(torch.empty(heads, outputs, dim // heads))
        nn.init.normal_(self.queries)
        self.kv = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)
        self.qk_norm, self.post_norm = nn.Identity(), nn.Identity()

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None = None) -> torch.Tensor:
        """`seen` [B, T] bool; a row of which nothing is seen gives attention of zero."""
        k, v = self.kv(x).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = self.qk_norm(self.queries).to(k.dtype), self.qk_norm(k)
        if seen is None:
            found = attend(q, k, v, None)
            return self.post_norm(self.out(found.transpose(1, 2).flatten(2)))
        # An empty row attends to everything, and is then set to zero: no NaN, also not in the backward pass.
        empty = ~seen.any(dim=1, keepdim=True)
        found = attend(q, k, v, (seen | empty)[:, None, None, :])
        found = found.masked_fill(empty[:, :, None, None], 0.0)
        return self.post_norm(self.out(found.transpose(1, 2).flatten(2)))
