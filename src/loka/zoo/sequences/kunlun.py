"""Kunlun (arXiv 2602.10016): tokens X [n, d] and a history S [T, d], in layers that take turns.

    X_sum = Gate(W_x X)                                      n -> c tokens, every layer
    HSP, 4.3.2     H = SumKron(MHA(E, S, S))                 even layers; odd ones reuse it (CompSkip, 4.4.1)
                   SumKron(Z) = sum_i A_i^T Z W_i            more seeds E than tokens; A_i [seeds, pooled]
    experts, 4.4.3 X' = Wukong experts of [X_sum | H]        each has its share of the tokens
    GDPA, 4.3.1    S' = S + act(S_h K_h^T / tau) V_h         even layers; K_h, V_h from X_sum, heads h joined
    window, 4.3.3  S' = LN(S + MHA(S) within |i - j| <= w)   odd layers

Last logit = MLP(X). The paper's own text was not at hand: equations and sections are as public accounts
quote them, which agree in these. GDPA is InterFormer's PFFN, a two-layer f(X_sum) applied to S, written as
attention: queries are S itself; tau is the longest history, here a constant, so that padding changes nothing.

Ours: Gate, as in InterFormer; seeds without a norm and a query map, which of a constant add nothing; one
activation for all heads; an expert is LN(X + MLP(flatten(X X^T Y))), Wukong's FMB, without biases; S starts
as LN(Linear(events)) and ends with the last layer that reads it; positions are rotary by place, without the
paper's log(1 + time between) (ROTE). Not here: sizes by type of event (4.4.2), as a row has one history. The
window is a mask: all of T^2 is computed, and counted. Without a history: degraded, as InterFormer.

Weights of one kind lie in one parameter, [experts, in, out] and [k, ...], and are sites of LoKA as they are.
"""

from collections.abc import Sequence

import torch
from torch import nn

from loka.zoo.attention import AttentionPool, SelfAttention
from loka.zoo.layers import ACTIVATIONS, Front, TokenLinear, mlp
from loka.zoo.sequences.interformer import Gate


def _stacked(count: int, inputs: int, outputs: int, *, terms: int = 1) -> nn.Parameter:
    """[count, inputs, outputs], each as a Linear starts; `terms` products are added."""
    bound = (terms * inputs) ** -0.5
    return nn.Parameter(nn.init.uniform_(torch.empty(count, inputs, outputs), -bound, bound))


class SumKron(nn.Module):
    """sum_i A_i^T Z W_i: [B, seeds, d] -> [B, pooled, d], with rank (seeds pooled + d^2) weights."""

    def __init__(self, seeds: int, pooled: int, dim: int, *, rank: int) -> None:
        super().__init__()
        self.tokens = _stacked(rank, seeds, pooled)
        self.features = _stacked(rank, dim, dim, terms=rank)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        mixed = torch.einsum("bsd,kst->bktd", z, self.tokens)
        return torch.einsum("bktd,kde->bte", mixed, self.features)


class GDPA(nn.Module):
    """S + act(S_h K_h^T / tau) V_h: S [B, T, d], X_sum [B, c, d] -> [B, T, d]."""

    def __init__(self, dim: int, *, heads: int, longest: int, activation: str) -> None:
        super().__init__()
        self.heads = heads
        self.longest = longest
        self.kv = nn.Linear(dim, 2 * dim)
        self.activation = ACTIVATIONS[activation]()

    def forward(self, s: torch.Tensor, x_sum: torch.Tensor) -> torch.Tensor:
        k, v = self.kv(x_sum).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q = s.unflatten(-1, (self.heads, -1)).transpose(1, 2).to(k.dtype)
        weights = self.activation(torch.matmul(q, k.transpose(2, 3)) / self.longest)
        return s + torch.matmul(weights, v).transpose(1, 2).flatten(2)


