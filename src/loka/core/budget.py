"""What a plan is allowed to cost, and what a speed-up must at least be worth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from loka.core.chain_recipe import SAFE, chain_recipe_named


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits that every FP8 decision of a plan keeps.

    Attributes:
        min_sqnr_db: floor on the lower end of a site's `sqnr_db` interval. e4m3 on both
            operands gives about 28.5 dB, e5m2 gradients about 24.5 dB; the default admits the
            first and refuses the second, whose bias costs NE in training (docs/plan.md).
            None lifts it.
        max_mere: limit on the paper's metric, for parity (it used 0.2). None by default.
        min_speedup: least speed-up over bf16 worth having, on the lower end of its interval.
            It binds only where times were measured.
        keep: patterns (fnmatch) of sites "path/gemm" or of module paths to keep in hp.
        keep_prediction: keep linear layers with at most 8 outputs in hp: quantizing the
            logit layer's gradients biases training (71 % of e5m2's damage).
        chains: "measured" forms the chains that were timed and are faster as a whole; "always"
            those within the error limits, timed or not; "never" none.
        chain_recipes: how chains may quantize (core/chain_recipe.py). The default is the one that
            does not bias training; faster ones are admitted by name.
        on_miss: "keep" a site in hp when no candidate fits, or "raise" NoKernelFits.
    """

    min_sqnr_db: float | None = 25.0
    max_mere: float | None = None
    min_speedup: float = 1.05
    keep: tuple[str, ...] = ()
    keep_prediction: bool = True
    chains: Literal["measured", "always", "never"] = "measured"
    chain_recipes: tuple[str, ...] = (SAFE,)
    on_miss: Literal["keep", "raise"] = "keep"

    def __post_init__(self) -> None:
        if self.on_miss not in ("keep", "raise"):
            raise ValueError(f"on_miss is {self.on_miss!r}; it must be 'keep' or 'raise'")
        if self.chains not in ("measured", "always", "never"):
            raise ValueError(f"chains is {self.chains!r}; it must be 'measured', 'always' or 'never'")
        if isinstance(self.chain_recipes, str):
            raise ValueError(f"chain_recipes is the text {self.chain_recipes!r}; it must be a tuple of names")
        for recipe in self.chain_recipes:
            chain_recipe_named(recipe)
        for name in ("min_sqnr_db", "max_mere"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name} is {value}; it must be finite, or None to lift the limit")
        if not 0 <= self.min_speedup < math.inf:
            raise ValueError(f"min_speedup is {self.min_speedup}; a ratio of times cannot be negative")
        if isinstance(self.keep, str):
            raise ValueError(f"keep is the text {self.keep!r}; it must be a tuple of patterns")

    def to_json(self) -> dict[str, Any]:
        lists = {"keep": list(self.keep), "chain_recipes": list(self.chain_recipes)}
        return {**asdict(self), **lists}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Budget:
        recipes = tuple(content.get("chain_recipes", (SAFE,)))
        return cls(**{**content, "keep": tuple(content["keep"]), "chain_recipes": recipes})
