"""The parts that the models share: MLPs, embedding tables, and the front that turns features into tokens."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from loka.core.exceptions import UnknownName
from loka.zoo.history import HistoryTable

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


class TokenLinear(nn.Module):
    """W X: [B, n, d] -> [B, out_tokens, d], a Linear on X^T: each new token is a weighted sum of the tokens.

    Wukong's LCB, InterFormer's LCE, the W_m of DHEN, and the residual where the count of tokens changes.
    """

    def __init__(self, tokens: int, out_tokens: int) -> None:
        super().__init__()
        self.linear = nn.Linear(tokens, out_tokens, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.transpose(1, 2)).transpose(1, 2)


class Embeddings(nn.Module):
    """One merged table [sum V, dim] for all sparse features: ids [B, F] -> [B, F, dim].

    One lookup instead of F. The gradient is sparse, so the optimizer touches the rows of the batch only.
    With `column` all ids [B, L] are that feature's; columns after the F given ids belong to histories.
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

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Tables of features that TorchRec held (loka.distributed.EmbeddingBags) load as the merged one."""
        bags = [f"{prefix}bags.embedding_bags.t{column}.weight" for column in range(len(self.offsets))]
        if all(bag in state_dict for bag in bags):
            state_dict[f"{prefix}table.weight"] = torch.cat([state_dict.pop(bag) for bag in bags])
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, ids: torch.Tensor, column: int | None = None) -> torch.Tensor:
        offsets = self.offsets[: ids.shape[1]] if column is None else self.offsets[column]
        return self.table(ids + offsets)


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
    as in FuxiCTR. Without dense features there is no dense token. `history` adds `events`.

    Attributes:
        dim, tokens, dense_tokens: width of a token, how many there are, and how many of them are dense.
        history: the table of `events`, None without a history.
        history_column: the sparse feature whose table that is, None if it is the history's own.
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
        history: HistoryTable | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.history = None if history is None else history.place(vocab_sizes)
        self.history_column = None if history is None else history.column
        own = [history.vocab_size] if history and history.vocab_size else []
        self.embeddings = Embeddings([*vocab_sizes, *own], dim)
        self.dense: nn.Module | None = None
        self.dense_tokens = 0
        if dense_features and bottom is None:
            self.dense = DenseVectors(dense_features, dim)
            self.dense_tokens = dense_features
        elif dense_features and bottom is not None:
            self.dense = mlp(dense_features, [*bottom, dim], activation=activation, norm=norm)
            self.dense_tokens = 1
        self.tokens = self.dense_tokens + len(vocab_sizes)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        tokens = self.embeddings(sparse)
        if self.dense is None:
            return tokens
        batch, _, dim = tokens.shape
        return torch.cat([self.dense(dense).view(batch, -1, dim), tokens], dim=1)

    def events(
        self, sequence: torch.Tensor | None, lengths: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Ids [B, L] and lengths [B] to tokens [B, L, dim], zero past the length, and which are there [B, L].

        None for a model without a history. Raises ValueError when sequences are given to such a model, or
        not given to one that has a history.
        """
        if self.history is None:
            if sequence is not None:
                raise ValueError("the model was built without history=HistoryTable(...), but got sequences")
            return None
        if sequence is None or lengths is None:
            raise ValueError("the model was built with a history; call it with sequence [B, L] and lengths [B]")
        seen = torch.arange(sequence.shape[1], device=sequence.device) < lengths.unsqueeze(1)
        return self.embeddings(sequence, self.history) * seen.unsqueeze(-1), seen
