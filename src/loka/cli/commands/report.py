"""`loka report`: one HTML page from the records of a model."""

from pathlib import Path
from typing import Annotated

import typer

from loka.cli.terminal import say
from loka.core.exceptions import FileRefused, LokaError
from loka.core.records.plan import Plan
from loka.core.records.report import Report
from loka.core.records.stats import Stats
from loka.core.storage.files import write_atomic
from loka.report.pages.page import page
from loka.train.automatic.timeline import load_timeline
from loka.validation.compare import Comparison
from loka.validation.record import Validation


def report(
    stats: Annotated[Path | None, typer.Option(help="Folder written by `loka probe`.")] = None,
    report: Annotated[Path | None, typer.Option(help="File written by `loka measure`.")] = None,
    plan: Annotated[Path | None, typer.Option(help="File written by `loka plan`.")] = None,
    validation: Annotated[
        Path | None, typer.Option(help="validation.json of `loka validate`, or train.json of `loka demo`.")
    ] = None,
    timeline: Annotated[Path | None, typer.Option(help="timeline.json of `loka train --auto`.")] = None,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
) -> None:
    """One HTML page: quality, where FP8 runs and why, KL/H against speed, errors, distributions.

    It stands by itself: no network, light and dark, for a phone too. What is not given is said to be missing.
    """
    if all(path is None for path in (stats, report, plan, validation, timeline)):
        raise LokaError(
            "there is no record to make a page of",
            way_out="at least one of --stats, --report, --plan, --validation, --timeline",
        )
    made = page(
        stats=Stats.load(stats) if stats else None,
        report=Report.load(report) if report else None,
        plan=Plan.load(plan) if plan else None,
        validation=load_quality(validation) if validation else None,
        timeline=load_timeline(timeline) if timeline else None,
    )
    write_atomic(out, made.encode())
    say(f"written: {out} ({len(made.encode()) / 1024:.0f} KB)")


def load_quality(path: Path) -> Validation | Comparison:
    """Of either kind. Raises FileRefused for neither, and for a damaged one."""
    try:
        return Validation.load(path)
    except FileRefused as refused:
        try:
            return Comparison.load(path)
        except FileRefused:
            raise refused from None
