"""A validation as text: the runs, each pair, and the verdicts with what would decide the open ones."""

import math
from functools import partial
from operator import mul

from loka.core.error import Z95, Estimate, around
from loka.core.table import format_table
from loka.report.quality import HEADER, NO_SEGMENTS, quality_cells
from loka.validation.power import contributions, deviation_by_rows
from loka.validation.record import ArmVerdict, Validation
from loka.validation.variance import PairVariance
from loka.validation.verdicts import ERROR, RowsVerdict

_SHIFT = 0.01  # of logits: what e4m3 does to some models (formats, benchmarks/README.md)


def validation_table(validation: Validation) -> str:
    first = (
        f"Validation of {validation.model}: {len(validation.seeds)} pairs against {validation.control}, "
        f"limit {validation.limit:g} % of NE"
    )
    if validation.planned is not None:
        first += f"; a look after every pair, {validation.planned} at most"
    parts = [first, _runs(validation)]
    if validation.annealed is not None:
        parts.append(f"{validation.control} is {validation.annealed}")
    parts += _calibrations(validation)
    parts += [_arm(arm, validation) for arm in validation.arms]
    verdicts = ", ".join(f"{arm.title} {arm.verdict.upper()}" for arm in validation.arms)
    parts.append(f"verdict: {verdicts}")
    parts += [arm.unjudged_line for arm in validation.arms if arm.unjudged]
    return "\n\n".join(parts)


def _runs(validation: Validation) -> str:
    rows = []
    for run in validation.runs:
        q = run.quality
        if q is None:
            rows.append((run.seed, run.title, "ended in NaN", "-", "-", "-", "-", "-"))
            continue
        speed = f"{run.rows_per_second:.0f}" if run.rows_per_second else "-"
        rows.append((run.seed, run.title, *quality_cells(q), f"{run.train_ne:.5f}", speed))
    return format_table(HEADER, rows)


def _calibrations(validation: Validation) -> list[str]:
    """Of the control, and what that makes of a shift d of all logits: mean(p - y) d of first order."""
    lines = []
    for task in dict.fromkeys(run.task for run in validation.runs if run.arm == validation.control):
        runs = [run for run in validation.runs if run.arm == validation.control and run.task == task]
        found = [q for run in runs if (q := run.quality) is not None and math.isfinite(q.calibration)]
        if not found:
            continue
        rate, rows = found[0].base_rate, found[0].rows  # alike: all are judged on the same rows
        off = math.fsum(q.calibration - 1 for q in found) / len(found)
        half = Z95 * math.sqrt((1 - rate) / (rate * rows))
        more = around(off, half).mapped(partial(mul, 100))
        price = _SHIFT * rate / (math.fsum(q.logloss for q in found) / len(found))
        moved = more.mapped(partial(mul, price))
        lines.append(
            f"{runs[0].title} predicts {percent(more)} more than the labels' rate: what shifts all logits by "
            f"{_SHIFT:g} changes NE by {percent(moved)} of first order, which KL/H does not tell"
        )
    return lines


def _arm(arm: ArmVerdict, validation: Validation) -> str:
    """All that is said of an arm: its pairs, its verdicts, and what the intervals are made of."""
    what = f"{arm.title} minus {validation.control}"
    lines = [f"{what}, NE by the labels, relative; KL/H in percent of NE too:"]
    if arm.pairs:
        lines.append(_pairs(arm))
    if arm.average is not None:
        lines += _verdicts(arm, arm.average, validation)
    if arm.broke:
        lines.append(f"FAIL: a run ended in NaN: {arm.broke}")
    return "\n".join(lines)


def _pairs(arm: ArmVerdict) -> str:
    """A table with a row for each pair."""
    given = {each.seed: each for each in contributions(arm)}
    pairs = [
        (
            f"seed {seed}",
            percent(pair.ne_percent),
            pair.kl_percent.shown(".3g", " %") if pair.kl_percent else "-",
            pair.auc.shown("+.5f"),
            pair.calibration.shown("+.4f"),
            *(_or_dash(part) for part in (given[seed].after, given[seed].without)),
        )
        for seed, pair in arm.differences.items()
        if seed in given
    ]
    columns = ("pair", "ne, over rows", "KL/H of the two", "auc", "calibration")
    intervals = ("ne, with it and those before", "without it")
    return format_table((*columns, *intervals), pairs)


