"""Depth histograms of a layer's operands: which ones, collecting them from sampled rows, keeping them.

An operand needs a histogram for every kind of scale that a recipe gives it, as it lies for one GEMM
and transposed for the other (core/recipe.py): a row of the transpose is a column. They are kept in
the operand's `Distribution` as tensors `depth_<granularity>`, with `_transposed` and `_pow2` after it,
and merge by addition, over steps, ranks and runs. Eight of 36 KB for each operand with today's recipes.

Rows are a sample, scales are not: the amax of a tensor, of a column or of a block is that of the
whole tensor (statistics/depth_scales.py). All histograms of an operand are filled together, and kinds of
scale that are the same for its shape (of a row and of 1x128, where K is 128) are filled once.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from loka.core.numerics.depth import DepthError, DepthHistogram, depth_error
from loka.core.numerics.depth_tables import Operand, depth_tables
from loka.core.recipe import RECIPES, SHARED_OPERANDS, Cast, Gemm, Granularity, Recipe
from loka.core.records.stats import Distribution, LinearStats
from loka.statistics.depth_scales import Sides, sample_scales, sides_of
from loka.statistics.row_picks import row_picks

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


def layouts(operand: str) -> tuple[Layout, ...]:
    """The histograms that recipes ask of `operand`, which is input, weight or grad_output; each once."""
    return _layouts(operand, tuple(RECIPES.values()))


@functools.lru_cache(maxsize=64)
def _layouts(operand: str, recipes: tuple[Recipe, ...]) -> tuple[Layout, ...]:
    found: dict[Layout, None] = {}
    for recipe in recipes:
        for transposed, (gemm, side) in zip((False, True), SHARED_OPERANDS[operand], strict=True):
            casts = recipe.casts(gemm)
            if casts is not None and not casts[side].centred:
                found[layout_of(casts[side], transposed=transposed)] = None
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Request:
    """Histograms that are wanted of the rows `picked` [m] of `hp` [T, K], or of all where None.

    `weight`, broadcastable to the sample [m, K], goes into the histograms of `hp` as it lies: squared
    gradients, or the squared norms [K] of the weight's columns (core/numerics/depth.py).
    """

    hp: torch.Tensor
    wanted: Iterable[Layout]
    picked: torch.Tensor | None = None
    weight: torch.Tensor | None = None


def depth_histogram(
    hp: torch.Tensor, granularity: Granularity, *, power_of_two: bool = False, weight: torch.Tensor | None = None
) -> DepthHistogram:
    """The depths of all of `hp` [R, C], any float dtype and strides; nothing waits for the device.

    Args:
        granularity: of the scales; for columns give `hp.t()` and ROW.
        power_of_two: scales are rounded up to powers of two.
        weight: of the elements' squared errors, broadcastable to [R, C]: the squared norms of the
            other operand's columns [C] for a GEMM's output error, squared gradients for the loss.
    """
    layout = Layout(granularity=granularity, transposed=False, power_of_two=power_of_two)
    return DepthHistogram(collect(hp.detach(), [layout], weight=weight)[layout.name])


def collect(
    hp: torch.Tensor,
    wanted: Iterable[Layout],
    *,
    picked: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
) -> Depths:
    """The histograms of one operand; see `Request`."""
    return collect_all([Request(hp=hp, wanted=wanted, picked=picked, weight=weight)])[0]


def collect_all(requests: Sequence[Request], *, weighted_only: bool = False) -> list[Depths]:
    """The histograms of several operands on one device, which share operations. Nothing waits for it.

    With `weighted_only` tables have the three columns of the weights, and there are none of a transpose.
    """
    found: list[Depths] = [{} for _ in requests]
    for weighted in (False, True):
        at: list[tuple[int, list[str], list[tuple[Sides, bool]]]] = []
        operands: list[Operand] = []
        for index, request in enumerate(requests):
            has_weight = request.weight is not None
            alike = [w for w in request.wanted if (has_weight and not w.transposed) == weighted]
            if alike and (weighted or not weighted_only):
                kinds = [_kind(layout, request.hp.shape) for layout in alike]
                at.append((index, [layout.name for layout in alike], kinds))
                operands.append(_operand(request, kinds, weighted=weighted))
        if not operands:
            continue
        results = depth_tables(operands, weighted_only=weighted_only)
        for (index, names, kinds), tables in zip(at, results, strict=True):
            distinct = list(dict.fromkeys(kinds))
            if len(distinct) < len(kinds):  # each table is memory of its own: they go to a file so
                tables = torch.stack([tables[distinct.index(kind)] for kind in kinds])
            found[index].update(zip(names, tables.unbind(), strict=True))
    return found


def _kind(layout: Layout, shape: Sequence[int]) -> tuple[Sides, bool]:
    return sides_of(layout.granularity, shape, transposed=layout.transposed), layout.power_of_two


def _operand(request: Request, kinds: Iterable[tuple[Sides, bool]], *, weighted: bool) -> Operand:
    hp, picked = request.hp, request.picked
    sample = hp if picked is None else hp[picked]
    scales = sample_scales(hp, sample, picked, list(dict.fromkeys(kinds)))
    return Operand(values=sample, scales=scales, weight=request.weight if weighted else None)


def merge(so_far: Mapping[str, torch.Tensor], more: Mapping[str, torch.Tensor]) -> Depths:
    """The sums; a layout that one of them lacks (another set of recipes) is taken from the other.

    Raises ValueError where one was collected with weights and the other without.
    """
    names = [name for name in more if name in so_far]
    if not names:
        return {**so_far, **more}
    before = [so_far[name] for name in names]
    fresh = [more[name].to(table) for name, table in zip(names, before, strict=True)]
    if any(old.shape != new.shape for old, new in zip(before, fresh, strict=True)):
        raise ValueError("a depth histogram with weights and one without do not add up")
    return {**so_far, **more, **dict(zip(names, torch._foreach_add(before, fresh), strict=True))}


def with_depths(distribution: Distribution, depths: Mapping[str, torch.Tensor]) -> Distribution:
    """`distribution` with the tables beside its tensors; earlier tables of the same names go."""
    return replace(distribution, tensors={**distribution.tensors, **depths})


def depths_of(distribution: Distribution) -> Depths:
    """The tables in `distribution`: none where it was learnt by a LoKA without them."""
    return {name: table for name, table in distribution.tensors.items() if name.startswith(PREFIX)}


def histogram_of(distribution: Distribution, cast: Cast, *, transposed: bool) -> DepthHistogram | None:
    table = distribution.tensors.get(layout_of(cast, transposed=transposed).name)
    return None if table is None or cast.centred else DepthHistogram(table)


def operand_errors(layer: LinearStats, gemm: Gemm, recipe: Recipe) -> dict[str, DepthError]:
    """What `recipe` does to the operands of `gemm`, by name; without those it has no histogram of."""
    errors: dict[str, DepthError] = {}
    casts = recipe.casts(gemm)
    for operand, uses in SHARED_OPERANDS.items():
        if casts is None or operand not in layer.operands:
            continue
        for transposed, (used_by, side) in zip((False, True), uses, strict=True):
            if used_by is not gemm:
                continue
            histogram = histogram_of(layer.operands[operand], casts[side], transposed=transposed)
            if histogram is not None:
                errors[operand] = depth_error(histogram, casts[side].format)
    return errors


def depths_of_rows(operands: Mapping[str, torch.Tensor], count: int, generator: torch.Generator) -> dict[str, Depths]:
    """The histograms of operands by name, of `count` rows of each."""
    requests = []
    for operand, rows in operands.items():
        picked = row_picks(rows.shape[0], count, generator, rows.device)
        requests.append(Request(hp=rows, wanted=layouts(operand), picked=picked))
    return dict(zip(operands, collect_all(requests), strict=True))
