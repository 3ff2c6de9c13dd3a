"""The page of `loka scale --network`: a step by part against GPUs, bf16 beside the plan, with intervals."""

from collections.abc import Sequence
from itertools import groupby

from loka.core.records.across import Across, AcrossRow
from loka.report.pages.html import Html, document, figure, section, tag
from loka.report.pages.svg import Frame

_PARTS = {"GEMMs": "a", "other": "c", "exposed": "b"}


def across_page(found: Across) -> str:
    """The page as text; at its end stands all that the command prints, with labels and assumptions."""
    legend = [tag("span", f"{name} ", style=f"color:var(--{colour})") for name, colour in _PARTS.items()]
    said = "(nothing computes, the wire is not done). Lines: with all inputs at once at their ends."
    plain = sorted((row for row in found.rows if row.plain), key=lambda row: row.engine)
    drawn = [
        figure(_bars([*rows]), f"{engine}, bf16 on the wire: bf16, and right of it by plan. ", *legend, said)
        for engine, rows in groupby(plain, key=lambda row: row.engine)
    ]
    title = f"{found.model} on many GPUs"
    return document(
        title,
        tag("h1", title),
        section("steps", "A step by part", tag("div", *drawn, class_="grid")),
        section("all", "Every format, and what it rests on", tag("pre", str(found), class_="scroll")),
    )


def _bars(rows: Sequence[AcrossRow]) -> Html:
    most = max(step.high for row in rows for step in (row.bf16, row.planned)) / 1e3
    frame = Frame.of((-0.5, len(rows) - 0.5), (0.0, 1.08 * most))
    for place, row in enumerate(rows):
        pair = (("bf16", -0.2, row.bf16_parts, row.bf16), ("by plan", 0.2, row.parts, row.planned))
        for name, aside, parts, step in pair:
            x, below = place + aside, 0.0
            for part, colour in _PARTS.items():
                ms = getattr(parts, part.lower()) / 1e3
                told = f"{row.gpus} GPUs, {name}: {part} {ms:.2f} ms"
                frame.box((x - 0.17, x + 0.17), (below, below + ms), colour, told)
                below += ms
            frame.line([(x, step.low / 1e3), (x, step.high / 1e3)], "ink")
        frame.text(place, most, f"{row.speedup.value:.2f}x", anchor="middle", dy=-6)
        frame.text(place, 0.0, str(row.gpus), anchor="middle", dy=15)
    label = f"step time against GPUs, {rows[0].engine}"
    return frame.draw(label=label, x_title="GPUs", y_title="ms, and speed-up by plan", x_ticks=())
