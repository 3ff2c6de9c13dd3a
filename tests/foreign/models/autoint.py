"""AutoInt as DeepCTR-Torch writes it: attention over fields, its projections raw parameters in tensordot.

The equations and the calls are that library's, the code is not. ids [B, 4] -> probabilities [B, 1].
"""

import torch
from torch import nn

from foreign.spec import ids, of_probabilities, per_row

FIELDS, VOCABULARY, WIDTH, HEADS = 4, 50, 32, 2


class InteractingLayer(nn.Module):
    """relu(softmax(q k^T) v + x W_Res) by heads; the softmax is over dimension 1, as in the original."""

    def __init__(self):
        super().__init__()
        for name in ("W_Query", "W_key", "W_Value", "W_Res"):
            setattr(self, name, nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.05))

    def forward(self, x):
        projected = (torch.tensordot(x, w, dims=([-1], [0])) for w in (self.W_Query, self.W_key, self.W_Value))
        query, key, value = (torch.stack(torch.split(p, WIDTH // HEADS, dim=2)) for p in projected)
        scores = torch.softmax(torch.einsum("bnik,bnjk->bnij", query, key), dim=1)
        heads = torch.cat(torch.split(torch.matmul(scores, value), 1), dim=-1).squeeze(0)
        return torch.relu(heads + torch.tensordot(x, self.W_Res, dims=([-1], [0])))


class AutoInt(nn.Module):
    def __init__(self):
        super().__init__()
        self.fields = nn.Embedding(FIELDS * VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(InteractingLayer() for _ in range(2))
        self.linear = nn.Linear(FIELDS * WIDTH, 1, bias=False)

    def forward(self, fields):
        x = self.fields(fields + VOCABULARY * torch.arange(FIELDS, device=fields.device))
        for layer in self.layers:
            x = layer(x)
        return torch.sigmoid(self.linear(x.flatten(start_dim=1)))


MODELS = [
    per_row(
        "deepctr_autoint",
        AutoInt,
        ids(FIELDS, VOCABULARY),
        FIELDS * (2 * 4 * WIDTH**2 + WIDTH),
        loss=of_probabilities,
        logits=None,
        notes="forward returns probabilities, [B, 1]; four raw parameters a layer.",
    )
]
