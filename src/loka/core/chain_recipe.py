"""How a chain quantizes its gradients; everything else of the fused path is the same in all recipes.

Input, activations and weights are e4m3 with one scale a tensor: a constant where a norm bounds the
values, else a delayed one. What differs is the gradient: the safe default is a row scale for
grad_input (by units, core/producer.py) and a tensor scale for grad_weight. A tensor scale for both
saves the units; e5m2, the usual default elsewhere, biases training (docs/chains.md). By recipes that end
in _current all scales but the weights' come from the very tensor where no bound gives them
(core/current.py): a pass more for each.

What backward needs of a link is Z in high precision, or, of recipes that end in _z8, before a norm that
takes off no mean Z in eight bits (core/producer.Rounded): half the bytes. Then grad_weight's operand A^T is
rounded a second time, and dZ has the rounding of Z in its slopes. Noise energies add: a GEMM has those of its
two operands, and what `Z8_NOISE` adds to them.
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
    """Of act'(y) and of act(y), for y normal and rounded to steps of 2^-4, which is where the largest of its
    block is between 4 and 8 rms: energy over the signal's, in units of that of one rounding to e4m3, 31.5 dB
    below it. Most blocks of 256 normal values have half the step and a quarter of the energy."""

    slope: float
    value: float


# tests/kernels/test_triton_rounded.py measures them.
Z8_NOISE = {
    Activation.NONE: Noise(0.0, 0.46),
    Activation.HARD_SWISH: Noise(0.14, 0.5),
    Activation.RELU: Noise(0.14, 0.46),
    Activation.SWISH: Noise(0.17, 0.49),
    Activation.GELU: Noise(0.28, 0.5),
}


@dataclass(frozen=True, kw_only=True)
class ChainRecipe:
    """`units`: gradients travel in units of their rows. `errors` names the recipe whose measured
    errors stand for those of each GEMM inside a chain: same formats, same granularities. `z8`: Z is
    kept for backward in eight bits where it may be (core/producer.may_round). `current`:
    scales that no bound gives come from the tensor itself, not from those of earlier steps."""

    name: str
    units: bool
    gradient: Format
    errors: Mapping[Gemm, str]
    z8: bool = False
    current: bool = False

    @property
    def candidate(self) -> str:
        return f"{FUSED}:{self.name}"

    def lost_db(self, gemm: Gemm, activations: Collection[Activation]) -> float:
        """By how many dB a GEMM's SQNR lies below that of `errors` in a chain with `activations`, where no
        value is more than 8 rms of its block."""
        if not self.z8 or gemm is Gemm.OUTPUT or not activations:
            return 0.0
        more = max(Z8_NOISE[activation].slope for activation in activations)
        if gemm is Gemm.GRAD_WEIGHT:
            more += max(Z8_NOISE[activation].value for activation in activations)
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
        replace(_E4M3_ROW, name="e4m3_row_z8", z8=True),
        replace(_E4M3_ROW, name="e4m3_row_current", current=True),
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
ADMITTED = ("e4m3_row_z8", SAFE)  # what a budget admits unless it says otherwise; ties go to less memory


def chain_recipe_named(name: str) -> ChainRecipe:
    """By "e4m3_row" or "fused:e4m3_row". Raises UnknownName, listing the known ones."""
    short = name.removeprefix(f"{FUSED}:")
    if short not in CHAIN_RECIPES:
        raise UnknownName(
            f"no recipe of a chain is called {name!r}", way_out=f"one of {', '.join(CHAIN_RECIPES)}"
        )
    return CHAIN_RECIPES[short]
