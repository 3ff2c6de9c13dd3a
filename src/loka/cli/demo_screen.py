"""How a demo ends: one screen of what was found, what it saves, what it costs and what to do next.

A page shows the same, and leads to the pages of the models.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loka.core.records.plan import Plan
from loka.core.records.report import HP, Report
from loka.core.records.stats import Stats
from loka.core.storage.files import write_atomic
from loka.core.table import format_table
from loka.report.pages.html import Cell, code, document, paragraph, section, table, tag
from loka.report.pages.page import page
from loka.validation.compare import Comparison

PAGE, DETAILS = "report.html", "details.txt"
LIMIT = 0.02  # percent of NE
_TITLES = ("found", "saves", "costs", "next")


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One model of a demo: its name on the command line, the folder of its records, and what came out."""

    name: str
    folder: Path
    plan: Plan
    comparison: Comparison


@dataclass(frozen=True, kw_only=True)
class Screen:
    """Tables of three columns, the first of which is the model; and commands, each with what it is for."""

    found: Sequence[tuple[str, ...]]
    saves: Sequence[tuple[str, ...]]
    costs: Sequence[tuple[str, ...]]
    next: Sequence[tuple[str, str]]

    def __str__(self) -> str:
        parts = []
        for title in _TITLES:
            rows = getattr(self, title)
            parts.append(format_table((title, *[""] * (len(rows[0]) - 1)), rows))
        return "\n\n".join(parts)


def screen_of(models: Sequence[Shown], out: Path, *, data: Mapping[str, str | None]) -> Screen:
    """`data`: the options that say where rows come from and how they are trained on, with their values."""
    rows = "".join(f" {option} {shlex.quote(value)}" for option, value in data.items() if value)
    first = models[0]
    plan_file = shlex.quote(str(first.folder / "plan.json"))
    own = () if data.get("--data") else (("loka demo --data rows.parquet", "the same on your rows (docs/data.md)"),)
    timing = (
        ()
        if first.plan.timed
        else (
            (
                f"loka measure {shlex.quote(str(first.folder / 'stats'))} --device cuda",
                "times, on a machine with a GPU",
            ),
        )
    )
    return Screen(
        found=[_found(model) for model in models],
        saves=[_saves(model) for model in models],
        costs=[_costs(model) for model in models],
        next=[
            (str(out / PAGE), "the page: where FP8 runs, why, and how the numbers lie"),
            *own,
            *timing,
            (
                f"loka validate --model {shlex.quote(first.name)}{rows} --arm {plan_file} --pairs 8",
                f"whether {LIMIT} % of NE holds",
            ),
            (str(out / DETAILS), "every decision and its reason; --verbose prints them"),
        ],
    )


def _found(model: Shown) -> tuple[str, ...]:
    decisions = model.plan.decisions.values()
    low = [decision for decision in decisions if decision.candidate != HP]
    kinds = sorted({decision.candidate for decision in low})
    summary = "no GEMM is worth eight bits here"
    if low:
        summary = f"{len(low)} of {len(decisions)} GEMMs may run in eight bits"
    lines = model.plan.coverage_lines()
    share = lines[0].partition(" run in FP8")[0] if low and lines else ""
    return model.name, summary, share, ", ".join(kinds[:2]) + (", ..." if len(kinds) > 2 else "")


def _saves(model: Shown) -> tuple[str, ...]:
    if not model.plan.gemm_times:
        return model.name, "not known: times need a GPU; on a CPU FP8 is emulated", ""
    before, after = map(sum, zip(*model.plan.gemm_times, strict=True))
    pair = model.comparison.pairs[0]
    ratio = pair.fp8.rows_per_second / pair.bf16.rows_per_second if pair.bf16.rows_per_second else 0.0
    trained = f"training as run here: {ratio:.2f}x the rows a second of bf16" if ratio else ""
    return (model.name, f"GEMMs: {before:.0f} us in bf16, {after:.0f} us by plan ({before / after:.2f}x)", trained)


def _costs(model: Shown) -> tuple[str, ...]:
    predicted = model.plan.kl
    prediction = f"predicted KL/H {predicted.value:.1e}" if predicted else "no effect predicted"
    across = model.comparison.across
    if across is None:
        (pair,) = model.comparison.pairs
        return (model.name, prediction, f"NE {pair.difference.ne_percent.shown('+.3f', ' %')} in one pair")
    verdict = {"pass": f"within {LIMIT} %", "fail": f"not within {LIMIT} %"}.get(
        across.verdict, f"too few pairs for {LIMIT} %"
    )
    return model.name, prediction, f"NE {across.ne_percent.shown('+.3f', ' %')} over {across.pairs} pairs: {verdict}"


def write_pages(models: Sequence[Shown], out: Path, screen: Screen) -> None:
    """A page for each model in its folder, and `out`/report.html with the screen, which leads to them."""
    for model in models:
        made = page(
            stats=Stats.load(model.folder / "stats"),
            report=Report.load(model.folder / "report.json"),
            plan=model.plan,
            validation=model.comparison,
        )
        write_atomic(model.folder / PAGE, made.encode())
    links = [tag("li", tag("a", model.name, href=f"{model.folder.relative_to(out)}/{PAGE}")) for model in models]
    rows = [
        [Cell(text, text, "wrap") for text in (kind, *row)] for kind in _TITLES[:3] for row in getattr(screen, kind)
    ]
    width = max(map(len, rows))
    filled = [[*row, *[Cell("", "")] * (width - len(row))] for row in rows]
    head = ("", "model", *[""] * (width - 2))
    body = (
        tag("header", tag("h1", "FP8 by demo"), tag("nav", tag("ul", *links), aria_label="models")),
        section("screen", "What was found, what it saves, what it costs", table(head, filled, caption="by model")),
        section("next", "What to do next", *(paragraph(code(what), f" {why}") for what, why in screen.next)),
    )
    write_atomic(out / PAGE, document("LoKA demo", *body).encode())
