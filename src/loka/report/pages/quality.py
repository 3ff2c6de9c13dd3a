"""Of a page: quality. Pairs, verdicts and segments, and the training curves with the difference band."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loka.core.error import Z95, Estimate
from loka.core.records.plan import Plan
from loka.report.pages.html import Cell, Html, code, figure, join, number, paragraph, section, table, tag, tiles
from loka.report.pages.svg import Frame, fit, signed
from loka.report.quality import HEADER, NO_SEGMENTS
from loka.validation.arms import by_plan, key_of
from loka.validation.compare import Comparison
from loka.validation.paired import NE_LIMIT_PERCENT, Verdict
from loka.validation.record import ArmVerdict, BandPoint, Validation
from loka.validation.verdicts import ERROR, RowsVerdict

QUALITY, CURVES = "Quality: paired runs", "Training curves of the pairs"
_LONGEST = 26  # letters of a name beside a plot
_KIND: dict[Verdict, str] = {"pass": "good", "fail": "bad", "undecided": "open"}


@dataclass(frozen=True)
class Bar:
    name: str
    estimate: Estimate
    colour: str = "soft"
    bold: bool = False


def quality_section(found: Validation | Comparison, plan: Plan | None = None) -> Html:
    """`plan`: the one on the page, beside which another one's verdicts may stand."""
    if isinstance(found, Comparison):
        return _compared(found, plan)
    arms = [_arm(arm, found) for arm in found.arms]
    known: list[tuple[str, object, str]] = [(a.title, a.verdict, _KIND[a.verdict]) for a in found.arms]
    known.append(("pairs", str(len(found.seeds)), ""))
    known.append(("limit", f"{found.limit:g} % of NE", ""))
    context = ", ".join(f"{key}: {value}" for key, value in found.context.items())
    return section(
        "quality",
        QUALITY,
        tiles(known),
        paragraph(
            f"{found.model} against {found.control}: the same seed, rows and order in both runs of a pair; "
            f"only the precision differs. {context}"
        ),
        paragraph(f"{found.control} is {found.annealed}.") if found.annealed else None,
        paragraph(_whose(found, plan)) if plan else None,
        *arms,
        _runs(found),
    )


def _whose(found: Validation, plan: Plan) -> str:
    """Which arms ran `plan`: verdicts of another plan of the model look the same."""
    spec = by_plan(plan)
    ran = [arm.title for arm in found.arms if arm.key == key_of(spec, arm.task)]
    if ran:
        return f"The plan on this page is what {', '.join(ran)} ran."
    others = ", ".join(f"{arm.title} ({arm.key or 'of no known digest'})" for arm in found.arms)
    own = ", ".join(dict.fromkeys(key_of(spec, arm.task) for arm in found.arms))
    return (
        f"No arm ran the plan on this page ({own}): {others}. These verdicts say nothing of it; "
        "`loka validate --arm PLAN` judges it."
    )


def _arm(arm: ArmVerdict, found: Validation) -> Html:
    parts: list[object] = [
        tag("h3", f"{arm.title}: ", tag("span", arm.verdict, class_=_KIND[arm.verdict])),
        paragraph(f"A run ended in NaN. {arm.broke}") if arm.broke else None,
        paragraph(arm.unjudged_line) if arm.unjudged else None,
    ]
    average = arm.average
    if average is not None:
        bars = [Bar(f"pair, seed {seed}", pair.ne_percent) for seed, pair in arm.differences.items()]
        bars.append(Bar("over seeds", average.over_seeds, "c"))
        bars += [Bar(reading.name, reading.ne_percent, "c") for reading in arm.readings]
        bars.append(Bar("verdict", average.ne_percent, "a", True))
        drawn = figure(
            forest(bars, found.limit),
            "Relative difference of NE. A pair's interval of 95 % covers other rows; the green one other seeds "
            f"on these rows; the verdict's covers both. These two are of {100 * (1 - average.tail):g} %"
            + ", as those of all tasks and looks hold together at 95 %" * (average.tail != ERROR)
            + ". Shaded: within the limit.",
        )
        segments = _forest_of(arm.segments, found.segment_limit) if arm.segments else None
        parts.append(tag("div", drawn, segments, class_="grid"))
        apart = [pair.kl_percent for pair in arm.differences.values() if pair.kl_percent is not None]
        if apart:
            each = ", ".join(f"{kl.value:.3g} +- {(kl.high - kl.low) / (2 * Z95):.2g}" for kl in apart)
            parts.append(
                paragraph(f"KL/H between the two models of each pair, without labels, in percent of NE: {each}.")
            )
        if average.outlook:
            parts.append(paragraph(f"The average is {average.verdict}; to decide it: {average.outlook}."))
        if arm.segments:
            parts.append(_segments(arm.segments))
        else:
            parts.append(paragraph(NO_SEGMENTS))
    return join(part for part in parts if part is not None)