class WindowAttention(nn.Module):
    """LN(S + MHA(S)): S [B, T, d] -> the same; event i sees j where |i - j| <= window, and itself."""

    def __init__(self, dim: int, *, heads: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.attention = SelfAttention(dim, heads=heads, rotary=True)
        self.norm = nn.LayerNorm(dim)

    def forward(self, s: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        place = torch.arange(s.shape[1], device=s.device)
        apart = (place.unsqueeze(1) - place).abs()
        near = (apart <= self.window).unsqueeze(0)
        if seen is not None:
            near = near & seen.unsqueeze(1) | (apart == 0)
        return self.norm(s + self.attention(s, near))


class WukongExperts(nn.Module):
    """[B, experts g, d] -> the same: expert m has tokens m g to (m + 1) g."""

    def __init__(self, dim: int, *, experts: int, tokens: int, rank: int, hidden: int, activation: str) -> None:
        super().__init__()
        if tokens % experts:
            raise ValueError(f"{experts} experts need a count of tokens that they divide, not {tokens}")
        share = tokens // experts
        self.experts = experts
        self.project = _stacked(experts, share, rank)
        self.inner_norm = nn.LayerNorm(share * rank)
        self.up = _stacked(experts, share * rank, hidden)
        self.activation = ACTIVATIONS[activation]()
        self.down = _stacked(experts, hidden, share * dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = x.unflatten(1, (self.experts, -1)).transpose(0, 1)  # [M, B, g, d]
        rows = own.transpose(2, 3).flatten(1, 2)  # [M, B d, g]
        projected = torch.bmm(rows, self.project).unflatten(1, (len(x), -1))  # X^T Y, [M, B, d, r]
        pairs = self.inner_norm(torch.matmul(own, projected).flatten(2))
        found = torch.bmm(self.activation(torch.bmm(pairs, self.up)), self.down)
        return self.norm(x + found.transpose(0, 1).reshape(x.shape))


class Kunlun(nn.Module):
    """dense [B, D], sparse [B, F], with a history also sequence [B, L] and lengths [B] -> logits [B].

    `summary` counts the tokens of X_sum, `longest` is tau. Of 3 layers the first pools and has GDPA, the
    second has the window, the third pools what came of it: the fewest that have every part.
    """

    def __init__(
        self,
        front: Front,
        *,
        layers: int,
        heads: int,
        summary: int,
        seeds: int,
        pooled: int,
        kron_rank: int,
        window: int,
        longest: int,
        experts: int,
        rank: int,
        hidden: int,
        top: Sequence[int],
        activation: str = "relu",
        norm: bool = False,
    ) -> None:
        super().__init__()
        dim, tokens = front.dim, summary + pooled
        self.front = front
        self.top = mlp(tokens * dim, top, activation=activation, norm=norm)
        self.enter = nn.Sequential(nn.Linear(dim, dim), nn.LayerNorm(dim))
        self.summaries = nn.ModuleList(
            nn.Sequential(TokenLinear(count, summary), Gate(dim)) for count in [front.tokens, *[tokens] * (layers - 1)]
        )
        mix = {"experts": experts, "tokens": tokens, "rank": rank, "hidden": hidden}
        self.experts = nn.ModuleList(WukongExperts(dim, **mix, activation=activation) for _ in range(layers))
        even = range(0, layers, 2)
        self.seeds = nn.ModuleList(AttentionPool(dim, heads=heads, outputs=seeds) for _ in even)
        self.compress = nn.ModuleList(SumKron(seeds, pooled, dim, rank=kron_rank) for _ in even)
        between = range(len(even) - 1)  # after the last even layer nothing reads S
        self.personal = nn.ModuleList(GDPA(dim, heads=heads, longest=longest, activation=activation) for _ in between)
        self.windows = nn.ModuleList(WindowAttention(dim, heads=heads, window=window) for _ in between)
        self.logit = nn.Linear(top[-1], 1)

    def forward(
        self,
        dense: torch.Tensor,
        sparse: torch.Tensor,
        sequence: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.front(dense, sparse)
        history = self.front.events(sequence, lengths)
        events, seen = (x[:, self.front.dense_tokens :], None) if history is None else history
        s, pooled = self.enter(events), x
        for index, (summary, experts) in enumerate(zip(self.summaries, self.experts, strict=True)):
            x_sum, turn = summary(x), index // 2
            if index % 2 == 0:
                pooled = self.compress[turn](self.seeds[turn](s, seen))
            x = experts(torch.cat([x_sum, pooled], dim=1))
            if turn < len(self.personal):
                s = self.windows[turn](s, seen) if index % 2 else self.personal[turn](s, x_sum)
        return self.logit(self.top(x.flatten(1))).squeeze(1)
