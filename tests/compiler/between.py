"""Models of two layers with code in between that a region has to read as it is written."""

import torch
from torch import nn


class Between(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.second(self.code(self.first(x)))

    def code(self, h):
        raise NotImplementedError


class CastToBool(Between):
    def code(self, h):
        return torch.relu(h).bool() * 2.0 + h


class Counted(Between):
    """Masks as numbers: two of them add up to 2, and have differences."""

    def code(self, h):
        low, high = (h > -0.3).to(h.dtype), (h > 0.4).float()
        return h * (low + high) + (1 - high) * h.sigmoid() - (low - high).abs() + (low + high + high).sum(-1, True)


class CountedByRows(Between):
    def code(self, h):
        some = h[:, :1] > 0
        return h * (some.float() + (h[:, 1:2] > 0).float())


class WithLiterals(Between):
    """Tensors that are written into the code: real ones among the fake ones of a graph."""

    def code(self, h):
        h = torch.where(h > 0, h, torch.tensor(-0.1)) * torch.tensor([0.7])
        return nn.functional.prelu(h, torch.tensor([0.2])) / torch.sqrt(torch.tensor(2.0))


class CastToEightBits(Between):
    def code(self, h):
        coarse = (h.detach().float() * 8 + 100).to(torch.float8_e4m3fn).float()
        return (coarse - 100) / 8 + h


class CastToIntegers(Between):
    def code(self, h):
        return (h.detach() * 4).to(torch.int32).to(h.dtype) + h


class AddedWithItsOwnGradient(torch.autograd.Function):
    """x [T, N] + p [N], where p's gradient is a sum over rows of a product with another such sum."""

    @staticmethod
    def forward(ctx, x, p):
        return x + p

    @staticmethod
    def backward(ctx, grad):
        return grad, (grad * grad.sum(0)).sum(0)


class SumOfSums(Between):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(64))

    def code(self, h):
        return torch.tanh(AddedWithItsOwnGradient.apply(h, self.shift))


class SummedUp(Between):
    """Backward begins inside of the graph, with one number."""

    def forward(self, x):
        return super().forward(x).float().sum() / 8

    def code(self, h):
        return torch.relu(h)


class BlockFactors(Between):
    """A factor for each block, of which there are as many as rows."""

    def __init__(self):
        super().__init__()
        self.factors = nn.Parameter(torch.arange(1.0, 5.0).view(4, 1))

    def forward(self, x):
        return super().forward(x[:4])

    def code(self, h):
        return torch.tanh(h.unflatten(-1, (4, 16)) * self.factors).flatten(-2)


class RepeatedMask(Between):
    """The sign of what a layer reads, for rows that repeat it."""

    def code(self, h):
        z = torch.tanh(h)
        mask = z.unsqueeze(1).expand(-1, 2, -1) > 0
        return self.first(z) + torch.where(mask, self.first(torch.stack([h, h.sin()], 1)), 0.0).sum(1)


class OfItsMaximum(Between):
    """Backward finds a maximum's element by comparing with it."""

    def forward(self, x):
        h = self.first(x)
        return h.amax(-1, keepdim=True) + 0 * h


class AtItsMaximum(Between):
    """Where rounding takes the largest up, a maximum that was rounded is above all."""

    def code(self, h):
        return torch.where(h >= h.amax(-1, keepdim=True), h, 0.1 * h)


class PooledTokens(Between):
    def forward(self, x):
        h = torch.tanh(self.first(x.unflatten(0, (-1, 4)))) + 1
        return self.second(h.transpose(1, 2).amax(-1))


class OfItsNorm(Between):
    """A statistic that forward has in registers, and backward rounded, from memory."""

    def code(self, h):
        blocks = h.unflatten(-1, (4, 16))
        blocks = blocks * torch.rsqrt(blocks.square().mean(-1, keepdim=True) + 1e-5)
        return (blocks / (1 + blocks.amax(-1, keepdim=True))).flatten(1)


class OfWiderNumbers(Between):
    """A maximum of float32 numbers that are made of rounded ones, in backward; under autocast."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.rand(64) + 0.5)

    def code(self, h):
        wide = torch.sigmoid(h * self.factor).unflatten(-1, (8, 8))
        return (wide / (1 + wide.amax(-1, keepdim=True))).flatten(1)


class OfItsLargest(Between):
    """A norm's gradient makes |h| anew, and compares that with the largest."""

    def code(self, h):
        h = nn.functional.layer_norm(h, (64,))
        return h / (1 + torch.linalg.vector_norm(h, ord=float("inf"), dim=-1, keepdim=True))


class WithOptions(Between):
    """Steps that say more than their operands: factors, bounds in the wrong order, powers."""

    def code(self, h):
        s = torch.sigmoid(h)
        sums = torch.add(h, s, alpha=3) - torch.sub(s, h, alpha=-2)
        return sums + h.clamp(1, -1) + (1 + s) ** 3 / 4 - (1 + s) ** 4 / 8 + (1 + s) ** 0.5 - 2 * (1 + s) ** -0.5


class Unbiased(Between):
    """A norm by blocks of four, whose variance is a sum of squares over three."""

    def code(self, h):
        blocks = h.unflatten(-1, (16, 4))
        variance, mean = torch.var_mean(blocks, -1, keepdim=True)
        return ((blocks - mean) * torch.rsqrt(variance + 1e-5)).flatten(1)


class TwoBlocks(Between):
    def code(self, h):
        for block in (16, 4):
            blocks = h.unflatten(-1, (-1, block))
            h = (blocks * torch.rsqrt(blocks.square().mean(-1, keepdim=True) + 1e-5)).flatten(1)
        return h


class AboveAHalf(Between):
    """A comparison of what a layer reads, and not with zero."""

    def code(self, h):
        z = torch.tanh(h)
        u = self.first(z)
        return torch.where(z > 0.5, u, -u)


class AboveZero(Between):
    """A mask of what a layer reads, small numbers beside a large one: e4m3 has zeros there."""

    def code(self, h):
        z = torch.cat([h[:, :1] * 0 + 1e7, torch.tanh(h[:, 1:])], 1)
        u = self.first(z)
        return torch.where(z > 0, u, -u)


class Leaky(Between):
    """Backward alone compares with zero what a layer reads, small numbers beside a large one; no ReLU made it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weights", torch.cat([torch.full((1,), 1e7), torch.ones(63)]))

    def code(self, h):
        weights = self.weights.to(h.dtype)  # the layer reads z itself, and no narrower copy
        z = torch.tanh(h) * weights
        return nn.functional.leaky_relu(z) / weights + self.first(z) / 1e7


class BothSides(Between):
    """Gradients of both sides of a choice: where(mask, dy, 0) and where(mask, 0, dy)."""

    def forward(self, x):
        h = self.first(x)
        return torch.where(h > h.flip(1), h, h * 0.5)


ALL = [
    OfItsMaximum,
    AtItsMaximum,
    PooledTokens,
    OfItsNorm,
    OfWiderNumbers,
    OfItsLargest,
    WithOptions,
    Unbiased,
    TwoBlocks,
    AboveAHalf,
    AboveZero,
    BothSides,
    CastToBool,
    Counted,
    CountedByRows,
    WithLiterals,
    CastToEightBits,
    CastToIntegers,
    SumOfSums,
    SummedUp,
    BlockFactors,
    RepeatedMask,
    Leaky,
]