def _forest_of(segments: Sequence[RowsVerdict], limit: float) -> Html:
    colours = {"pass": "c", "fail": "b"}
    bars = [Bar(s.name, s.ne_percent, colours.get(s.verdict, "soft")) for s in segments]
    level = 100 * (1 - segments[0].tail)
    return figure(
        forest(bars, limit),
        f"Segments, each relative to its own NE, with intervals of {level:.2f} % that hold together at 95 % "
        "(Bonferroni). Green passes, orange fails.",
    )


def _segments(segments: Sequence[RowsVerdict]) -> Html:
    rows = [
        (
            s.name,
            number(s.variance.rows, "{:d}"),
            number(s.clicks, "{:d}"),
            number(s.variance.mean, "{:+.4f} %"),
            Cell(f"[{s.ne_percent.low:+.4f}, {s.ne_percent.high:+.4f}]", ""),
            Cell(s.verdict, s.verdict, _KIND[s.verdict]),
            Cell(s.outlook, s.outlook, "wrap"),
        )
        for s in segments
    ]
    header = ("segment", "rows", "clicks", "NE", "interval", "verdict", "what would decide it")
    return table(header, rows, caption="Segments", first=30)


def forest(bars: Sequence[Bar], limit: float) -> Html:
    """Intervals under each other against the limit's band. Infinite ends run out of the frame."""
    finite = [bar.estimate.value for bar in bars if math.isfinite(bar.estimate.value)]
    ends = [end for bar in bars for end in (bar.estimate.low, bar.estimate.high) if math.isfinite(end)]
    # The widest interval would flatten all others: the frame ends where most intervals do.
    reach = sorted(abs(end) for end in ends)[int(0.85 * (len(ends) - 1))] if ends else limit
    reach = max(reach, *(abs(value) for value in finite), 1.5 * limit) * 1.05 if finite else 2 * limit
    pitch = 21.0
    height = pitch * len(bars) + 56
    left = 14 + 6.6 * min(max(len(bar.name) for bar in bars), _LONGEST)
    frame = Frame.of((-reach, reach), (len(bars) + 0.0, 0.0), height=height, left=left, bottom=40, top=12)
    frame.box((-limit, limit), (len(bars) + 0.0, 0.0), "shade", f"within {limit:g} %")
    frame.rule(x=0.0, colour="soft", dash=None)
    for place, bar in enumerate(bars):
        y = place + 0.5
        name = bar.name if len(bar.name) <= _LONGEST else f"{bar.name[: _LONGEST - 1]}…"
        frame.text(-reach, y, name, anchor="end", dx=-8, dy=4, soft=not bar.bold)
        if not math.isfinite(bar.estimate.value):
            continue
        frame.interval(bar.estimate.low, bar.estimate.high, y, bar.colour, width=4 if bar.bold else 2)
        label = f"{bar.name}: {bar.estimate.shown('+.4f', ' %')}"
        frame.dot(bar.estimate.value, y, bar.colour, label, radius=5 if bar.bold else 3.4)
    return frame.draw(
        label="relative differences of NE with intervals",
        x_title="NE relative to the control, %",
        x_format=signed,
        y_axis=False,
    )


def _runs(found: Validation) -> Html:
    rows = []
    for run in found.runs:
        q = run.quality
        speed = number(run.rows_per_second or None, "{:.0f}")
        ne = number(q.ne if q else None, "{:.5f}") if q else Cell("ended in NaN", "", "bad")
        more = ("logloss", "auc", "calibration")
        cells = [number(getattr(q, name) if q else None, "{:.5f}") for name in more]
        train_ne = number(run.train_ne if q else None, "{:.5f}")
        rows.append((number(run.seed, "{:d}"), run.title, ne, *cells, train_ne, speed))
    return table(HEADER, rows, caption="Every run on the held-out rows", first=12)


