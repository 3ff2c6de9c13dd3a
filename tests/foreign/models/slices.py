"""Raw parameters: slices, chunks, splits, transposes, matmul, addmm, and weights that are used twice."""

import torch
import torch.nn.functional as F
from torch import nn

from foreign.spec import floats, ids, per_row


def _weight(*shape):
    return nn.Parameter(nn.init.xavier_uniform_(torch.empty(*shape)))


class Slices(nn.Module):
    """A gated unit of two row slices of one parameter: F.linear(x, w[:64]) * sigmoid(F.linear(x, w[64:]))."""

    def __init__(self):
        super().__init__()
        self.w = _weight(128, 32)
        self.b = nn.Parameter(torch.zeros(128))
        self.out = nn.Linear(64, 1)

    def forward(self, x):
        value = F.linear(x, self.w[:64], self.b[:64])
        gate = F.linear(x, self.w[64:], self.b[64:])
        return self.out(value * torch.sigmoid(gate))


class Columns(nn.Module):
    """F.linear on two column slices: the concatenation [x, y] is never made."""

    def __init__(self):
        super().__init__()
        self.w = _weight(64, 96)
        self.out = nn.Linear(64, 1)

    def forward(self, x, y):
        return self.out(F.relu(F.linear(x, self.w[:, :32]) + F.linear(y, self.w[:, 32:])))


class Chunks(nn.Module):
    """Query, key and value from one parameter by `chunk`, as in attention by hand over fields."""

    def __init__(self):
        super().__init__()
        self.qkv = _weight(96, 32)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        query, key, value = (F.linear(x, w) for w in self.qkv.chunk(3))
        scores = torch.softmax(query @ key.transpose(-1, -2) / 32**0.5, dim=-1)
        return self.out((scores @ value).mean(dim=1))


class Splits(nn.Module):
    """Branches of unequal widths from one parameter by `split`; the last is 17 wide, which no kernel has."""

    def __init__(self):
        super().__init__()
        self.w = _weight(32 + 64 + 17, 32)
        self.out = nn.Linear(32 + 64 + 17, 1)

    def forward(self, x):
        return self.out(torch.cat([F.relu(F.linear(x, w)) for w in self.w.split([32, 64, 17])], dim=1))


class Functions(nn.Module):
    """One layer in each way of writing: `x @ w`, `mm`, `addmm`, `matmul` of tokens, F.linear of `w.t()`."""

    def __init__(self):
        super().__init__()
        self.at = _weight(32, 64)
        self.mm = _weight(64, 64)
        self.addmm = _weight(64, 48)
        self.bias = nn.Parameter(torch.zeros(48))
        self.matmul = _weight(48, 32)
        self.linear = _weight(32, 32)
        self.logit = nn.Parameter(torch.randn(32) / 32**0.5)

    def forward(self, x):
        x = F.relu(x @ self.at)
        x = F.relu(torch.mm(x, self.mm))
        x = F.relu(torch.addmm(self.bias, x, self.addmm))
        x = F.relu(torch.matmul(x.view(-1, 2, 48), self.matmul).sum(dim=1))
        x = F.relu(F.linear(x, self.linear.t()))
        return torch.mv(x, self.logit)


class Autoencoder(nn.Module):
    """Tied weights: the decoder is F.linear(h, w.t()) with the encoder's w; it returns the reconstruction."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(96, 32)
        self.bias = nn.Parameter(torch.zeros(96))

    def forward(self, x):
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t(), self.bias)


class NextItem(nn.Module):
    """The item embedding is the output head too; ids [B, T] -> scores of all items, [B, items]."""

    def __init__(self, items=128):
        super().__init__()
        self.items = nn.Embedding(items, 32)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, items, bias=False)
        self.head.weight = self.items.weight

    def forward(self, history):
        return self.head(self.body(self.items(history).mean(dim=1)))


class UsedTwice(nn.Module):
    """One nn.Linear called twice in a forward, and once more by a sibling that holds the same module."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(32, 32)
        self.again = nn.Sequential(nn.ReLU(), self.shared)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        return self.out(self.again(self.shared(F.relu(self.shared(x)))))


def _two(rows):
    (x,) = floats(96)(rows)
    return x[:, :32].contiguous(), x[:, 32:].contiguous()


def _next_item_loss(scores):
    return F.cross_entropy(scores, torch.arange(len(scores)) % scores.shape[1])


MODELS = [
    per_row("slices", Slices, floats(32), 32 * 128 + 64),
    per_row("columns", Columns, _two, 96 * 64 + 64),
    per_row("chunks", Chunks, floats(8, 32), 8 * 96 * 32 + 32),
    per_row("splits", Splits, floats(32), 113 * 32 + 113),
    per_row(
        "functions",
        Functions,
        lambda rows: floats(32)(2 * rows),
        2 * (32 * 64 + 64 * 64 + 64 * 48 + 48 * 32) + 32 * 32 + 32,
    ),
    per_row("used_twice", UsedTwice, floats(32), 3 * 32 * 32 + 32),
    per_row(
        "autoencoder_tied",
        Autoencoder,
        floats(96),
        2 * 96 * 32,
        loss=lambda output: output.square().mean(),
        logits=None,
        notes="One parameter, two GEMMs; forward returns no logits.",
    ),
    per_row(
        "next_item_tied",
        NextItem,
        ids(8, 128),
        2 * 32 * 64 + 32 * 128,
        loss=_next_item_loss,
        notes="`head.weight` and `items.weight` are one parameter, `items.weight`; logits of 128 classes.",
    ),
]
