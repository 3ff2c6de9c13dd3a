"""BlockNorm: RMSNorm without parameters over fixed blocks of features (the paper's mod 2).

    y = x / sqrt(mean(x^2 over the block) + eps)

A block never crosses a GEMM tile, so a kernel's epilogue can do it; and |y| <= sqrt(block),
because a value's square is at most the sum over its block: FP8 needs no amax after it.
"""

import torch
from torch import nn


class BlockNorm(nn.Module):
    """x [..., features] -> the same shape and dtype. The last block may be shorter."""

    def __init__(self, features: int, block: int = 256, *, eps: float = 1e-6) -> None:
        super().__init__()
        if features < 1 or block < 1:
            raise ValueError(f"BlockNorm needs positive sizes, got features={features}, block={block}")
        self.features = features
        self.block = min(block, features)
        self.eps = eps

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.shape[-1] != self.features:
            raise ValueError(f"BlockNorm({self.features}) got an input with {input.shape[-1]} features")
        values = input.float()
        whole = self.features - self.features % self.block
        parts = [self._norm(values[..., :whole], self.block)]
        if whole < self.features:
            parts.append(self._norm(values[..., whole:], self.features - whole))
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)).to(input.dtype)

    def _norm(self, values: torch.Tensor, block: int) -> torch.Tensor:
        blocks = values.unflatten(-1, (-1, block))
        return nn.functional.rms_norm(blocks, (block,), eps=self.eps).flatten(-2)

    def extra_repr(self) -> str:
        return f"{self.features}, block={self.block}"
