"""Models as FuxiCTR writes them: DCNv2 in its three structures, and xDeepFM with its CIN.

The equations and the calls are that library's (a dict of features goes in, a dict with `y_pred` behind a
sigmoid comes out, MLP blocks are one Sequential); the code here is not. Four fields of 16 are an input of 64.
"""

import torch
from torch import nn

from foreign.spec import generator, of_probabilities, per_row

FIELDS, VOCABULARY, EMBEDDING = 4, 50, 16
WIDTH = FIELDS * EMBEDDING


class FeatureEmbedding(nn.Module):
    """A table for each named feature; {name: [B]} -> [B, 4, 16]."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleDict({f"field_{i}": nn.Embedding(VOCABULARY, EMBEDDING) for i in range(FIELDS)})

    def forward(self, features):
        return torch.stack([table(features[name]) for name, table in self.tables.items()], dim=1)


class MLPBlock(nn.Module):
    """Linear, BatchNorm where asked for, ReLU and dropout as one Sequential, `mlp`."""

    def __init__(self, fan_in, hidden, *, fan_out=0, batch_norm=False):
        super().__init__()
        layers = []
        for a, b in zip((fan_in, *hidden[:-1]), hidden, strict=True):
            layers += [nn.Linear(a, b)]
            layers += [nn.BatchNorm1d(b)] if batch_norm else []
            layers += [nn.ReLU(), nn.Dropout(p=0.0)]
        layers += [nn.Linear(hidden[-1], fan_out)] if fan_out else []
        self.mlp = nn.Sequential(*layers)

    def forward(self, x):
        return self.mlp(x)


class CrossNetV2(nn.Module):
    """x_(i+1) = x_i + x_0 * linear_i(x_i)."""

    def __init__(self, width, layers=3):
        super().__init__()
        self.cross_layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x_0):
        x_i = x_0
        for layer in self.cross_layers:
            x_i = x_i + x_0 * layer(x_i)
        return x_i


class DCNv2(nn.Module):
    """`parallel`: DNN beside the cross network; `stacked`: DNN behind it; `stacked_parallel`: one of each."""

    def __init__(self, structure, *, batch_norm=False):
        super().__init__()
        self.structure = structure
        self.embedding_layer = FeatureEmbedding()
        self.crossnet = CrossNetV2(WIDTH)
        final = 0
        if "stacked" in structure:
            self.stacked_dnn = MLPBlock(WIDTH, (64, 32), batch_norm=batch_norm)
            final += 32
        if "parallel" in structure:
            self.parallel_dnn = MLPBlock(WIDTH, (64, 32), batch_norm=batch_norm)
            final += 32
        self.fc = nn.Linear(final + (WIDTH if structure == "parallel" else 0), 1)

    def forward(self, features):
        flat = self.embedding_layer(features).flatten(start_dim=1)
        crossed = self.crossnet(flat)
        parts = [self.stacked_dnn(crossed)] if "stacked" in self.structure else []
        if self.structure == "parallel":
            parts.append(crossed)
        if "parallel" in self.structure:
            parts.append(self.parallel_dnn(flat))
        return {"y_pred": torch.sigmoid(self.fc(torch.cat(parts, dim=-1)))}


class CompressedInteractionNet(nn.Module):
    """CIN: a Conv1d of kernel 1 squeezes the outer product of fields; sums over the embedding -> [B, 1]."""

    def __init__(self, fields=FIELDS, hidden=(32, 32)):
        super().__init__()
        self.fc = nn.Linear(sum(hidden), 1)
        maps = (fields, *hidden[:-1])
        self.cin_layer = nn.ModuleDict(
            {f"layer_{i + 1}": nn.Conv1d(fields * maps[i], size, kernel_size=1) for i, size in enumerate(hidden)}
        )

    def forward(self, x_0):
        rows, _, width = x_0.shape
        x_i, pooled = x_0, []
        for layer in self.cin_layer.values():
            outer = torch.einsum("bhd,bmd->bhmd", x_0, x_i).view(rows, -1, width)
            x_i = layer(outer).view(rows, -1, width)
            pooled.append(x_i.sum(dim=-1))
        return self.fc(torch.cat(pooled, dim=-1))


class XDeepFM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding_layer = FeatureEmbedding()
        self.cin = CompressedInteractionNet()
        self.dnn = MLPBlock(WIDTH, (64, 32), fan_out=1)

    def forward(self, features):
        fields = self.embedding_layer(features)
        return {"y_pred": torch.sigmoid(self.cin(fields) + self.dnn(fields.flatten(start_dim=1)))}


def features(rows):
    drawn = generator()
    return ({f"field_{i}": torch.randint(VOCABULARY, (rows,), generator=drawn) for i in range(FIELDS)},)


_DNN = WIDTH * 64 + 64 * 32
_MULTIPLICATIONS = {
    "parallel": 3 * WIDTH**2 + _DNN + 32 + WIDTH,
    "stacked": 3 * WIDTH**2 + _DNN + 32,
    "stacked_parallel": 3 * WIDTH**2 + 2 * _DNN + 64,
}


def _fuxictr(name, build, multiplications):
    notes = "A dict of features in, {'y_pred': probabilities} out."
    return per_row(f"fuxictr_{name}", build, features, multiplications, loss=of_probabilities, logits=None, notes=notes)


def _dcnv2(structure, multiplications):
    return _fuxictr(f"dcnv2_{structure}", lambda: DCNv2(structure, batch_norm=structure == "stacked"), multiplications)


MODELS = [
    *(_dcnv2(structure, count) for structure, count in _MULTIPLICATIONS.items()),
    _fuxictr("xdeepfm", XDeepFM, EMBEDDING * (32 * 16 + 32 * 128) + 64 + _DNN + 32),
]
