"""DHEN (arXiv 2203.11014): layers that ensemble several interaction modules over tokens X [n, d].

    X' = LN(concat_i(Interaction_i(X)) + R X)        n -> modules * m tokens; R only where n changes

    dot         reshape(W_m (C_i . C_j for i > j))    C = W_c X, at most `dot_tokens` compressed tokens
    cross       W_m (x * (U V x + b) + x)             x = flatten(X): a DCN-V2 layer whose x_0 is X
    linear      W_m X
    attention   W_m Encoder(X)                        one Transformer encoder layer, norms after each part

Layer and shortcut are the paper's equations 1 and 2, the modules its 3 (dot, there "AdvancedDLRM"), 4
(attention), 6 (linear) and 7 (cross), as others quote it: its own text was not at hand. The ensemble may be
a concatenation, a sum or a weighted sum: here a concatenation, so each module writes `m` tokens. The paper's
cross module has no skip of its own, ours is DCN-V2's with one; dots are taken between compressed tokens, as
all pairs of 770 are 296,065 features, and no MLP follows them; its convolution (5) is left out.

As composite of Wukong's and DCN's parts it stands in for LoKA's External Large FM, which is not published
beyond two GEMM shapes; `presets` has a size with both of them. A history, if the rows have one,
enters as `pooled` tokens by attention (PMA).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from loka.zoo.attention import AttentionPool, SelfAttention
from loka.zoo.dcn import CrossLayer
from loka.zoo.dlrm import PairwiseDots
from loka.zoo.layers import Front, TokenLinear, mlp


class DotInteraction(nn.Module):
    """[B, n, d] -> [B, out_tokens, d] from dots of distinct tokens, compressed where there are more."""

    def __init__(self, tokens: int, dim: int, *, out_tokens: int, dot_tokens: int) -> None:
        super().__init__()
        self.compress = TokenLinear(tokens, dot_tokens) if tokens > dot_tokens else nn.Identity()
        self.dots = PairwiseDots(min(tokens, dot_tokens))
        self.out = nn.Linear(self.dots.out_features, out_tokens * dim)
        self.shape = (out_tokens, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.dots(self.compress(x))).unflatten(1, self.shape)


class CrossInteraction(nn.Module):
    """[B, n, d] -> [B, out_tokens, d]: a cross layer over all n d features, then a map over tokens."""

    def __init__(self, tokens: int, dim: int, *, out_tokens: int, rank: int) -> None:
        super().__init__()
        self.cross = CrossLayer(tokens * dim, rank=rank)
        self.out = TokenLinear(tokens, out_tokens)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1)
        return self.out(self.cross(flat, flat).view_as(x))


class AttentionInteraction(nn.Module):
    """[B, n, d] -> [B, out_tokens, d]: attention and a feed-forward part, each with residual and norm."""

    def __init__(self, tokens: int, dim: int, *, out_tokens: int, heads: int, hidden: int, activation: str) -> None:
        super().__init__()
        self.attention = SelfAttention(dim, heads=heads, rotary=False)
        self.attention_norm = nn.LayerNorm(dim)
        self.feed = mlp(dim, (hidden, dim), activation=activation, last_activation=False)
        self.feed_norm = nn.LayerNorm(dim)
        self.out = TokenLinear(tokens, out_tokens)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention_norm(x + self.attention(x))
        return self.out(self.feed_norm(x + self.feed(x)))


class DHENLayer(nn.Module):
    """[B, n, d] -> [B, out_tokens, d]; `interactions` by name, each [B, n, d] -> [B, module_tokens, d]."""

    def __init__(self, tokens: int, dim: int, *, interactions: Mapping[str, nn.Module], module_tokens: int) -> None:
        super().__init__()
        self.interactions = nn.ModuleDict(interactions)
        self.out_tokens = len(interactions) * module_tokens
        same = tokens == self.out_tokens
        self.residual = nn.Identity() if same else TokenLinear(tokens, self.out_tokens)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.cat([interaction(x) for interaction in self.interactions.values()], dim=1)
        return self.norm(found + self.residual(x))


class DHEN(nn.Module):
    """dense [B, D], sparse [B, F], with a history also sequence [B, L] and lengths [B] -> logits [B]."""

    def __init__(
        self,
        front: Front,
        *,
        layers: int,
        module_tokens: int,
        dot_tokens: int,
        rank: int,
        heads: int,
        hidden: int,
        top: Sequence[int],
        pooled: int,
        activation: str = "relu",
        norm: bool = False,
    ) -> None:
        super().__init__()
        self.front = front
        dim, reads = front.dim, front.history is not None
        self.pool = AttentionPool(dim, heads=heads, outputs=pooled) if reads else None
        tokens = front.tokens + (pooled if reads else 0)
        stack = []
        for _ in range(layers):
            size = {"tokens": tokens, "dim": dim, "out_tokens": module_tokens}
            interactions = {
                "dot": DotInteraction(**size, dot_tokens=dot_tokens),
                "cross": CrossInteraction(**size, rank=rank),
                "linear": TokenLinear(tokens, module_tokens),
                "attention": AttentionInteraction(**size, heads=heads, hidden=hidden, activation=activation),
            }
            layer = DHENLayer(tokens, dim, interactions=interactions, module_tokens=module_tokens)
            stack.append(layer)
            tokens = layer.out_tokens
        self.layers = nn.Sequential(*stack)
        self.top = mlp(tokens * dim, top, activation=activation, norm=norm)
        self.logit = nn.Linear(top[-1], 1)

    def forward(
        self,
        dense: torch.Tensor,
        sparse: torch.Tensor,
        sequence: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.front(dense, sparse)
        events = self.front.events(sequence, lengths)
        if self.pool is not None and events is not None:
            x = torch.cat([x, self.pool(*events)], dim=1)
        return self.logit(self.top(self.layers(x).flatten(1))).squeeze(1)
