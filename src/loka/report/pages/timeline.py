"""Of a page: the time line of a run that probes, plans and converts while it trains."""

from collections.abc import Sequence
from itertools import pairwise

from loka.report.pages.html import Cell, Html, figure, number, paragraph, section, table
from loka.report.pages.svg import Frame
from loka.train.automatic.timeline import Event, paces

TITLE = "Time line of the run"
_COLOURS = {"probe": "b", "fp8": "a"}  # others: the third colour


def timeline_section(events: Sequence[Event]) -> Html:
    """Of a run's phases, at least one, in the order of time; the last one lasts to the next begin, if any."""
    total = events[-1].seconds
    summary = f"{total:.0f} s up to the last entry, {events[-1].rows:,} rows in {events[-1].step:,} steps."
    drawn = [figure(_phases(events), "What the run did, over its wall clock.")] if len(events) > 1 else []
    # A note says what came of the phase before the one that it stands at.
    notes = [*(event.note for event in events[1:]), ""]
    rows = [
        (
            event.phase,
            number(event.step, "{:d}"),
            number(event.seconds),
            number(lasted),
            number(speed, "{:.0f}"),
            Cell(note, note, "wrap"),
        )
        for event, (lasted, speed), note in zip(events, paces(events), notes, strict=True)
    ]
    header = ("phase", "from step", "at s", "lasted s", "rows/s", "what came of it")
    return section("timeline", TITLE, paragraph(summary), *drawn, table(header, rows, caption="Phases"))


def _phases(events: Sequence[Event]) -> Html:
    names = list(dict.fromkeys(event.phase for event in events[:-1]))
    total = max(events[-1].seconds, 1e-9)
    left = 16 + 6.6 * min(max(map(len, names)), 20)
    frame = Frame.of((0.0, total), (len(names) + 0.0, 0.0), height=50 + 24.0 * len(names), left=left, top=8)
    for event, after in pairwise(events):
        place = names.index(event.phase)
        label = f"{event.phase}: {event.seconds:.1f} to {after.seconds:.1f} s. {after.note}"
        span = (event.seconds, max(after.seconds, event.seconds + total / 400))
        frame.box(span, (place + 0.2, place + 0.8), _COLOURS.get(event.phase, "c"), label)
    for place, name in enumerate(names):
        frame.text(0.0, place + 0.5, name[:20], anchor="end", dx=-8, dy=4)
    return frame.draw(label="phases over time", x_title="seconds", y_axis=False)
