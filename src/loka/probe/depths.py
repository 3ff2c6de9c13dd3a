"""Depth histograms of a layer's operands: which ones, collecting them from sampled rows, keeping them.

An operand needs a histogram for every kind of scale that a recipe gives it, as it lies for one GEMM
and transposed for the other (core/recipe.py): a row of the transpose is a column. They are kept in
the operand's `Distribution` as tensors `depth_<granularity>`, with `_transposed` and `_pow2` after it,
and merge by addition, over steps, ranks and runs. Eight of 36 KB for each operand with today's recipes.

Rows are a sample, scales are not: the amax of a tensor, of a column or of a block is that of the
whole tensor, which costs one pass over it for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from loka.core.depth import DepthError, DepthHistogram, depth_error, depth_histogram, group_amax
from loka.core.recipe import RECIPES, SHARED, Cast, Gemm, Granularity, Recipe
from loka.core.stats import Distribution, LinearStats

PREFIX = "depth_"
_SQUARE = (Granularity.TENSOR, Granularity.BLOCK_128X128)  # a transpose has the same groups

Depths = dict[str, torch.Tensor]
"""Tables of `core.depth.DepthHistogram` by `Layout.name`."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One kind of scale of one operand; see `layout_of`."""

    granularity: Granularity
    transposed: bool
    power_of_two: bool

    @property
    def name(self) -> str:
        """Such as depth_row, depth_group_1x128_transposed or depth_row_pow2."""
        ends = ("_transposed" if self.transposed else "") + ("_pow2" if self.power_of_two else "")
        return PREFIX + self.granularity.name.lower() + ends


def layout_of(cast: Cast, *, transposed: bool) -> Layout:
    """The histogram that answers for `cast` of an operand, or of its transpose."""
    return Layout(
        granularity=cast.granularity,
        transposed=transposed and cast.granularity not in _SQUARE,
        power_of_two=cast.power_of_two,
    )


def layouts(operand: str, recipes: Iterable[Recipe] | None = None) -> tuple[Layout, ...]:
    """What `recipes` (all known ones) ask of `operand`: input, weight or grad_output."""
    found: dict[Layout, None] = {}
    for recipe in RECIPES.values() if recipes is None else recipes:
        for transposed, (gemm, side) in zip((False, True), SHARED[operand], strict=True):
            casts = recipe.casts(gemm)
            if casts is not None:
                found[layout_of(casts[side], transposed=transposed)] = None
    return tuple(found)


def collect(
    hp: torch.Tensor,
    wanted: Iterable[Layout],
    *,
    picked: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
) -> Depths:
    """Histograms of the rows `picked` [m] of `hp` [T, K]; of all where None. Nothing waits for the device.

    `weight`, broadcastable to the sample [m, K], goes into the histograms of `hp` as it lies: squared
    gradients, or the squared norms [K] of the weight's columns (core/depth.py).
    """
    sample = hp if picked is None else hp[picked]
    tables: Depths = {}
    amaxes: dict[tuple[Granularity, bool], torch.Tensor] = {}
    for layout in wanted:
        key = (layout.granularity, layout.transposed)
        if key not in amaxes:
            amaxes[key] = _amax(hp, sample, picked, *key)
        table = depth_histogram(
            sample,
            layout.granularity,
            power_of_two=layout.power_of_two,
            weight=None if layout.transposed else weight,
            amax=amaxes[key],
        ).table
        tables[layout.name] = table
    return tables


def _amax(
    hp: torch.Tensor,
    sample: torch.Tensor,
    picked: torch.Tensor | None,
    granularity: Granularity,
    transposed: bool,
) -> torch.Tensor:
    """The amax of the groups of the sample's elements, broadcastable to [m, K]."""
    if not transposed and granularity.value[0] == 1:  # a row knows its own
        return group_amax(sample, granularity)
    amax = group_amax(hp.t(), granularity).t() if transposed else group_amax(hp, granularity)
    return amax if picked is None or amax.shape[0] == 1 else amax[picked]


def merge(so_far: Mapping[str, torch.Tensor], more: Mapping[str, torch.Tensor]) -> Depths:
    """The sums; a layout that one of them lacks (another set of recipes) is taken from the other.

    Raises ValueError where one was collected with weights and the other without.
    """
    merged = dict(so_far)
    for name, table in more.items():
        if name in merged:
            table = (DepthHistogram(merged[name]) + DepthHistogram(table.to(merged[name]))).table
        merged[name] = table
    return merged


def with_depths(distribution: Distribution, depths: Mapping[str, torch.Tensor]) -> Distribution:
    """`distribution` with the tables beside its tensors; earlier tables of the same names go."""
    return replace(distribution, tensors={**distribution.tensors, **depths})


def depths_of(distribution: Distribution) -> Depths:
    """The tables in `distribution`: none where it was learnt by a LoKA without them."""
    return {name: table for name, table in distribution.tensors.items() if name.startswith(PREFIX)}


def histogram_of(distribution: Distribution, cast: Cast, *, transposed: bool) -> DepthHistogram | None:
    """The histogram that answers for `cast` of this operand or its transpose, if it was collected."""
    table = distribution.tensors.get(layout_of(cast, transposed=transposed).name)
    return None if table is None else DepthHistogram(table)


def operand_errors(
    layer: LinearStats, gemm: Gemm, recipe: Recipe, *, margin: float = 0.0
) -> dict[str, DepthError]:
    """What `recipe` does to the operands of `gemm`, by name; without those it has no histogram of.

    `margin` are octaves left free above the amax, as with delayed scales.
    """
    errors: dict[str, DepthError] = {}
    casts = recipe.casts(gemm)
    for operand, uses in SHARED.items():
        if casts is None or operand not in layer.operands:
            continue
        for transposed, (used_by, side) in zip((False, True), uses, strict=True):
            if used_by is not gemm:
                continue
            histogram = histogram_of(layer.operands[operand], casts[side], transposed=transposed)
            if histogram is not None:
                errors[operand] = depth_error(histogram, casts[side].format, margin=margin)
    return errors


def depth_bytes(depths: Mapping[str, torch.Tensor]) -> int:
    """The memory that tables take; it does not grow with what they have seen."""
    return sum(table.numel() * table.element_size() for table in depths.values())
