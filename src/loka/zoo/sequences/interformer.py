"""InterFormer (arXiv 2411.09852v4): tokens X [n, d] and a sequence S [T, d] learn from each other by layers.

    cross arch, 4.4         X_sum = Gate(W_x X)                       n -> c tokens              (10)
                            S_sum = Gate([S_CLS | S_PMA | S_recent])  c + pooled + recent tokens (11)
    interaction arch, 4.2   X' = MLP(Interaction([X | S_sum]))        n + |S_sum| -> n tokens     (7)
    sequence arch, 4.3      S' = MHA(PFFN(X_sum, S))                  PFFN = f(X_sum) S        (8, 9)

Numbers are the paper's sections and equations. First S = [X_sum | MaskNet(events)]; its first c tokens are
CLS tokens; MaskNet(S) = W_l (S * MLP(S)), (6). Last logit = head([X_sum | S_sum]), A.1, of what the last
layer gives out: the paper writes its inputs, which would leave that layer unread. Interaction is a DHEN layer
of dot and cross modules, as in the paper's public benchmarks (5.1, B.2); MHA turns queries and keys by rotary
positions.

Of Gating(Z) = s(Z * MLP(Z)) the paper leaves s open, even to the identity: here Z * sigmoid(W Z + b). Of f it
says "an MLP" in 4.3 and X_sum^T W, of rank c, in A.2.2: here one Linear c d -> d d, the map for each row. Of
rank 4 it learned little (tests' task "is the item in the history", 100 steps, seeds 0 to 2: NE 0.82, 0.93 and
0.92, against 0.59, 0.84 and 0.80). Where the paper is silent, ours: a LayerNorm after gates and MaskNet,
because table rows start small; f starts 1 / sqrt(d) smaller, so that f(X_sum) S is of the size of S; MHA
includes the residual and norm of a Transformer, LN(P + MHA(P)); PMA is one attention of learned queries
without its feed-forward part. One history, where the paper merges several.

Rows without a history: degraded. The sequence is then the row's own categorical features in column order,
all of them in every row, so that every part of the model has work and every GEMM its place. The order of
columns carries no time: the positions name columns, and "recent" means the last ones. This tells how the
architecture computes; it does not tell what the paper's model gains from histories.
"""

from collections.abc import Sequence

import torch
from torch import nn

from loka.zoo.attention import AttentionPool, SelfAttention
from loka.zoo.dhen import CrossInteraction, DHENLayer, DotInteraction
from loka.zoo.layers import Front, TokenLinear, mlp


