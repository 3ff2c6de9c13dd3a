"""Of a page: what flows through the layers against the ranges of the formats.

A scale maps the largest magnitude of its group, the amax, to the largest number of a format. So what
matters of an element is its depth log2(amax / |x|): e4m3 has 14.8 octaves of normal numbers and 3 more of
subnormals, e5m2 29.8 and 2 more; deeper elements become zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from loka.core.numerics.depth import DepthHistogram, depth_error
from loka.core.numerics.depth_tables import BINS_PER_OCTAVE, TOP, ZEROS, centres, units
from loka.core.recipe import Format
from loka.core.records.stats import OPERANDS, Distribution, Stats
from loka.report.pages.html import Cell, Html, code, figure, fold, join, missing, number, paragraph, section, table, tag
from loka.report.pages.svg import WIDTH, Frame

TITLE = "Distributions against the formats' ranges"
DEEPEST = 38
_STRIPS = 24  # at the most
_LONGEST = 22  # letters of a path beside a strip; its end tells most
_AMAX = TOP - 3 * BINS_PER_OCTAVE - BINS_PER_OCTAVE // 4
"""The first bin above FMAX = 1.75 2^8: the last bin ends at 2^12."""


@dataclass(frozen=True)
class Ranges:
    """Depths in octaves below the amax: normal numbers reach down to `normal`; what is below `flushed` becomes zero.

    Integers are a constant step apart, as subnormals are: they have no normal numbers, `normal` is 0.
    """

    normal: float
    flushed: float

    @classmethod
    def of(cls, format: Format) -> Ranges:
        top = math.log2(format.max)
        return cls(max(top - format.min_exponent, 0.0), top - math.log2(format.smallest_subnormal) + 1)


def octaves(table: torch.Tensor) -> list[float]:
    """The share of the nonzero elements by whole octaves of depth, 0 to DEEPEST - 1, the last one open."""
    counts = table[: TOP + 1, 0].double()
    regular = counts[:_AMAX].flip(0)
    depths = torch.arange(len(regular)) // BINS_PER_OCTAVE
    found = torch.zeros(DEEPEST, dtype=torch.float64)
    found.scatter_add_(0, depths.clamp_max(DEEPEST - 1), regular)
    found[0] += counts[_AMAX:].sum()
    total = float(found.sum())
    return [float(value) / total if total else 0.0 for value in found]


def quantile(shares: list[float], at: float) -> float:
    """The depth that a share `at` of the elements is above, to a fraction of an octave."""
    below = 0.0
    for octave, share in enumerate(shares):
        if below + share >= at and share > 0:
            return octave + (at - below) / share
        below += share
    return float(len(shares))


@dataclass(frozen=True)
class Operand:
    path: str
    name: str
    tensor: torch.Tensor
    row: torch.Tensor | None

    @property
    def lost(self) -> float:
        """The share of the nonzero elements that e4m3 with one scale holds as subnormals or as zero."""
        counts, cpu = self.tensor[:ZEROS, 0].double().cpu(), torch.device("cpu")
        below = centres(cpu) * units(cpu) < 2.0**Format.E4M3.min_exponent
        return float(counts[below].sum() / counts.sum().clamp_min(1))


def operands_of(stats: Stats) -> list[Operand]:
    """Those with histograms; the one that e4m3 would lose most of first."""
    found = []
    for path, layer in stats.layers.items():
        for name in OPERANDS:
            tensors = layer.operands[name].tensors if name in layer.operands else {}
            if "depth_tensor" in tensors:
                found.append(Operand(path, name, tensors["depth_tensor"], tensors.get("depth_row")))
    return sorted(found, key=lambda operand: (-round(operand.lost, 12), operand.path, operand.name))


def depths_section(stats: Stats) -> Html:
    found = operands_of(stats)
    sampled = f"{stats.sampled_steps} of {stats.steps} steps of {stats.model.name} sampled."
    if not found:
        return missing(
            "depths", TITLE, f"{sampled} They hold no depth histograms: probe with a LoKA that collects them."
        )
    by_layer: dict[str, list[Operand]] = {}
    for operand in found:
        by_layer.setdefault(operand.path, []).append(operand)
    first = list(by_layer)[:3]
    return section(
        "depths",
        TITLE,
        paragraph(
            sampled,
            " A scale maps the largest magnitude to a format's largest number; an element of depth d is "
            "2^d smaller. Past a format's normal numbers its precision fades, past its subnormals it is "
            "zero.",
        ),
        _strips(found),
        _table(found),
        tag("h3", "The three layers with the deepest operands"),
        *(_layer(path, by_layer[path], stats) for path in first),
        fold(
            f"the other {len(by_layer) - len(first)} layers",
            *(_layer(path, by_layer[path], stats) for path in list(by_layer)[len(first) :]),
        )
        if len(by_layer) > len(first)
        else None,
    )


def _strips(found: list[Operand]) -> Html:
    """A picture of the deepest operands, a strip each, against the ranges of both formats."""
    shown = found[:_STRIPS]
    height = _TOP + _PITCH * len(shown) + 6
    drawing = tag(
        "svg",
        *_range_lines(height),
        *(mark for place, operand in enumerate(shown) for mark in _strip(operand, _TOP + _PITCH * (place + 0.5))),
        viewBox=f"0 0 {WIDTH:g} {height:.0f}",
        role="img",
        aria_label="depth of each operand's elements against the formats' ranges",
    )
    more = f" The {len(shown)} deepest of {len(found)} operands." if len(found) > _STRIPS else ""
    return figure(
        drawing,
        "Depth of 98 % of the nonzero elements under one scale for the tensor, and the median. Solid lines: "
        f"normal numbers end; dashed: elements become zero.{more}",
    )


_LEFT, _TOP, _PITCH = 186.0, 34.0, 13.0  # where strips begin, and how far apart they are


def _x(depth: float) -> float:
    return _LEFT + min(depth, DEEPEST) / DEEPEST * (WIDTH - _LEFT - 8)


def _range_lines(height: float) -> list[Html]:
    """Where each format's normal numbers end and where elements become zero, and the axis of depths above."""
    marks: list[Html] = []
    for place, format in enumerate((Format.E4M3, Format.E5M2)):
        ranges, colour = Ranges.of(format), ("b", "c")[place]
        for edge, dash in ((ranges.normal, None), (ranges.flushed, "3 3")):
            at = f"{_x(edge):.1f}"
            marks.append(
                tag("line", x1=at, x2=at, y1=16, y2=f"{height:.0f}", stroke=f"var(--{colour})", stroke_dasharray=dash)
            )
        marks.append(
            tag("text", format.name.lower(), x=f"{_x(ranges.normal):.1f}", y=11, text_anchor="middle", class_="soft")
        )
    for depth in (0, 10, 20, 30):
        marks.append(tag("text", str(depth), x=f"{_x(depth):.1f}", y=28, text_anchor="middle", class_="soft"))
    return marks


