"""What a kernel must say about itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from loka.core.problem import Problem
from loka.core.recipe import Recipe
from loka.core.reference import Quantized

Multiples = tuple[int, int, int]


def nothing_missing() -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A way to compute out [M, N] = A [M, K] @ B [N, K]^T from quantized operands.

    Attributes:
        unsupported: why this problem, with its exact sides, cannot run on its target under this
            recipe, or None. Answers on any machine for any target; nothing is executed.
        multiples: what to pad M, N and K to beforehand (zeros are exact). Where padding cures
            `unsupported`, LoKA pads.
        run: computes; only called for what `unsupported` accepts.
        missing: why the library cannot be used on this machine at all, or None.
        emulates: True for a stand-in that shows the numerics and has no speed.
    """

    name: str
    summary: str
    recipes: tuple[str, ...]
    unsupported: Callable[[Problem, Recipe], str | None]
    multiples: Callable[[Problem, Recipe], Multiples]
    run: Callable[[Quantized, Quantized, torch.dtype], torch.Tensor]
    missing: Callable[[], str | None] = nothing_missing
    emulates: bool = False
