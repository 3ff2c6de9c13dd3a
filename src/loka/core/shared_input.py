"""Linear layers that read one tensor: attention's q, k and v, parallel branches, gates beside towers, heads.

    y_i = x W_i^T + b_i,   i = 1 .. n          one layer of W = [W_1; ..; W_n] and of y = [y_1, .., y_n]

As a whole (nn/shared_input.py) x is quantized once, and each of the three GEMMs runs once:

    output       [y_1, .., y_n] = x W^T                   row scales of W are those of the W_i
    grad_input   dx = sum_i dy_i W_i = [dy_1, .., dy_n] W        the sum is in the GEMM, over a longer K
    grad_weight  [dW_1; ..; dW_n] = [dy_1, .., dy_n]^T x     row scales of dy^T are those of the dy_i^T

So under row scales `output` and `grad_weight` quantize every number as the layers by themselves do. Only
grad_input's scales are shared: of a row of dy, and of an input feature in W. e4m3 keeps its relative
precision from its largest, 2^8.8, down to 2^-6: a branch whose gradients are smaller than the others' by
more adds next to nothing to the sum. One whose weights are, and which alone has gradients, would lose: 0.2 dB
of 28.6 at 2^-12 of the others' weights, 1.5 at 2^-13, 5 at 2^-14 (tests/nn/test_shared_input.py). Its dW is
not touched by that, as it would be under a tensor scale; therefore there is none here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from loka.core.recipe import Granularity, Recipe
from loka.core.signature import LinearShape, ModelSignature


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One of the linear layers. `dense`: the model takes a view of its output that only a contiguous
    tensor allows, so it gets a copy, not its columns of the common output."""

    path: str
    out_features: int
    bias: bool
    dense: bool = False


@dataclass(frozen=True, kw_only=True)
class SharedInput:
    """`branches` in the order in which they are called; two at least."""

    in_features: int
    branches: tuple[Branch, ...]

    @property
    def name(self) -> str:
        return "+".join(self.linears)

    @property
    def linears(self) -> tuple[str, ...]:
        return tuple(branch.path for branch in self.branches)

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(branch.out_features for branch in self.branches)

    @property
    def shapes(self) -> dict[str, LinearShape]:
        return {
            branch.path: LinearShape(
                in_features=self.in_features, out_features=branch.out_features, bias=branch.bias
            )
            for branch in self.branches
        }

    def without(self, paths: Collection[str]) -> SharedInput | None:
        """The branches that are not in `paths`; None where fewer than two are left."""
        left = tuple(branch for branch in self.branches if branch.path not in paths)
        return replace(self, branches=left) if len(left) > 1 else None

    def to_json(self) -> dict[str, Any]:
        return {"in_features": self.in_features, "branches": [dict(b.__dict__) for b in self.branches]}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], model: ModelSignature) -> SharedInput:
        """Raises LookupError, TypeError or ValueError for what is no such group of `model` by `to_json`."""
        branches = tuple(Branch(**branch) for branch in content["branches"])
        group = cls(in_features=content["in_features"], branches=branches)
        if len(set(group.linears)) < max(len(branches), 2):
            raise ValueError("fewer than two layers share an input, or one is named twice")
        for path, shape in group.shapes.items():
            if model.layers.get(path) != shape:
                raise ValueError(f"{path} ({shape}), which shares its input, is no layer of the model")
        if not all(branch.dense in (True, False) for branch in branches):
            raise ValueError(f"{group.name}: a branch does not say how its output is read")
        return group


def shared_from_json(content: Iterable[Mapping[str, Any]], model: ModelSignature) -> tuple[SharedInput, ...]:
    """Groups of one model; a layer is in one of them at most. Raises as `SharedInput.from_json`."""
    groups = tuple(SharedInput.from_json(group, model) for group in content)
    paths = [path for group in groups for path in group.linears]
    if len(set(paths)) < len(paths):
        raise ValueError("a layer is in two groups that share an input")
    return groups


def recipe_fits(recipe: Recipe) -> bool:
    """Whether a recipe has scales of rows alone, in all three GEMMs (see the module's text)."""
    several = (recipe.output, recipe.grad_input, recipe.grad_weight)
    return all(
        casts is not None and all(cast.granularity is Granularity.ROW for cast in casts) for casts in several
    )
