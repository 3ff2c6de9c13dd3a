"""How a chain quantizes its gradients; everything else of the fused path is the same in all recipes.

Input, activations and weights are e4m3 with one scale a tensor: a constant where a norm bounds the
values, else a delayed one. What differs is the gradient: the safe default is a row scale for
grad_input (by units, core/producer.py) and a tensor scale for grad_weight. A tensor scale for both
saves the units; e5m2, the usual default elsewhere, biases training (docs/chains.md).

What backward needs of a link is Z in high precision, or, of recipes that end in _y8, behind a block norm
without parameters y = norm(Z) in e4m3: half the bytes. Then grad_weight's operand A^T is rounded a second
time, and dZ has the rounding of y in its slopes. Noise energies add: a GEMM has those of its two operands,
and what `Y8_NOISE` adds to them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from loka.core.chain import Activation
from loka.core.exceptions import UnknownName
from loka.core.recipe import Format, Gemm

FUSED = "fused"
FUSED_GEMM = "fused_gemm"  # of the `output` site: the GEMM whose epilogue is the producer behind it


class Noise(NamedTuple):
    """Of act'(y) and of act(y), for y normal and rounded to e4m3: energy over the signal's, in units of that
    of one rounding, 31.5 dB below it."""

    slope: float
    value: float


# tests/kernels/test_triton_normal.py measures them. Hard swish: its slope jumps where |y| is 3.
Y8_NOISE = {
    Activation.NONE: Noise(0.0, 1.0),
    Activation.HARD_SWISH: Noise(1.5, 1.7),
    Activation.RELU: Noise(0.07, 1.0),
    Activation.SWISH: Noise(0.12, 1.45),
    Activation.GELU: Noise(0.11, 1.35),
}


@dataclass(frozen=True, kw_only=True)
class ChainRecipe:
    """`units`: gradients travel in units of their rows. `errors` names the recipe whose measured
    errors stand for those of each GEMM inside a chain: same formats, same granularities. `saved`: the
    format of what backward needs of each link where a norm bounds it; None for high precision."""

    name: str
    units: bool
    gradient: Format
    errors: Mapping[Gemm, str]
    saved: Format | None = None

    @property
    def candidate(self) -> str:
        return f"{FUSED}:{self.name}"

    def lost_db(self, gemm: Gemm, activations: Collection[Activation]) -> float:
        """By how many dB a GEMM's SQNR is at most below that of `errors`, in a chain with `activations`."""
        if self.saved is None or gemm is Gemm.OUTPUT or not activations:
            return 0.0
        more = max(Y8_NOISE[activation].slope for activation in activations)
        if gemm is Gemm.GRAD_WEIGHT:
            more += max(Y8_NOISE[activation].value for activation in activations)
        return 10 * math.log10(1 + more / 2)

    def gemm_recipe(self, gemm: Gemm) -> str:
        """The recipe under which the GEMM kernels inside a chain are called: scales of tensors only."""
        low = self.gradient is Format.E4M3 or gemm is Gemm.OUTPUT
        return "tensorwise_e4m3" if low else "tensorwise_e5m2"


_E4M3_ROW = ChainRecipe(
    name="e4m3_row",
    units=True,
    gradient=Format.E4M3,
    errors={
        Gemm.OUTPUT: "tensorwise_e4m3",
        Gemm.GRAD_INPUT: "rowwise_e4m3",
        Gemm.GRAD_WEIGHT: "tensorwise_e4m3",
    },
)

CHAIN_RECIPES: dict[str, ChainRecipe] = {
    recipe.name: recipe
    for recipe in (
        _E4M3_ROW,
        replace(_E4M3_ROW, name="e4m3_row_y8", saved=Format.E4M3),
        ChainRecipe(
            name="e4m3_tensor",
            units=False,
            gradient=Format.E4M3,
            errors=dict.fromkeys(Gemm, "tensorwise_e4m3"),
        ),
        ChainRecipe(
            name="e5m2_tensor",
            units=False,
            gradient=Format.E5M2,
            errors={
                Gemm.OUTPUT: "tensorwise_e4m3",
                Gemm.GRAD_INPUT: "tensorwise_e5m2",
                Gemm.GRAD_WEIGHT: "tensorwise_e5m2",
            },
        ),
    )
}
SAFE = "e4m3_row"


def chain_recipe_named(name: str) -> ChainRecipe:
    """By "e4m3_row" or "fused:e4m3_row". Raises UnknownName, listing the known ones."""
    short = name.removeprefix(f"{FUSED}:")
    if short not in CHAIN_RECIPES:
        raise UnknownName(
            f"no recipe of a chain is called {name!r}", way_out=f"one of {', '.join(CHAIN_RECIPES)}"
        )
    return CHAIN_RECIPES[short]
