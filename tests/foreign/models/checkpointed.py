"""Activation checkpointing: over submodules and over a local function with a raw parameter, of both kinds.

Without reentrance backward computes again only as far as it needs: a block's last GEMM does not run twice.
checkpoint_sequential leaves its last segment alone.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from foreign.spec import floats, per_row


class Block(nn.Module):
    """x + down(relu(up(x)))."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))


class Modules(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.stem = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.out(x)


class Functions(nn.Module):
    """A closure is checkpointed that reads the owner's raw parameters and one of its modules."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.stem = nn.Linear(32, 32)
        self.w = nn.Parameter(torch.randn(64, 32) / 32**0.5)
        self.v = nn.Parameter(torch.randn(64, 32) / 64**0.5)
        self.mix = nn.Linear(32, 32)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        def inner(x):
            return x + self.mix(F.relu(F.linear(x, self.w)) @ self.v)

        x = checkpoint(inner, self.stem(x), use_reentrant=self.reentrant)
        return self.out(x)


class Sequentially(nn.Module):
    """checkpoint_sequential over a Sequential, which calls the modules of each of two segments by itself."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(32, 32)
        self.blocks = nn.Sequential(Block(), nn.ReLU(), Block(), nn.ReLU())
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        return self.out(checkpoint_sequential(self.blocks, 2, self.stem(x), use_reentrant=False))


_MODULES = 32 * 32 + 4 * 32 * 64 + 32
_FUNCTIONS = 2 * 32 * 32 + 2 * 32 * 64 + 32


def _checkpointed(name, build, multiplications, **flags):
    return per_row(
        name,
        build,
        floats(32),
        multiplications,
        notes="FLOPs are those of one forward, without the recomputation in backward.",
        export_strict=False,  # KeyError in torch.export on any activation checkpoint
        **flags,
    )


MODELS = [
    _checkpointed("checkpoint_modules", lambda: Modules(False), _MODULES),
    _checkpointed("checkpoint_modules_reentrant", lambda: Modules(True), _MODULES),
    _checkpointed("checkpoint_function", lambda: Functions(False), _FUNCTIONS),
    _checkpointed("checkpoint_function_reentrant", lambda: Functions(True), _FUNCTIONS),
    _checkpointed("checkpoint_sequential", Sequentially, _MODULES, fullgraph=False),  # Dynamo skips it
]
