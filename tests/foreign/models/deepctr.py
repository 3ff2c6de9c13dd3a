"""Models as DeepCTR-Torch writes them: xDeepFM and the three cross networks of DCN.

The equations and the calls are that library's (CIN by `nn.Conv1d`, kernels in one parameter of all layers, a
parallel DNN, logits of one output without bias, a sigmoid at the end); the code here is not. The input is one
float tensor, [B, 5]: three columns of ids, two dense ones.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from foreign.spec import generator, of_probabilities, per_row

FIELDS, VOCABULARY, EMBEDDING, DENSE = 3, 50, 16, 2
WIDTH = FIELDS * EMBEDDING + DENSE  # 50: no multiple of 16, as in life
HIDDEN = (64, 32)


class Front(nn.Module):
    """Embeddings by field and the wide part's logit; [B, 5] -> fields [B, 3, 16], dense [B, 2], logit."""

    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(VOCABULARY, EMBEDDING) for _ in range(FIELDS))
        self.linear = nn.ModuleList(nn.Embedding(VOCABULARY, 1) for _ in range(FIELDS))
        self.weight = nn.Parameter(torch.randn(DENSE, 1) * 0.01)

    def forward(self, x):
        sparse, dense = x[:, :FIELDS].long(), x[:, FIELDS:]
        fields = torch.stack([table(sparse[:, i]) for i, table in enumerate(self.embeddings)], dim=1)
        logit = sum(table(sparse[:, i]) for i, table in enumerate(self.linear)) + dense.matmul(self.weight)
        return fields, dense, logit


class DNN(nn.Module):
    def __init__(self, fan_in):
        super().__init__()
        widths = (fan_in, *HIDDEN)
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x):
        for linear in self.linears:
            x = F.relu(linear(x))
        return x