class Gate(nn.Module):
    """LN(z * sigmoid(W z + b)) for each token: [B, n, d] -> the same."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.sigmoid = nn.Sigmoid()
        self.norm = nn.LayerNorm(dim)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.norm(z * self.sigmoid(self.linear(z)))


class SequenceSummary(nn.Module):
    """S [B, cls + T, d] -> S_sum [B, cls + pooled + recent, d]; `lengths` [B] counts the events alone."""

    def __init__(self, dim: int, *, heads: int, cls: int, pooled: int, recent: int) -> None:
        super().__init__()
        self.cls = cls
        self.recent = recent
        self.pool = AttentionPool(dim, heads=heads, outputs=pooled)
        self.gate = Gate(dim)

    def forward(self, s: torch.Tensor, seen: torch.Tensor | None, lengths: torch.Tensor) -> torch.Tensor:
        parts = [s[:, : self.cls], self.pool(s, seen)]
        if s.shape[1] > self.cls:
            # The newest event first; a row with fewer events has zeros for the rest.
            place = lengths.unsqueeze(1) - 1 - torch.arange(self.recent, device=s.device)
            index = (self.cls + place).clamp(min=0).unsqueeze(-1).expand(-1, -1, s.shape[2])
            parts.append(s.gather(1, index) * (place >= 0).unsqueeze(-1))
        else:
            parts.append(s.new_zeros(s.shape[0], self.recent, s.shape[2]))
        return self.gate(torch.cat(parts, dim=1))


class PersonalizedFFN(nn.Module):
    """PFFN: f(X_sum) S for X_sum [B, c, d] and S [B, T, d]; each row of the batch has its own d x d map."""

    def __init__(self, dim: int, *, context_tokens: int) -> None:
        super().__init__()
        self.generate = nn.Linear(context_tokens * dim, dim * dim)
        with torch.no_grad():
            self.generate.weight.mul_(dim**-0.5)
            self.generate.bias.mul_(dim**-0.5)

    def forward(self, x_sum: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        weight = self.generate(x_sum.flatten(1)).unflatten(1, (s.shape[2], s.shape[2]))
        return torch.bmm(s, weight.transpose(1, 2))


class InterFormerLayer(nn.Module):
    """X [B, n, d], X_sum [B, cls, d], S [B, cls + T, d] -> X' and S' of the shapes of X and S."""

    def __init__(
        self,
        tokens: int,
        dim: int,
        *,
        module_tokens: int,
        dot_tokens: int,
        rank: int,
        hidden: Sequence[int],
        heads: int,
        cls: int,
        pooled: int,
        recent: int,
        activation: str,
        norm: bool,
    ) -> None:
        super().__init__()
        self.summary = SequenceSummary(dim, heads=heads, cls=cls, pooled=pooled, recent=recent)
        size = {"tokens": tokens + cls + pooled + recent, "dim": dim, "out_tokens": module_tokens}
        self.interaction = DHENLayer(
            size["tokens"],
            dim,
            interactions={
                "dot": DotInteraction(**size, dot_tokens=dot_tokens),
                "cross": CrossInteraction(**size, rank=rank),
            },
            module_tokens=module_tokens,
        )
        self.mlp = mlp(
            self.interaction.out_tokens * dim,
            [*hidden, tokens * dim],
            activation=activation,
            norm=norm,
            last_activation=False,
        )
        self.pffn = PersonalizedFFN(dim, context_tokens=cls)
        self.attention = SelfAttention(dim, heads=heads, rotary=True)
        self.norm = nn.LayerNorm(dim)

    def forward(
        self, x: torch.Tensor, x_sum: torch.Tensor, s: torch.Tensor, seen: torch.Tensor | None, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.cat([x, self.summary(s, seen, lengths)], dim=1)
        personal = self.pffn(x_sum, s)
        s = self.norm(personal + self.attention(personal, seen))
        return self.mlp(self.interaction(both).flatten(1)).view_as(x), s


class MaskNet(nn.Module):
    """LN(W_l (s * MLP(s))) for each event: [B, T, d] -> the same. The mask filters what an event says."""

    def __init__(self, dim: int, *, activation: str) -> None:
        super().__init__()
        self.mask = mlp(dim, (dim, dim), activation=activation, last_activation=False)
        self.linear = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, s: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(s * self.mask(s)))


class InterFormer(nn.Module):
    """dense [B, D], sparse [B, F], with a history also sequence [B, L] and lengths [B] -> logits [B].

    `cls`, `pooled` and `recent` count the tokens of S_sum, `cls` those of X_sum. A history shorter than
    `recent` has zeros for the rest.
    """

    def __init__(
        self,
        front: Front,
        *,
        layers: int,
        module_tokens: int,
        dot_tokens: int,
        rank: int,
        hidden: Sequence[int],
        heads: int,
        top: Sequence[int],
        cls: int = 4,
        pooled: int = 2,
        recent: int = 2,
        activation: str = "relu",
        norm: bool = False,
    ) -> None:
        super().__init__()
        dim = front.dim
        self.front = front
        self.mask_net = MaskNet(dim, activation=activation)
        # X_sum before the first layer and after each.
        self.contexts = nn.ModuleList(
            nn.Sequential(TokenLinear(front.tokens, cls), Gate(dim)) for _ in range(layers + 1)
        )
        self.layers = nn.ModuleList(
            InterFormerLayer(
                front.tokens,
                dim,
                module_tokens=module_tokens,
                dot_tokens=dot_tokens,
                rank=rank,
                hidden=hidden,
                heads=heads,
                cls=cls,
                pooled=pooled,
                recent=recent,
                activation=activation,
                norm=norm,
            )
            for _ in range(layers)
        )
        self.summary = SequenceSummary(dim, heads=heads, cls=cls, pooled=pooled, recent=recent)
        self.top = mlp((2 * cls + pooled + recent) * dim, top, activation=activation, norm=norm)
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
        x_sum = self.contexts[0](x)
        if history is None:
            events, seen = x[:, self.front.dense_tokens :], None
            lengths = sparse.new_full((len(x),), events.shape[1], dtype=torch.int64)
        else:
            events, there = history
            lengths = there.sum(dim=1)
            seen = torch.cat([there.new_ones(x_sum.shape[:2]), there], dim=1)
        s = torch.cat([x_sum, self.mask_net(events)], dim=1)
        for index, layer in enumerate(self.layers):
            x, s = layer(x, x_sum, s, seen, lengths)
            x_sum = self.contexts[index + 1](x)
        last = torch.cat([x_sum, self.summary(s, seen, lengths)], dim=1)
        return self.logit(self.top(last.flatten(1))).squeeze(1)
