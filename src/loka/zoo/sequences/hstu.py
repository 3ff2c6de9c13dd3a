"""HSTU (arXiv 2402.17152) as a ranking model: context, past events and a target, read as one sequence.

For each layer, on tokens X [T, D] with `heads` of widths d_v (U, V) and d_k (Q, K), equations 1 to 3:

    U, V, Q, K = split(silu(W1 LN(X) + b1))                        (1)   D -> heads (2 d_v + 2 d_k)
    A V = sum_j silu(q_i . k_j / sqrt(d_k) + rab_ij) v_j / N_i     (2)   pointwise: no softmax
    Y = W2 (LN(A V) * U) + b2 + X                                  (3)   heads d_v -> D

With `concat` (DLRM-v3) W2 reads [U | X | LN(A V) * U].

rab: a learned bias by distance j - i, and with timestamps one by log-bucket of the time between two events.
A token sees itself and what came before; the context tokens, which have no order, see one another.

    [context, one token a feature | event_1 .. event_length | target | never read]

The target stands right after the row's last event, so padding moves nothing; the logit is read there. Its
token is the item's embedding plus a vector for "action not known yet"; an event's is its item's plus a
vector for the action. The paper interleaves items and actions; its authors' DLRM-v3 adds them, as here,
and a history here has one kind of action. A target per row: the paper's amortized many are not here.

Where the paper is silent: the LayerNorm before W1 is that of its authors' code; 1 / sqrt(d_k) and W1's bias
are their DLRM-v3's, their research code has neither. N_i counts the tokens that i sees, where both take the
padded length, so that a row does not depend on padding. DLRM-v3 has no rab but adds positions to its inputs;
here every size has rab^p. Their research code buckets times by powers of 1.35, here by powers of two.

`scans` names layers, counted from 0, that are chunked scans in place of attention (loka.zoo.sequences.scan): a hybrid
of ours. They read the context in the order of its features.

Rows without a history: the row's features are the context, the history is empty, and the target's
token is the learned vector alone, which reads the features. No feature is treated as an event.
"""

import math
from collections.abc import Collection, Sequence

import torch
from torch import nn
from torch.nn import functional

from loka.zoo.layers import Front, mlp
from loka.zoo.sequences.scan import ScanLayer


class DistanceBias(nn.Module):
    """rab^p: [T, T], a weight for each distance j - i; distances of `reach` or more share one."""

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach
        self.weight = nn.Parameter(torch.empty(2 * reach + 1))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, tokens: int) -> torch.Tensor:
        # Row i of the matrix is a window of the weights: no gather, whose backward would add in any order.
        far = tokens - 1
        inside = self.weight[max(self.reach - far, 0) : self.reach + far + 1]
        beyond = max(far - self.reach, 0)
        weights = torch.cat([self.weight[:1].expand(beyond), inside, self.weight[-1:].expand(beyond)])
        return weights.unfold(0, tokens, 1).flip(0)


class TimeBias(nn.Module):
    """rab^t: times [B, T] in seconds -> [B, T, T], a weight for each power of two of the time between."""

    def __init__(self, buckets: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(buckets))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, times: torch.Tensor) -> torch.Tensor:
        apart = (times.unsqueeze(2) - times.unsqueeze(1)).abs().clamp(min=1)
        bucket = apart.float().log2().long().clamp(max=len(self.weight) - 1)
        return self.weight[bucket]


