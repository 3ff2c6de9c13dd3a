"""Models as people write them: plain PyTorch, nothing of LoKA in them.

Widths go through `Scale`, so that all of it can be tried with small numbers.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F


class Tower(nn.Module):
    """Blocks one after the other: Linear, a norm or none, an activation."""

    def __init__(
        self,
        widths: Sequence[int],
        activation: type[nn.Module],
        *,
        norm: type[nn.Module] | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        blocks = []
        for before, after in itertools.pairwise(widths):
            parts: list[nn.Module] = [nn.Linear(before, after, bias=bias)]
            if norm is not None:
                parts.append(norm(after))
            blocks.append(nn.Sequential(*parts, activation()))
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


class MLP(nn.Module):
    """MLPerf's: Linear and ReLU in one flat Sequential; with `logit` one more Linear to one number."""

    def __init__(self, widths: Sequence[int], *, logit: bool = False) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            parts += [nn.Linear(before, after), nn.ReLU()]
        if logit:
            parts.append(nn.Linear(widths[-1], 1))
        self.layers = nn.Sequential(*parts)
        self.logit = logit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        return y.squeeze(1) if self.logit else y


class FeedForward(nn.Module):
    """A Transformer's FFN with the norm in front: x + down(gelu(up(norm(x))))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class GatedFeedForward(nn.Module):
    """Llama's: x + down(silu(gate(h)) * up(h)), h = RMSNorm(x), no biases."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Stack(nn.Module):
    """Residual blocks [B, width] -> [B, width], with nothing around them."""

    def __init__(self, block: type[nn.Module], width: int, hidden: int, count: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(width, hidden) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class LowRankCross(nn.Module):
    """Cross layers of raw parameters and functions, as TorchRec's LowRankCrossNet has them."""

    def __init__(self, features: int, layers: int, rank: int) -> None:
        super().__init__()
        self.layers = layers
        self.W_kernels = nn.ParameterList(
            nn.Parameter(nn.init.xavier_normal_(torch.empty(features, rank))) for _ in range(layers)
        )
        self.V_kernels = nn.ParameterList(
            nn.Parameter(nn.init.xavier_normal_(torch.empty(rank, features))) for _ in range(layers)
        )
        self.bias = nn.ParameterList(nn.Parameter(nn.init.zeros_(torch.empty(features))) for _ in range(layers))

    def forward(self, x_0: torch.Tensor) -> torch.Tensor:
        x_l = x_0
        for layer in range(self.layers):
            x_l_v = F.linear(x_l, self.V_kernels[layer])
            x_l_w = F.linear(x_l_v, self.W_kernels[layer])
            x_l = x_0 * (x_l_w + self.bias[layer]) + x_l
        return x_l


class Perceptrons(nn.Module):
    """TorchRec's MLP: a module for each layer, its activation a function."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = torch.relu(linear(x))
        return x


class DCNv2(nn.Module):
    """DLRM-DCNv2 without its tables: dense [B, D], pooled [B, F, dim] -> logits [B]."""

    def __init__(
        self, *, dense: int, fields: int, bottom: Sequence[int], layers: int, rank: int, over: Sequence[int]
    ) -> None:
        super().__init__()
        features = (fields + 1) * bottom[-1]
        self.bottom = Perceptrons([dense, *bottom])
        self.cross = LowRankCross(features, layers, rank)
        self.over = Perceptrons([features, *over])
        self.logit = nn.Linear(over[-1], 1)

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        together = torch.cat([self.bottom(dense).unsqueeze(1), pooled], dim=1).flatten(1)
        return self.logit(self.over(self.cross(together))).squeeze(1)