def _compared(found: Comparison, plan: Plan | None) -> Html:
    ran = found.context.get("plan")  # its summary; a demo names no digest
    other = bool(plan and ran and ran != plan.summary())
    bars = [Bar(f"pair, seed {pair.seed}", pair.difference.ne_percent) for pair in found.pairs]
    if found.noise is not None:
        bars.append(Bar("noise: bf16 nudged", found.noise.ne_percent, "b"))
    across = found.across
    known: list[tuple[str, object, str]] = [("pairs", str(len(found.pairs)), "")]
    if across is not None:
        bars.append(Bar("mean over pairs", across.ne_percent, "a", True))
        known.insert(0, (f"within {NE_LIMIT_PERCENT:g} % of NE?", across.verdict, _KIND[across.verdict]))
    rows = [
        (
            number(pair.seed, "{:d}"),
            arm.name,
            *(number(getattr(arm.quality, n), "{:.5f}") for n in ("ne", "logloss", "auc", "calibration")),
            number(arm.rows_per_second, "{:.0f}"),
        )
        for pair in found.pairs
        for arm in (pair.bf16, pair.fp8)
    ]
    header = ("seed", "arm", "ne", "logloss", "auc", "calibration", "rows/s")
    intervals = "A pair's interval covers the choice of held-out rows, the mean's the choice of seeds on these rows."
    return section(
        "quality",
        QUALITY,
        tiles(known),
        paragraph(join([code(found.model), " by plan against bf16. ", intervals])),
        paragraph(f"Not by the plan on this page, but by one of which it says: {ran}") if other else None,
        figure(forest(bars, NE_LIMIT_PERCENT), "Shaded: within the limit."),
        table(header, rows, caption="Every run on the held-out rows", first=12),
    )


def curves_section(found: Validation) -> Html | None:
    """None where no arm has curves in common with the control."""
    drawn = []
    for arm in found.arms:
        band = found.band(arm.name, arm.task)
        if len(band) > 1:
            drawn += [tag("h3", arm.title), tag("div", *_curves(band, arm.title, found), class_="grid")]
    return section("curves", CURVES, *drawn) if drawn else None


def _curves(band: Sequence[BandPoint], arm: str, found: Validation) -> tuple[Html, Html]:
    x = (0.0, float(band[-1].rows))
    # The first points are of a model that knows nothing, and would flatten all others.
    late = [p for p in band if p.rows > 0.05 * band[-1].rows] or list(band)
    levels = Frame.of(x, fit([value for p in late for value in (p.control, p.arm)]))
    levels.line([(p.rows, p.control) for p in late], "b", width=5, opacity=0.5)
    levels.line([(p.rows, p.arm) for p in late], "a", width=1.4)
    both = levels.draw(
        label="NE of the control and the arm while training",
        x_title="training rows",
        y_title="NE since the last point",
        x_format=_rows,
    )
    ends = sorted(abs(end) for p in late for end in (p.difference.low, p.difference.high) if math.isfinite(end))
    reach = max([*ends[int(0.95 * len(ends)) :][:1], 2 * found.limit])
    difference = Frame.of(x, (-1.1 * reach, 1.1 * reach))
    difference.box(x, (-found.limit, found.limit), "warm", f"within {found.limit:g} %")
    if len(found.seeds) > 1:
        difference.band([(p.rows, p.difference.low, p.difference.high) for p in late])
    difference.rule(y=0.0, dash=None)
    difference.line([(p.rows, p.difference.value) for p in late], "a")
    apart = difference.draw(
        label="relative difference of NE while training, with its band",
        x_title="training rows",
        y_title="arm minus control, % of NE",
        x_format=_rows,
        y_format=signed,
    )
    pairs = len(found.seeds)
    return (
        figure(
            both,
            f"{found.control} (orange, wide) and {arm} (blue), mean of {pairs} pairs. Every row counts "
            "before it is learnt.",
        ),
        figure(
            apart,
            f"The band is the 95 % interval over {pairs} pairs; the orange stripe the limit of {found.limit:g} %.",
        ),
    )


def _rows(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
