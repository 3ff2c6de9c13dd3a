"""The parts that the models share: MLPs, embedding tables, and the front that turns features into tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from loka.core.exceptions import UnknownName

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "silu": nn.SiLU, "gelu": nn.GELU}


def mlp(
    in_features: int,
    widths: Sequence[int],
    *,
    activation: str = "relu",
    norm: bool = False,
    last_activation: bool = True,
) -> nn.Sequential:
    """[..., in_features] -> [..., widths[-1]]: Linear, LayerNorm if `norm`, activation, for each width.

    Without `last_activation` the last Linear is followed by nothing.
    """
    if activation not in ACTIVATIONS:
        raise UnknownName(f"activation {activation!r}", why=[f"known: {', '.join(ACTIVATIONS)}"])
    layers: list[nn.Module] = []
    for index, width in enumerate(widths):
        layers.append(nn.Linear(in_features, width))
        if index + 1 < len(widths) or last_activation:
            if norm:
                layers.append(nn.LayerNorm(width))
            layers.append(ACTIVATIONS[activation]())
        in_features = width
    return nn.Sequential(*layers)


class Embeddings(nn.Module):
    """One merged table [sum V, dim] for all sparse features: ids [B, F] -> [B, F, dim].

    One lookup instead of F. The gradient is sparse, so the optimizer touches the rows of the batch only.
    """

    offsets: torch.Tensor

    def __init__(self, vocab_sizes: Sequence[int], dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(sum(vocab_sizes), dim, sparse=True)
        sizes = torch.tensor(vocab_sizes, dtype=torch.int64, device="cpu")
        offsets = torch.cumsum(sizes, 0) - sizes
        # Follows from the sizes, so no state dict carries it. Moved so that a meta model is meta throughout.
        self.register_buffer("offsets", offsets.to(self.table.weight.device), persistent=False)
        with torch.no_grad():
            # DLRM's initialization: uniform in +-sqrt(1 / V) per table.
            for part in self.table.weight.split(list(vocab_sizes)):
                nn.init.uniform_(part, -(len(part) ** -0.5), len(part) ** -0.5)

    def forward(self, sparse: torch.Tensor) -> torch.Tensor:
        return self.table(sparse + self.offsets)


class DenseVectors(nn.Module):
    """A learned vector per dense feature, scaled by its value: [B, D] -> [B, D, dim]. No GEMM."""

    def __init__(self, dense_features: int, dim: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.empty(dense_features, dim))
        nn.init.uniform_(self.vectors, -(dim**-0.5), dim**-0.5)

    def forward(self, dense: torch.Tensor) -> torch.Tensor:
        return dense.unsqueeze(-1) * self.vectors


class Front(nn.Module):
    """Features to tokens: dense [B, D], sparse [B, F] -> [B, tokens, dim], dense tokens first.

    With `bottom` widths the dense features make one token, MLP(bottom + [dim]); with None each makes its own,
    as in FuxiCTR. Without dense features there is no dense token.
    """

    def __init__(
        self,
        *,
        dense_features: int,
        vocab_sizes: Sequence[int],
        dim: int,
        bottom: Sequence[int] | None,
        activation: str = "relu",
        norm: bool = False,
    ) -> None:
        super().__init__()
        self.embeddings = Embeddings(vocab_sizes, dim)
        self.dense: nn.Module | None = None
        dense_tokens = 0
        if dense_features and bottom is None:
            self.dense = DenseVectors(dense_features, dim)
            dense_tokens = dense_features
        elif dense_features and bottom is not None:
            self.dense = mlp(dense_features, [*bottom, dim], activation=activation, norm=norm)
            dense_tokens = 1
        self.tokens = dense_tokens + len(vocab_sizes)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        tokens = self.embeddings(sparse)
        if self.dense is None:
            return tokens
        batch, _, dim = tokens.shape
        return torch.cat([self.dense(dense).view(batch, -1, dim), tokens], dim=1)