def _strip(operand: Operand, y: float) -> list[Html]:
    """An operand's name, the line from the 1st to the 99th percentile of its depths, and their median, at `y`."""
    shares = octaves(operand.tensor)
    low, middle, high = (quantile(shares, at) for at in (0.01, 0.5, 0.99))
    label = f"{operand.path} {operand.name}: 98 % of elements between depths {low:.1f} and {high:.1f}"
    name = operand.path if len(operand.path) <= _LONGEST else "…" + operand.path[1 - _LONGEST :]
    return [
        tag("text", name, x=0, y=f"{y + 4:.1f}", style="font-size:11px"),
        tag(
            "text",
            _SHORT[operand.name],
            x=f"{_LEFT - 6:.1f}",
            y=f"{y + 4:.1f}",
            text_anchor="end",
            class_="soft",
            style="font-size:11px",
        ),
        tag(
            "line",
            tag("title", label),
            x1=f"{_x(low):.1f}",
            x2=f"{_x(high):.1f}",
            y1=f"{y:.1f}",
            y2=f"{y:.1f}",
            stroke="var(--a)",
            stroke_width=4,
            stroke_linecap="round",
        ),
        tag("circle", cx=f"{_x(middle):.1f}", cy=f"{y:.1f}", r=2.6, fill="var(--bg)", stroke="var(--a)"),
    ]


_SHORT = {"input": "input", "weight": "weight", "grad_output": "grad"}


