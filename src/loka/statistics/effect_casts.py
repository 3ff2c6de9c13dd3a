"""Casts whose effects are probed: what the `output` GEMM of any candidate does; for comparison, powers of two
for tensors, and e5m2."""

from loka.core.recipe import RECIPES, Cast, Casts, Format, Granularity

_POW2 = Cast(Format.E4M3, Granularity.TENSOR, power_of_two=True)
_E5M2 = Cast(Format.E5M2, Granularity.ROW)
_COMPARED: dict[str, Casts] = {"tensorwise_e4m3_pow2": (_POW2, _POW2), "rowwise_e5m2": (_E5M2, _E5M2)}
assert not _COMPARED.keys() & RECIPES.keys(), "a recipe needs a name of its own"

CASTS: dict[str, Casts] = {**{recipe.name: recipe.output for recipe in RECIPES.values() if recipe.output}, **_COMPARED}

LEARNING = frozenset(name for name, (left, _) in CASTS.items() if left.centred or left.hot)
"""Those whose error depends on means or hot columns that the statistics tell."""
