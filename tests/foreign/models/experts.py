"""Stacked experts: one parameter [E, in, out] in `bmm`, `einsum`, `baddbmm`, and behind a dispatch."""

import torch
import torch.nn.functional as F
from torch import nn

from foreign.spec import floats, per_row

EXPERTS, FAN_IN, HIDDEN, FAN_OUT = 4, 32, 64, 32


def _experts(fan_in, fan_out):
    return nn.Parameter(torch.randn(EXPERTS, fan_in, fan_out) / fan_in**0.5)


class Bmm(nn.Module):
    """MMoE of two tasks: torch.bmm of an expanded x with [E, in, out], softmax gates, towers; -> [B, 2]."""

    def __init__(self):
        super().__init__()
        self.w1 = _experts(FAN_IN, HIDDEN)
        self.w2 = _experts(HIDDEN, FAN_OUT)
        self.gates = nn.ModuleList(nn.Linear(FAN_IN, EXPERTS, bias=False) for _ in range(2))
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(FAN_OUT, 32), nn.ReLU(), nn.Linear(32, 1)) for _ in range(2)
        )

    def experts(self, x):
        hidden = F.relu(torch.bmm(x.expand(EXPERTS, *x.shape), self.w1))
        return torch.bmm(hidden, self.w2).transpose(0, 1)  # [B, E, out]

    def forward(self, x):
        experts = F.relu(self.experts(x))
        logits = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            mixed = (torch.softmax(gate(x), dim=-1).unsqueeze(-1) * experts).sum(dim=1)
            logits.append(tower(mixed))
        return torch.cat(logits, dim=1)


class Einsum(Bmm):
    """The same by einsum: 'bi,eio->beo', then 'beo,eop->bep'."""

    def experts(self, x):
        hidden = F.relu(torch.einsum("bi,eio->beo", x, self.w1))
        return torch.einsum("beo,eop->bep", hidden, self.w2)


class Baddbmm(Bmm):
    """The same by baddbmm, with a bias [E, 1, out]."""

    def __init__(self):
        super().__init__()
        self.b1 = nn.Parameter(torch.zeros(EXPERTS, 1, HIDDEN))
        self.b2 = nn.Parameter(torch.zeros(EXPERTS, 1, FAN_OUT))

    def experts(self, x):
        hidden = F.relu(torch.baddbmm(self.b1, x.expand(EXPERTS, *x.shape), self.w1))
        return torch.baddbmm(self.b2, hidden, self.w2).transpose(0, 1)


class Dispatch(nn.Module):
    """Top-1 MoE with a capacity: rows are dispatched to [E, C, in], experts run by einsum 'ecd,edf->ecf'.

    A row beyond an expert's capacity passes by the residual alone.
    """

    def __init__(self, capacity=16):
        super().__init__()
        self.capacity = capacity
        self.router = nn.Linear(FAN_IN, EXPERTS, bias=False)
        self.w_in = _experts(FAN_IN, HIDDEN)
        self.w_out = _experts(HIDDEN, FAN_IN)
        self.out = nn.Linear(FAN_IN, 1)

    def forward(self, x):
        probability, expert = torch.softmax(self.router(x), dim=-1).max(dim=-1)
        chosen = F.one_hot(expert, EXPERTS)
        place = (torch.cumsum(chosen, dim=0) * chosen).sum(dim=-1) - 1  # among the rows of its expert
        kept = (place < self.capacity).to(x.dtype)
        slot = F.one_hot(place.clamp(max=self.capacity - 1), self.capacity).to(x.dtype)
        dispatch = torch.einsum("be,bc->bec", chosen.to(x.dtype) * kept.unsqueeze(-1), slot)
        tokens = torch.einsum("bec,bd->ecd", dispatch, x)
        hidden = F.gelu(torch.einsum("ecd,edf->ecf", tokens, self.w_in))
        made = torch.einsum("ecf,efd->ecd", hidden, self.w_out)
        combined = torch.einsum("bec,ecd->bd", dispatch * probability.view(-1, 1, 1), made)
        return self.out(x + combined)


_MMOE = (
    EXPERTS * (FAN_IN * HIDDEN + HIDDEN * FAN_OUT) + 2 * FAN_IN * EXPERTS + 2 * (FAN_OUT * 32 + 32)
)  # multiplications of one row


def _mmoe(name, build):
    return per_row(name, build, floats(FAN_IN), _MMOE, notes="[B, 2] are the logits of two tasks.")


MODELS = [
    _mmoe("experts_bmm", Bmm),
    _mmoe("experts_einsum", Einsum),
    _mmoe("experts_baddbmm", Baddbmm),
    per_row(
        "experts_dispatch",
        Dispatch,
        floats(FAN_IN),
        FAN_IN * EXPERTS + FAN_IN,
        flops_per_batch=2 * EXPERTS * 16 * 2 * FAN_IN * HIDDEN,
        notes="The experts' M is the capacity, 16, for any batch; dispatch and combine have no parameter.",
    ),
]
