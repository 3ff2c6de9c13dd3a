"""The scales of an operand's sampled rows, of every kind that is asked for, from few passes over it.

    |x| of the sample      ->  amax of 1x128  ->  of rows
    |x| of the whole       ->  amax of 128x1  ->  of 128x128, of columns  ->  of the tensor

What one group knows a larger one reuses, so the whole operand is read once. `scale_of` is taken of the
groups' amaxes together, which are few, before they are spread over the elements.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from loka.core.numerics.reference import repeated, scale_of
from loka.core.recipe import Cast, Format, Granularity

Sides = tuple[int, int]
"""Rows and columns of an operand [T, K] that share a scale; those of its transpose turned back."""

_SIDE = 128
_PLAIN = Cast(Format.E4M3, Granularity.TENSOR)


def sides_of(granularity: Granularity, shape: Sequence[int], *, transposed: bool) -> Sides:
    """Of `granularity` in an operand of `shape` [T, K], or in its transpose; at most T and K."""
    rows, columns = shape
    if transposed:
        wide, high = granularity.group(columns, rows)
    else:
        high, wide = granularity.group(rows, columns)
    return min(high, max(rows, 1)), min(wide, max(columns, 1))


def sample_scales(
    hp: torch.Tensor,
    sample: torch.Tensor,
    picked: torch.Tensor | None,
    wanted: Sequence[tuple[Sides, bool]],
    format: Format = Format.E4M3,
) -> list[torch.Tensor]:
    """For each of `wanted` (and whether it is rounded to powers of two) the scales of `sample` [m, K] by
    `format`.

    `sample` are the rows `picked` [m] of `hp` [T, K], or all of it. Each answer is float32 and broadcasts
    to [m, K]; it is NaN where an amax is not finite. Nothing waits for the device.
    """
    if hp.numel() == 0:
        return [hp.new_zeros(1, 1, dtype=torch.float32) for _ in wanted]
    amaxes = _amaxes(hp, sample, dict.fromkeys(sides for sides, _ in wanted))
    scales = _scales(amaxes, format)
    rounded = {sides: scales[sides] for sides, power_of_two in wanted if power_of_two}
    rounded = _regrouped(rounded, _rounded_up) if rounded else {}
    group = None if picked is None else picked // _SIDE
    found = ((rounded if power_of_two else scales)[sides] for sides, power_of_two in wanted)
    return [_spread(scale, sides, hp.shape, group) for scale, (sides, _) in zip(found, wanted, strict=True)]


def _scales(amaxes: Mapping[Sides, torch.Tensor], format: Format) -> dict[Sides, torch.Tensor]:
    plain = Cast(format, Granularity.TENSOR)
    return _regrouped(amaxes, lambda amax: scale_of(amax, plain).nan_to_num_(nan=torch.nan, posinf=torch.nan))


def _regrouped(
    groups: Mapping[Sides, torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]
) -> dict[Sides, torch.Tensor]:
    changed = change(torch.cat([values.flatten() for values in groups.values()]))
    parts = changed.split([values.numel() for values in groups.values()])
    return {sides: part.view_as(groups[sides]) for sides, part in zip(groups, parts, strict=True)}


def _rounded_up(scale: torch.Tensor) -> torch.Tensor:
    """To powers of two as `scale_of` does it, by the bits of normal float32: NaN stays."""
    bits = scale.view(torch.int32).add((1 << 23) - 1).bitwise_and_(255 << 23)
    return bits.view(torch.float32).clamp_max_(_PLAIN.format.largest_power).add_(scale * 0)


def _amaxes(hp: torch.Tensor, sample: torch.Tensor, wanted: Iterable[Sides]) -> dict[Sides, torch.Tensor]:
    """The amax of each group, [groups of rows, groups of columns]; groups of single rows are the sample's."""
    rows, columns = hp.shape
    found: dict[Sides, torch.Tensor] = {}
    by_height: dict[int, list[int]] = {}
    for high, wide in wanted:
        by_height.setdefault(high, []).append(wide)
    magnitude, strips = sample.abs(), None
    for high, sides in sorted(by_height.items()):
        if high == 1:
            lines = magnitude
        else:
            strips = _strips(magnitude if sample is hp else hp.abs()) if strips is None else strips
            lines = strips if high < rows or strips.shape[0] == 1 else strips.amax(dim=0, keepdim=True)
        groups = lines
        for wide in sorted(sides):
            if wide == columns and columns > 1:
                groups = groups.amax(dim=1, keepdim=True)
            elif wide > 1:
                groups = _grouped(lines, wide)
            found[high, wide] = groups
    return {sides: amax.float() for sides, amax in found.items()}


def _strips(magnitude: torch.Tensor) -> torch.Tensor:
    """The amax of each column in every 128 rows, the last ones fewer."""
    rows = magnitude.shape[0]
    whole = rows - rows % _SIDE
    parts = [magnitude[:whole].unflatten(0, (-1, _SIDE)).amax(dim=1)] if whole else []
    if whole < rows:
        parts.append(magnitude[whole:].amax(dim=0, keepdim=True))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _grouped(magnitude: torch.Tensor, wide: int) -> torch.Tensor:
    """The amax of every `wide` columns."""
    missing = -magnitude.shape[1] % wide
    if missing:
        magnitude = torch.nn.functional.pad(magnitude, (0, missing))
    return magnitude.unflatten(1, (-1, wide)).amax(dim=2)


def _spread(scale: torch.Tensor, sides: Sides, shape: Sequence[int], group: torch.Tensor | None) -> torch.Tensor:
    """The scales of groups, broadcastable to the sample, whose rows are in the groups of rows `group` [m]."""
    (rows, columns), (high, wide) = shape, sides
    if 1 < high < rows:
        scale = repeated(scale, 0, high, rows) if group is None else scale[group]
    if 1 < wide < columns:
        scale = repeated(scale, 1, wide, columns)
    return scale