def _verdicts(arm: ArmVerdict, average: RowsVerdict, validation: Validation) -> list[str]:
    """A table of the verdicts on all rows (`average`) and on segments; then where their intervals come from."""
    rows = [
        (v.name, v.variance.rows, v.clicks, percent(v.ne_percent), v.verdict, v.outlook)
        for v in (average, *arm.segments)
    ]
    header = ("", "rows", "clicks", "ne, over seeds and rows", "verdict", "what would decide it")
    lines = [format_table(header, rows)]
    if average.tail != ERROR:
        level = 100 * (1 - average.tail)
        lines.append(f"all rows have an interval of {level:.2f} %: those of all tasks and looks hold together at 95 %")
    lines.append(f"over seeds alone, on these rows: {percent(average.over_seeds)}")
    if average.variance.pairs > 1:
        lines.append(
            f"{average.variance.between_pairs:.3g} % between pairs, of which the choice of rows "
            f"would make {deviation_by_rows(arm):.3g} % by itself"
        )
        lines.append(_spread(average.variance))
    for reading in arm.readings:
        spread = ""
        if average.variance.pairs > 1:
            spread = (
                f", {reading.variance.between_pairs:.3g} % between pairs "
                f"where the verdict has {average.variance.between_pairs:.3g} %"
            )
        lines.append(f"{reading.name}: {percent(reading.ne_percent)}{spread} (for reading)")
    if average.variance.clusters is not None:
        by, variance = validation.context.get("cluster", "cluster"), average.variance
        worth = f"{variance.clusters} of them, worth {variance.effective_clusters} of one size"
        lines.append(f"rows of one {by} count as one draw: {worth}")
    lines.append(_note(arm, validation))
    return lines


def _spread(variance: PairVariance) -> str:
    expected = variance.expected
    if expected is None:
        return "the interval goes by the spread of these pairs alone"
    counts = f"as {expected.freedom} degrees of freedom beside {variance.pairs - 1}, " * bool(expected.freedom)
    used = f"{counts}and the interval goes by no less"
    if variance.contradicted:
        used = "these pairs scatter more than twice that, and the interval goes by them alone"
    return f"{expected.spread:.3g} % was to be expected by {expected.source}: {used}"


def _note(arm: ArmVerdict, validation: Validation) -> str:
    if not arm.segments:
        return NO_SEGMENTS
    tasks = len({each.task for each in validation.arms})
    level = 100 * (1 - ERROR / (tasks * len(arm.segments)))
    each = " of each task" if tasks > 1 else ""
    return (
        f"{len(arm.segments)} segments{each}, each within {validation.segment_limit:g} % of its own NE, with "
        f"intervals of {level:.2f} % that hold together at 95 % (Bonferroni)."
    )


def percent(estimate: Estimate) -> str:
    """Such as "+0.0012 % [-0.0100, +0.0124]"."""
    return estimate.shown("+.4f", " %")


def _or_dash(estimate: Estimate) -> str:
    return percent(estimate) if math.isfinite(estimate.low) else "-"


def verdict_line(arm: ArmVerdict) -> str:
    """One line: what is known of the average so far, and which segments fail."""
    if arm.average is None or arm.broke:
        return f"{arm.title}: {arm.verdict}" + (f", {arm.broke}" if arm.broke else "")
    failed = [segment.name for segment in arm.segments if segment.verdict == "fail"]
    passed = sum(segment.verdict == "pass" for segment in arm.segments)
    line = f"{arm.title}: {arm.verdict}, {percent(arm.average.ne_percent)}"
    line += f"; {passed} of {len(arm.segments)} segments pass" if arm.segments else ""
    line += f", fail: {', '.join(failed)}" if failed else ""
    return line + (f", not judged: {', '.join(arm.unjudged)}" if arm.unjudged else "")