class HSTULayer(nn.Module):
    """x [B, T, D], sees [B or 1, T, T] bool, times [B, T] if it has `time_buckets` -> [B, T, D]."""

    def __init__(
        self, width: int, *, heads: int, value_dim: int, key_dim: int, reach: int, time_buckets: int, concat: bool
    ) -> None:
        super().__init__()
        self.heads = heads
        self.sizes = [heads * value_dim, heads * value_dim, heads * key_dim, heads * key_dim]
        self.scale = key_dim**-0.5
        self.concat = concat
        self.input_norm = nn.LayerNorm(width)
        self.uvqk = nn.Linear(width, sum(self.sizes))
        self.activation = nn.SiLU()
        self.distance = DistanceBias(reach)
        self.time = TimeBias(time_buckets) if time_buckets else None
        self.attention = nn.SiLU()
        self.norm = nn.LayerNorm(heads * value_dim)
        self.out = nn.Linear(heads * value_dim + (heads * value_dim + width if concat else 0), width)

    def forward(self, x: torch.Tensor, sees: torch.Tensor, times: torch.Tensor | None = None) -> torch.Tensor:
        u, v, q, k = self.activation(self.uvqk(self.input_norm(x))).split(self.sizes, dim=-1)
        bias = self.distance(x.shape[1])
        if self.time is not None and times is not None:
            bias = bias + self.time(times)
        scores = torch.matmul(self._split(q * self.scale), self._split(k).transpose(2, 3))
        scores = self.attention(scores + bias.unsqueeze(-3))  # float32 under autocast, as the bias is
        share = sees.to(scores.dtype)
        weights = scores * (share / share.sum(dim=2, keepdim=True)).unsqueeze(1)
        found = torch.matmul(weights, self._split(v)).transpose(1, 2).flatten(2)
        gated = self.norm(found) * u
        if self.concat:
            gated = torch.cat([u, x, gated], dim=-1)
        return self.out(gated) + x

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, heads d] -> [B, heads, T, d]."""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)


def sight(length: torch.Tensor, *, context: int, events: int) -> torch.Tensor:
    """Which tokens see which: [B, T, T], i sees j; T = context + events + 1, of these `length` [B] events."""
    place = torch.arange(context + events + 1, device=length.device)
    past = place.unsqueeze(1) >= place
    past = past | ((place < context).unsqueeze(1) & (place < context))
    # The target, at place context + length, is the last that is there. A token that is not sees itself, so
    # that none divides by zero.
    there = place <= (context + length).unsqueeze(1)
    itself = place.unsqueeze(1) == place
    return (past & there.unsqueeze(1)) | itself


class HSTU(nn.Module):
    """dense [B, D], sparse [B, F], with a history also sequence [B, L] and lengths [B] -> logits [B].

    With `HistoryTable(column=c)` the target is sparse feature c, which then is no context. With a vocabulary
    of the history's own, all features are context. `times` [B, L + 1] are the events' timestamps in seconds
    and, last, that of the row; a model has a time bias with `time_buckets` only, and then needs them.
    """

    def __init__(
        self,
        front: Front,
        *,
        width: int,
        layers: int,
        heads: int,
        value_dim: int,
        key_dim: int,
        top: Sequence[int],
        reach: int,
        time_buckets: int = 0,
        concat: bool = False,
        scans: Collection[int] = (),
        chunk: int = 64,
        activation: str = "relu",
        norm: bool = False,
    ) -> None:
        super().__init__()
        if time_buckets and front.history is None:
            raise ValueError("time_buckets need a history: only events have times")
        if not set(scans) < set(range(layers)):
            raise ValueError(f"scans {scans} of {layers} layers: count from 0, and leave one to attention")
        self.front = front
        self.enter = nn.Identity() if front.dim == width else nn.Linear(front.dim, width)
        self.target = nn.Parameter(torch.empty(front.dim))
        nn.init.normal_(self.target, std=1 / math.sqrt(front.dim))
        self.acted: nn.Parameter | None = None
        if front.history is not None:
            self.acted = nn.Parameter(torch.empty(front.dim))
            nn.init.normal_(self.acted, std=1 / math.sqrt(front.dim))
        self.timed = bool(time_buckets)
        self.layers = nn.ModuleList(
            ScanLayer(width, heads=heads, value_dim=value_dim, state_dim=key_dim, chunk=chunk)
            if index in scans
            else HSTULayer(
                width,
                heads=heads,
                value_dim=value_dim,
                key_dim=key_dim,
                reach=reach,
                time_buckets=time_buckets,
                concat=concat,
            )
            for index in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.top = mlp(width, top, activation=activation, norm=norm)
        self.logit = nn.Linear(top[-1], 1)

    def forward(
        self,
        dense: torch.Tensor,
        sparse: torch.Tensor,
        sequence: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        times: torch.Tensor | None = None,
    ) -> torch.Tensor:
        context = self.front(dense, sparse)
        events = self.front.events(sequence, lengths)
        if (times is None) == self.timed:
            raise ValueError("timestamps `times` [B, L + 1] are for models with time_buckets, and those need them")
        batch = context.shape[0]
        target = self.target.expand(batch, 1, -1)
        if self.front.history_column is not None:
            at = self.front.dense_tokens + self.front.history_column
            target = target + context[:, at : at + 1]
            context = torch.cat([context[:, :at], context[:, at + 1 :]], dim=1)
        if events is None or self.acted is None:
            count, length, tail = 0, sparse.new_zeros(1, dtype=torch.int64), target
        else:
            rows, seen = events
            count, length = rows.shape[1], seen.sum(dim=1)
            here = torch.arange(count + 1, device=rows.device) == length.unsqueeze(1)
            tail = torch.where(here.unsqueeze(2), target, functional.pad(rows + self.acted, (0, 0, 0, 1)))
            if times is not None:
                now = times[:, -1:]  # of the target, and of the context, which is read with it
                past = torch.where(here, now, functional.pad(times[:, :-1], (0, 1)))
                times = torch.cat([now.expand(-1, context.shape[1]), past], dim=1)
        x = self.enter(torch.cat([context, tail], dim=1))
        sees = sight(length, context=context.shape[1], events=count)
        for layer in self.layers:
            x = layer(x, sees, times)
        place = (context.shape[1] + length).view(-1, 1, 1).expand(batch, 1, x.shape[2])
        return self.logit(self.top(self.norm(x.gather(1, place).squeeze(1)))).squeeze(1)