def _table(found: list[Operand]) -> Html:
    header = ("layer", "operand", "past e4m3 normal", "flushed", "error e4m3", "with row scales", "error e5m2", "zeros")
    rows = []
    for operand in found:
        tensor = DepthHistogram(operand.tensor)
        e4m3, e5m2 = depth_error(tensor, Format.E4M3), depth_error(tensor, Format.E5M2)
        by_row = depth_error(DepthHistogram(operand.row), Format.E4M3) if operand.row is not None else None
        rows.append(
            (
                code(operand.path),
                Cell(operand.name, operand.name),
                _percent(operand.lost * (1 - e4m3.zeros - e4m3.nonfinite)),
                _percent(e4m3.underflow),
                _percent(math.sqrt(e4m3.element)),
                _percent(math.sqrt(by_row.element) if by_row else None),
                _percent(math.sqrt(e5m2.element)),
                _percent(e4m3.zeros),
            )
        )
    return table(
        header,
        rows,
        caption="Shares of elements in e4m3 with one scale, and their relative errors (root mean square)",
        first=10,
    )


def _percent(value: float | None) -> Cell:
    return number(None if value is None else 100 * value, "{:.2f} %")


def _layer(path: str, found: list[Operand], stats: Stats) -> Html:
    order = {name: place for place, name in enumerate(OPERANDS)}
    drawn = [_histogram(operand) for operand in sorted(found, key=lambda o: order[o.name])]
    kurtoses = {name: _kurtosis(d) for name, d in stats.layers[path].operands.items()}
    numbers = "; ".join(f"{name} {text}" for name, text in kurtoses.items() if text)
    return join(
        [tag("h3", path), tag("p", numbers, class_="soft") if numbers else "", tag("div", *drawn, class_="grid")]
    )


def _kurtosis(distribution: Distribution) -> str:
    numbers: Mapping[str, object] = distribution.numbers
    kurtosis = numbers.get("kurtosis")
    return f"kurtosis about {kurtosis:.2g}" if isinstance(kurtosis, float) and math.isfinite(kurtosis) else ""


def _histogram(operand: Operand) -> Html:
    tensor = octaves(operand.tensor)
    row = octaves(operand.row) if operand.row is not None else None
    most = max([*tensor, *(row or [0.0]), 1e-9])
    frame = Frame.of(
        (0.0, float(DEEPEST)), (-0.34 * most, 1.08 * most), height=170, left=10, bottom=34, top=6, width=320
    )
    for octave, share in enumerate(tensor):
        if share:
            label = f"depth {octave} to {octave + 1}: {100 * share:.3g} % of the elements"
            frame.box((octave + 0.08, octave + 0.92), (0.0, share), "a", label)
    if row:
        outline = [(float(octave), share) for octave, share in enumerate(row)]
        frame.line([*outline, (float(DEEPEST), row[-1])], "ink", width=1.2, steps=True)
    for place, format in enumerate((Format.E4M3, Format.E5M2)):
        ranges, colour = Ranges.of(format), ("b", "c")[place]
        bottom = -(0.05 + 0.15 * place) * most
        frame.box(
            (0.0, ranges.normal),
            (bottom, bottom - 0.07 * most),
            colour,
            f"{format.name.lower()} normal numbers: {ranges.normal:.1f} octaves",
        )
        frame.box(
            (ranges.normal, ranges.flushed),
            (bottom - 0.03 * most, bottom - 0.045 * most),
            colour,
            f"{format.name.lower()} subnormals, then zero",
        )
        frame.text(ranges.flushed, bottom - 0.07 * most, format.name.lower(), dx=4, dy=2)
    drawing = frame.draw(
        label=f"depths of {operand.name} of {operand.path}",
        x_title="log2(amax / |x|)",
        y_axis=False,
        x_ticks=[0, 10, 20, 30],
    )
    caption = f"{operand.name}: bars, one scale for the tensor"
    caption += "; line, one for each row" if row else ""
    zeros = float(operand.tensor[ZEROS, 0]) / max(float(operand.tensor[:, 0].sum()), 1.0)
    caption += f"; {100 * zeros:.0f} % zeros left out" if zeros > 0.005 else ""
    return figure(drawing, caption)
