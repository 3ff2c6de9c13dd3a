"""Small drawings for a page: a frame with two axes, and marks in the units of the data.

Colours are CSS variables, so that a drawing follows the page into the dark. Numbers are rounded to a
tenth of a pixel: the same record draws the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from loka.report.pages.html import Html, tag

WIDTH = 440.0
_TICKS = 5  # marks of an axis, about


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Maps values of the data to pixels. With `log` the values are positive."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(max(value, 1e-300))
        share = (at - low) / (high - low) if high != low else 0.5
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round numbers inside the range; of a logarithmic scale, 1, 2 and 5 times powers of ten."""
        if not self.log:
            return _linear_ticks(self.low, self.high, _TICKS)
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for steps in ((1,), (1, 3), (1, 2, 5)):
            found = [s * 10.0**p for p in range(first, last + 1) for s in steps]
            inside = [value for value in found if self.low <= value <= self.high]
            if len(inside) >= 3:
                return inside[:: max(len(inside) // _TICKS, 1)]
        return _linear_ticks(self.low, self.high, 4)


def _linear_ticks(low: float, high: float, count: int) -> list[float]:
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round((first + i) * step, 12) for i in range(int((high - first * step) / step + 1e-9) + 1)]


def fit(values: Sequence[float], *, log: bool = False, include: Sequence[float] = ()) -> tuple[float, float]:
    """A range that holds all finite values, with a margin."""
    finite = [v for v in (*values, *include) if math.isfinite(v) and (v > 0 or not log)]
    if not finite:
        return (1.0, 10.0) if log else (0.0, 1.0)
    low, high = min(finite), max(finite)
    if log:
        return (low / 1.15, high * 1.15) if high > low else (low / 2, high * 2)
    air = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return low - air, high + air


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A drawing area with its two scales; `marks` are what is drawn."""

    x: Scale
    y: Scale
    height: float
    width: float = WIDTH
    marks: list[Html] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        height: float = 260.0,
        left: float = 52.0,
        log_x: bool = False,
        log_y: bool = False,
        bottom: float = 38.0,
        top: float = 24.0,
        width: float = WIDTH,
    ) -> Frame:
        return cls(
            x=Scale(low=x[0], high=x[1], start=left, end=width - 12, log=log_x),
            y=Scale(low=y[0], high=y[1], start=height - bottom, end=top, log=log_y),
            height=height,
            width=width,
        )

    def line(
        self,
        points: Sequence[tuple[float, float]],
        colour: str,
        *,
        width: float = 1.6,
        steps: bool = False,
        opacity: float | None = None,
    ) -> None:
        drawn = [(self.x(a), self.y(b)) for a, b in points]
        if steps:
            drawn = [p for (a, b), (c, d) in zip(drawn, [*drawn[1:], drawn[-1]], strict=True) for p in ((a, b), (c, b))]
        self.marks.append(
            tag(
                "polyline",
                points=_points(drawn),
                fill="none",
                stroke=f"var(--{colour})",
                stroke_width=width,
                stroke_linejoin="round",
                stroke_opacity=opacity,
            )
        )

    def band(self, points: Sequence[tuple[float, float, float]], colour: str = "shade") -> None:
        """Between the second and the third number of each point."""
        if not points:
            return
        edge = [(self.x(a), self.y(low)) for a, low, _ in points]
        back = [(self.x(a), self.y(high)) for a, _, high in reversed(points)]
        self.marks.append(tag("polygon", points=_points([*edge, *back]), fill=f"var(--{colour})"))

    def box(self, x: tuple[float, float], y: tuple[float, float], colour: str, title: str | None = None) -> None:
        left, right = sorted((self.x(x[0]), self.x(x[1])))
        low, high = sorted((self.y(y[0]), self.y(y[1])))
        shape = tag(
            "rect",
            *([tag("title", title)] if title else []),
            x=_n(left),
            y=_n(low),
            width=_n(max(right - left, 0.5)),
            height=_n(max(high - low, 0.5)),
            fill=f"var(--{colour})",
        )
        self.marks.append(shape)

    def dot(self, x: float, y: float, colour: str, title: str, *, radius: float = 3.4, hollow: bool = False) -> None:
        """With a title that a pointer shows."""
        self.marks.append(
            tag(
                "circle",
                tag("title", title),
                cx=_n(self.x(x)),
                cy=_n(self.y(y)),
                r=radius,
                fill="var(--bg)" if hollow else f"var(--{colour})",
                stroke=f"var(--{colour})",
            )
        )

    def interval(self, low: float, high: float, y: float, colour: str, *, width: float = 2.0) -> None:
        """A bar along x; an end that leaves the frame is cut."""
        self.marks.append(
            tag(
                "line",
                x1=_n(self.x(low)),
                x2=_n(self.x(high)),
                y1=_n(self.y(y)),
                y2=_n(self.y(y)),
                stroke=f"var(--{colour})",
                stroke_width=width,
                stroke_linecap="round",
            )
        )

    def rule(
        self, *, x: float | None = None, y: float | None = None, colour: str = "soft", dash: str | None = "4 3"
    ) -> None:
        x1, x2 = (self.x.start, self.x.end) if x is None else (self.x(x), self.x(x))
        y1, y2 = (self.y.start, self.y.end) if y is None else (self.y(y), self.y(y))
        self.marks.append(
            tag("line", x1=_n(x1), x2=_n(x2), y1=_n(y1), y2=_n(y2), stroke=f"var(--{colour})", stroke_dasharray=dash)
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        anchor: str = "start",
        soft: bool = True,
        dy: float = 0.0,
        dx: float = 0.0,
    ) -> None:
        self.marks.append(
            tag(
                "text",
                words,
                x=_n(self.x(x) + dx),
                y=_n(self.y(y) + dy),
                text_anchor=anchor,
                class_="soft" if soft else None,
            )
        )

    def draw(
        self,
        *,
        label: str,
        x_title: str = "",
        y_title: str = "",
        x_format: Callable[[float], str] = "{:g}".format,
        y_format: Callable[[float], str] = "{:g}".format,
        y_axis: bool = True,
        x_ticks: Sequence[float] | None = None,
    ) -> Html:
        left, right, bottom, top = self.x.start, self.x.end, self.y.start, self.y.end
        back: list[Html] = []

        def line(x1: float, x2: float, y1: float, y2: float, kind: str = "rule") -> None:
            back.append(tag("line", x1=_n(x1), x2=_n(x2), y1=_n(y1), y2=_n(y2), class_=kind))

        def text(words: str, x: float, y: float, anchor: str | None) -> None:
            back.append(tag("text", words, x=_n(x), y=_n(y), text_anchor=anchor, class_="soft"))

        for value in self.x.ticks() if x_ticks is None else x_ticks:
            line(self.x(value), self.x(value), bottom, top)
            text(x_format(value), self.x(value), bottom + 15, "middle")
        for value in self.y.ticks() if y_axis else ():
            line(left, right, self.y(value), self.y(value))
            text(y_format(value), left - 5, self.y(value) + 4, "end")
        line(left, right, bottom, bottom, "axis")
        if x_title:
            text(x_title, (left + right) / 2, self.height - 5, "middle")
        if y_title:
            text(y_title, 4, 12, None)
        size = f"0 0 {self.width:g} {self.height:g}"
        return tag("svg", *back, *self.marks, viewBox=size, role="img", aria_label=label)


def _points(pairs: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{_n(a)},{_n(b)}" for a, b in pairs)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def signed(value: float) -> str:
    """A tick of a difference: +0.5, 0, -0.5."""
    return f"{value:+g}" if value else "0"
