"""The models of the proof: five of the zoo with the mods, TorchRec's DLRM_DCN, and readers of histories.

`DlrmDcn` computes what torchrec.models.dlrm.DLRM_DCN does, in plain PyTorch (TorchRec need not be there):
MLPs of Linear and ReLU, and LowRankCrossNet, raw parameters that F.linear reads:

    x_l+1 = x_0 * (W_l (V_l x_l) + b_l) + x_l
"""

import itertools
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from loka import mods
from loka.data.generated.synthetic import VOCAB_SIZES
from loka.zoo import build
from loka.zoo.history import HistoryTable
from loka.zoo.layers import Embeddings

DENSE = 13
MODS = (mods.NoBias(), mods.BlockNorm(256), mods.HardSwish())  # what the command line puts in
ZOO = ("dlrm", "dcnv2", "wukong", "dhen", "interformer")
READERS = {"kunlun": "small", "hstu": "small", "hstu_hybrid": "hybrid"}  # of histories, by their size
MODELS = (*ZOO, "dlrm_dcn", *READERS)


class DlrmDcn(nn.Module):
    """dense [B, 13], sparse [B, 26] ids -> logits [B]."""

    def __init__(
        self, *, dim: int = 16, bottom: Sequence[int] = (64,), over: Sequence[int] = (256, 128, 64), rank: int = 64
    ) -> None:
        super().__init__()
        self.embeddings = Embeddings(VOCAB_SIZES, dim)
        self.dense_arch = perceptrons([DENSE, *bottom, dim])
        width = (len(VOCAB_SIZES) + 1) * dim
        self.V_kernels, self.W_kernels, self.bias = (
            nn.ParameterList(nn.Parameter(torch.empty(shape)) for _ in range(2))
            for shape in ((rank, width), (width, rank), (width,))
        )
        for kernel in (*self.V_kernels, *self.W_kernels):
            nn.init.xavier_normal_(kernel)
        for bias in self.bias:
            nn.init.zeros_(bias)
        self.over_arch = perceptrons([width, *over])
        self.logit = nn.Linear(over[-1], 1)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        tokens = torch.cat([self.dense_arch(dense).unsqueeze(1), self.embeddings(sparse)], dim=1)
        x_0 = x = tokens.flatten(1)
        for down, up, bias in zip(self.V_kernels, self.W_kernels, self.bias, strict=True):
            x = x_0 * (F.linear(F.linear(x, down), up) + bias) + x
        return self.logit(self.over_arch(x)).squeeze(1)


def perceptrons(widths: Sequence[int]) -> nn.Sequential:
    return nn.Sequential(*(part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())))


def model_named(name: str, history: int = 0) -> nn.Module:
    """A fresh one, from torch's seed; with `history` it is called with sequences of ids of the first column."""
    if name == "dlrm_dcn":
        return DlrmDcn()
    table = HistoryTable(column=0) if history else None
    kind, size = name.partition("_")[0], READERS.get(name, "small")
    model = build(kind, dense_features=DENSE, vocab_sizes=VOCAB_SIZES, size=size, history=table)
    mods.apply(model, MODS)
    return model