class CIN(nn.Module):
    """Compressed interactions: X^k = relu(conv1d(X^(k-1) (x) X^0)), half of X^k goes on, half goes out."""

    def __init__(self, sizes=(32, 32)):
        super().__init__()
        self.sizes = sizes
        before = (FIELDS, *(size // 2 for size in sizes[:-1]))
        self.conv1ds = nn.ModuleList(
            nn.Conv1d(maps * FIELDS, size, 1) for maps, size in zip(before, sizes, strict=True)
        )

    def forward(self, fields):
        rows, _, width = fields.shape
        hidden, results = fields, []
        for i, (size, conv1d) in enumerate(zip(self.sizes, self.conv1ds, strict=True)):
            outer = torch.einsum("bhd,bmd->bhmd", hidden, fields)
            maps = F.relu(conv1d(outer.reshape(rows, hidden.shape[1] * FIELDS, width)))
            if i < len(self.sizes) - 1:
                hidden, direct = torch.split(maps, [size // 2, size // 2], dim=1)
            else:
                direct = maps
            results.append(direct)
        return torch.cat(results, dim=1).sum(dim=-1)


class MatrixCross(nn.Module):
    """DCN-matrix: kernels [L, D, D] in one parameter; x_l = x_0 * (matmul(kernels[l], x_l) + b_l) + x_l."""

    def __init__(self, width, layers=2, fan_out=None):
        super().__init__()
        self.kernels = nn.Parameter(nn.init.xavier_normal_(torch.empty(layers, width, fan_out or width)))
        self.bias = nn.Parameter(torch.zeros(layers, width, 1))

    def forward(self, x):
        x_0 = x.unsqueeze(2)
        x_l = x_0
        for i in range(len(self.kernels)):
            x_l = x_0 * (torch.matmul(self.kernels[i], x_l) + self.bias[i]) + x_l
        return torch.squeeze(x_l, dim=2)


class VectorCross(MatrixCross):
    """DCN-vector: kernels [L, D, 1]; x_l = x_0 (x_l . w_l) + b_l + x_l, the product by tensordot."""

    def __init__(self, width):
        super().__init__(width, fan_out=1)

    def forward(self, x):
        x_0 = x.unsqueeze(2)
        x_l = x_0
        for i in range(len(self.kernels)):
            product = torch.tensordot(x_l, self.kernels[i], dims=([1], [0]))
            x_l = torch.matmul(x_0, product) + self.bias[i] + x_l
        return torch.squeeze(x_l, dim=2)


class MixCross(nn.Module):
    """DCN-mix: low-rank experts in parameters [L, E, D, r], gates, tanh between the projections."""

    def __init__(self, width, layers=2, rank=32, experts=2):
        super().__init__()
        self.U_list = nn.Parameter(nn.init.xavier_normal_(torch.empty(layers, experts, width, rank)))
        self.V_list = nn.Parameter(nn.init.xavier_normal_(torch.empty(layers, experts, width, rank)))
        self.C_list = nn.Parameter(nn.init.xavier_normal_(torch.empty(layers, experts, rank, rank)))
        self.gating = nn.ModuleList(nn.Linear(width, 1, bias=False) for _ in range(experts))
        self.bias = nn.Parameter(torch.zeros(layers, width, 1))

    def expert(self, layer, expert, x_l):
        inner = torch.tanh(torch.matmul(self.V_list[layer][expert].t(), x_l))
        inner = torch.tanh(torch.matmul(self.C_list[layer][expert], inner))
        return torch.matmul(self.U_list[layer][expert], inner) + self.bias[layer]

    def forward(self, x):
        x_0 = x.unsqueeze(2)
        x_l = x_0
        for layer in range(len(self.bias)):
            scores = torch.stack([gate(x_l.squeeze(2)) for gate in self.gating], dim=1)
            experts = [(x_0 * self.expert(layer, e, x_l)).squeeze(2) for e in range(len(self.gating))]
            x_l = torch.matmul(torch.stack(experts, dim=2), scores.softmax(dim=1)) + x_l
        return x_l.squeeze(2)


class XDeepFM(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = Front()
        self.cin = CIN()
        self.cin_linear = nn.Linear(16 + 32, 1, bias=False)
        self.dnn = DNN(WIDTH)
        self.dnn_linear = nn.Linear(HIDDEN[-1], 1, bias=False)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        fields, dense, logit = self.front(x)
        logit = logit + self.cin_linear(self.cin(fields))
        dnn = self.dnn(torch.cat([fields.flatten(start_dim=1), dense], dim=1))
        return torch.sigmoid(logit + self.dnn_linear(dnn) + self.bias)


class DCN(nn.Module):
    """Cross network and DNN side by side over the flat input, one logit over both.

    D is 50, or, without the dense columns, 48, which every FP8 kernel accepts.
    """

    def __init__(self, cross, width=WIDTH):
        super().__init__()
        self.width = width
        self.front = Front()
        self.crossnet = cross(width)
        self.dnn = DNN(width)
        self.dnn_linear = nn.Linear(width + HIDDEN[-1], 1, bias=False)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        fields, dense, logit = self.front(x)
        flat = fields.flatten(start_dim=1)
        if self.width == WIDTH:
            flat = torch.cat([flat, dense], dim=1)
        both = torch.cat([self.dnn(flat), self.crossnet(flat)], dim=-1)
        return torch.sigmoid(logit + self.dnn_linear(both) + self.bias)


def columns(rows):
    drawn = generator()
    sparse = torch.randint(VOCABULARY, (rows, FIELDS), generator=drawn).float()
    return (torch.cat([sparse, torch.randn(rows, DENSE, generator=drawn)], dim=1),)


def _dnn(fan_in):
    return fan_in * 64 + 64 * 32 + 32


def _deepctr(name, build, multiplications, notes=""):
    notes = f"forward returns probabilities, [B, 1]. {notes}".strip()
    return per_row(name, build, columns, multiplications, loss=of_probabilities, logits=None, notes=notes)


_CIN = EMBEDDING * (32 * 9 + 32 * 16 * 3) + 48
_MIX = 2 * (2 * (2 * WIDTH * 32 + 32 * 32) + 2 * WIDTH)
MODELS = [
    _deepctr("deepctr_xdeepfm", XDeepFM, DENSE + _CIN + _dnn(WIDTH), "CIN's Conv1d: 9 and 48 input channels."),
    _deepctr("deepctr_dcn_matrix", lambda: DCN(MatrixCross, 48), DENSE + 2 * 48 * 48 + _dnn(48) + 48, "D is 48."),
    _deepctr("deepctr_dcn_matrix_odd", lambda: DCN(MatrixCross), DENSE + 2 * 50 * 50 + _dnn(50) + 50, "D is 50."),
    _deepctr("deepctr_dcn_vector", lambda: DCN(VectorCross), DENSE + 2 * 50 + _dnn(50) + 50),
    _deepctr("deepctr_dcn_mix", lambda: DCN(MixCross), DENSE + _MIX + _dnn(50) + 50),
]
