"""How a chain quantizes its gradients; everything else of the fused path is the same in all recipes.

Input, activations and weights are e4m3 with one scale a tensor: a constant where a norm bounds the
values, else a delayed one. What differs is the gradient: the safe default is a row scale for
grad_input (by units, core/producer.py) and a tensor scale for grad_weight. A tensor scale for both
saves the units; e5m2, the usual default elsewhere, biases training (docs/chains.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loka.core.exceptions import UnknownName
from loka.core.recipe import Format, Gemm

FUSED = "fused"
FUSED_GEMM = "fused_gemm"  # of the `output` site: the GEMM whose epilogue is the producer behind it


@dataclass(frozen=True, kw_only=True)
class ChainRecipe:
    """`units`: gradients travel in units of their rows. `errors` names the recipe whose measured
    errors stand for those of each GEMM inside a chain: same formats, same granularities."""

    name: str
    units: bool
    gradient: Format
    errors: Mapping[Gemm, str]

    @property
    def candidate(self) -> str:
        return f"{FUSED}:{self.name}"

    def gemm_recipe(self, gemm: Gemm) -> str:
        """The recipe under which the GEMM kernels inside a chain are called: scales of tensors only."""
        low = self.gradient is Format.E4M3 or gemm is Gemm.OUTPUT
        return "tensorwise_e4m3" if low else "tensorwise_e5m2"


CHAIN_RECIPES: dict[str, ChainRecipe] = {
    recipe.name: recipe
    for recipe in (
        ChainRecipe(
            name="e4m3_row",
            units=True,
            gradient=Format.E4M3,
            errors={
                Gemm.OUTPUT: "tensorwise_e4m3",
                Gemm.GRAD_INPUT: "rowwise_e4m3",
                Gemm.GRAD_WEIGHT: "tensorwise_e4m3",
            },
        ),
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
