"""The page of `loka scale --network`: a step by part against GPUs, bf16 beside the plan, with intervals."""

from __future__ import annotations

from collections.abc import Sequence

from loka.core.error import Estimate
from loka.core.records.across import Across, AcrossRow, Parts
from loka.report.pages.html import Html, document, figure, number, section, table, tag
from loka.report.pages.svg import Frame

_PARTS = (("GEMMs", "a"), ("other", "c"), ("exposed", "b"))


def across_page(found: Across) -> str:
    """The page as text; at its end stands all that the command prints, with labels and assumptions."""
    by_engine: dict[str, list[AcrossRow]] = {}
    for row in found.rows:
        by_engine.setdefault(row.engine, []).append(row)
    legend = [tag("span", f"{name}  ", style=f"color:var(--{colour})") for name, colour in _PARTS]
    drawn = [
        figure(
            _bars([row for row in rows if row.plain]),
            f"{engine}, bf16 on the wire. Of each pair bf16 is left, the plan right: ",
            *legend,
            "(nothing computes, the wire is not done). Lines: with all inputs at once at their ends.",
        )
        for engine, rows in by_engine.items()
    ]
    header = ("GPUs", "engine", "gather", "gradients", "bf16 ms", "by plan ms", "speed-up", "low", "high")
    cells = [
        (
            number(row.gpus, "{:d}"),
            *(row.engine, row.gather, row.gradients),
            *(number(us.value / 1e3, "{:.2f}") for us in (row.bf16, row.planned)),
            *(number(x, "{:.2f}") for x in (row.speedup.value, row.speedup.low, row.speedup.high)),
        )
        for row in found.rows
    ]
    title = f"{found.model} on many GPUs"
    return document(
        title,
        tag("h1", title),
        tag("p", f"{found.batch_size} rows a GPU, {found.gpu}, {found.network}. GEMM times: {found.times}."),
        section("steps", "A step by part", tag("div", *drawn, class_="grid")),
        section("rows", "Every format", table(header, cells, caption="Steps", first=40)),
        section("all", "All of it", tag("div", tag("pre", str(found)), class_="scroll")),
    )


def _bars(rows: Sequence[AcrossRow]) -> Html:
    most = max(step.high for row in rows for step in (row.bf16, row.planned)) / 1e3
    frame = Frame.of((-0.5, len(rows) - 0.5), (0.0, 1.08 * most))
    for place, row in enumerate(rows):
        pair: tuple[tuple[str, float, Parts, Estimate], ...] = (
            ("bf16", place - 0.2, row.bf16_parts, row.bf16),
            ("by plan", place + 0.2, row.parts, row.planned),
        )
        for name, x, parts, step in pair:
            below = 0.0
            for part, colour in _PARTS:
                above = below + getattr(parts, part.lower()) / 1e3
                told = f"{row.gpus} GPUs, {name}: {part} {above - below:.2f} ms"
                frame.box((x - 0.17, x + 0.17), (below, above), colour, told)
                below = above
            frame.line([(x, step.low / 1e3), (x, step.high / 1e3)], "ink")
        frame.text(place, most, f"{row.speedup.value:.2f}x", anchor="middle", dy=-6)
        frame.text(place, 0.0, str(row.gpus), anchor="middle", dy=15)
    label = f"step time against GPUs, {rows[0].engine}"
    return frame.draw(label=label, x_title="GPUs", y_title="ms, and speed-up by plan", x_ticks=())
