"""nn.TransformerEncoder and nn.MultiheadAttention, whose projections are raw parameters; and an LSTM."""

import torch
from torch import nn

from foreign.spec import floats, generator, ids, per_row

WIDTH, HEADS, FEED, LAYERS, TOKENS, VOCABULARY = 32, 2, 64, 2, 8, 60
TOKEN = 3 * WIDTH**2 + WIDTH**2 + 2 * WIDTH * FEED  # multiplications of one token in one layer


class Encoder(nn.Module):
    """Token embeddings, an encoder, the mean, one logit; ids [B, 8] -> [B, 1]; id 0 may be padding."""

    def __init__(self, *, batch_first, padded=False, norm_first=False):
        super().__init__()
        self.batch_first, self.padded = batch_first, padded
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, FEED, dropout=0.0, batch_first=batch_first, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=padded)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, history):
        mask = history == 0 if self.padded else None
        x = self.tokens(history)
        if not self.batch_first:
            x = x.transpose(0, 1)
        x = self.encoder(x, src_key_padding_mask=mask)
        return self.out(x.mean(dim=1 if self.batch_first else 0))


class CrossAttention(nn.Module):
    """A query of 32 reads keys of 48 and values of 64: three raw projections instead of `in_proj_weight`."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, kdim=48, vdim=64, batch_first=True)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, query, key, value):
        read, _ = self.attention(query, key, value, need_weights=False)
        return self.out(read.mean(dim=1))


class SharedAttention(nn.Module):
    """One target item reads a history: key is value, query is not, so `in_proj` is used in two parts."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x):
        target, history = x[:, :1], x[:, 1:]
        read, _ = self.attention(target, history, history)  # with the attention's weights
        return self.out(read.squeeze(1))


class RecurrentTower(nn.Module):
    """An LSTM over the history, then an MLP over its last state; ids [B, 8] -> [B, 1]."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.lstm = nn.LSTM(32, 48, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, history):
        states, _ = self.lstm(self.tokens(history))
        return self.mlp(states[:, -1])


HISTORY = ids(TOKENS, VOCABULARY)


def _padded(rows):
    """Row i has 8 - i % 4 items; the first row has all, so that a nested tensor's width is the batch's."""
    drawn = torch.randint(1, VOCABULARY, (rows, TOKENS), generator=generator())
    lengths = TOKENS - torch.arange(rows).unsqueeze(1) % 4
    return (drawn * (torch.arange(TOKENS) < lengths),)


def _attended(rows):
    drawn = generator()
    return tuple(torch.randn(rows, tokens, w, generator=drawn) for tokens, w in ((4, 32), (8, 48), (8, 64)))


def _encoder(name, inputs=HISTORY, notes="", **options):
    return per_row(name, lambda: Encoder(**options), inputs, LAYERS * TOKENS * TOKEN + WIDTH, notes=notes)


MODELS = [
    _encoder("encoder_batch_first", batch_first=True),
    _encoder("encoder_sequence_first", batch_first=False),
    _encoder("encoder_norm_first", batch_first=True, norm_first=True),
    _encoder(
        "encoder_padded",
        _padded,
        "In evaluation without gradients the encoder drops padding (nested tensors): fewer FLOPs than here.",
        batch_first=True,
        padded=True,
    ),
    per_row("cross_attention", CrossAttention, _attended, 4 * 32 * 32 + 8 * 48 * 32 + 8 * 64 * 32 + 4 * 32 * 32 + 32),
    per_row(
        "shared_attention",
        SharedAttention,
        floats(9, WIDTH),
        32 * 32 + 8 * 64 * 32 + 32 * 32 + 32,
        notes="`in_proj_weight` is used as its first 32 rows and its last 64.",
    ),
    per_row(
        "lstm_tower",
        RecurrentTower,
        HISTORY,
        TOKENS * 4 * 48 * (32 + 48) + 48 * 64 + 64 * 32 + 32,
        not_sites=("lstm.weight_ih_l0", "lstm.weight_hh_l0"),
        fullgraph=False,  # Dynamo breaks the graph at an LSTM
        notes="The LSTM is no site: its share is to be named.",
    ),
]
