"""The report page: one self-contained HTML file from the records of a model, whichever there are.

It needs no network and no script to be read, is light or dark as the reader's system is, and says of each
record that is not there that it is not there. The same records give the same bytes.
"""

from collections.abc import Sequence

from loka.core.exceptions import LokaError, truncated
from loka.core.records.plan import Plan
from loka.core.records.report import Report
from loka.core.records.stats import Stats
from loka.measurement.same_statistics import require_measured_on
from loka.planner.decision import decision_of
from loka.report.pages import depths as page_depths
from loka.report.pages import plan as page_plan
from loka.report.pages import quality as page_quality
from loka.report.pages import sites as page_sites
from loka.report.pages import timeline as page_timeline
from loka.report.pages.depths import depths_section
from loka.report.pages.html import Html, code, document, missing, tag
from loka.report.pages.plan import plan_section
from loka.report.pages.sites import frontier_section, sites_section
from loka.report.pages.timeline import timeline_section
from loka.train.automatic.timeline import Event
from loka.validation.compare import Comparison
from loka.validation.record import Validation


def page(
    *,
    stats: Stats | None = None,
    report: Report | None = None,
    plan: Plan | None = None,
    validation: Validation | Comparison | None = None,
    timeline: Sequence[Event] | None = None,
) -> str:
    """The page as text.

    Args:
        stats: what the probe learnt: the distributions.
        report: errors and times of all candidates: the sites, and the frontier where effects are known.
        plan: what was decided.
        validation: paired runs, of `loka validate` or of `loka demo`.
        timeline: phases of a run that probed, planned and converted by itself.

    Raises:
        LokaError: no record at all, a plan, report and statistics of different models, a report of other statistics,
            or a plan of another report.
    """
    if not timeline and all(record is None for record in (stats, report, plan, validation)):
        raise LokaError("there is no record to make a page of", way_out="give at least one")
    _check_same(stats, report, plan)
    sections = [
        _quality(validation, plan),
        _curves(validation),
        plan_section(plan) if plan else _none("plan", page_plan.TITLE, "plan", "loka plan"),
        frontier_section(report, plan) if report else _none("frontier", page_sites.FRONTIER, "report", "loka measure"),
        sites_section(report, plan) if report else _none("sites", page_sites.SITES, "report", "loka measure"),
        depths_section(stats) if stats else _none("depths", page_depths.TITLE, "statistics", "loka probe"),
        timeline_section(timeline)
        if timeline
        else _none("timeline", page_timeline.TITLE, "time line", "loka train --auto"),
    ]
    name = _name(stats, report, plan, validation)
    return document(f"LoKA report: {name}", _header(name, stats, report, plan), *sections)


def _header(name: str, stats: Stats | None, report: Report | None, plan: Plan | None) -> Html:
    machine = plan.machine if plan else report.machine if report else None
    entries = [
        ("quality", "quality"),
        ("curves", "training curves"),
        ("plan", "where FP8 runs"),
        ("frontier", "KL/H against speed"),
        ("sites", "sites"),
        ("depths", "distributions"),
        ("timeline", "time line"),
    ]
    links = [tag("li", tag("a", text, href=f"#{identity}")) for identity, text in entries]
    about = f"Measured on {machine}." if machine else ""
    if stats:
        about += f" {stats.sampled_steps} of {stats.steps} steps sampled."
    return tag(
        "header",
        tag("h1", f"FP8 in {name}"),
        tag("p", about.strip(), class_="soft") if about else None,
        tag("nav", tag("ul", *links), aria_label="sections"),
    )


def _none(identity: str, title: str, what: str, command: str) -> Html:
    return missing(identity, title, f"No {what} given: ", code(command), " writes one.")


def _quality(validation: Validation | Comparison | None, plan: Plan | None) -> Html:
    if validation is None:
        return _none("quality", page_quality.QUALITY, "validation", "loka validate")
    return page_quality.quality_section(validation, plan)


def _curves(validation: Validation | Comparison | None) -> Html:
    found = page_quality.curves_section(validation) if isinstance(validation, Validation) else None
    return found or _none("curves", page_quality.CURVES, "training curves", "loka validate")


def _name(
    stats: Stats | None, report: Report | None, plan: Plan | None, validation: Validation | Comparison | None
) -> str:
    signed = plan or report or stats
    return signed.model.name if signed else validation.model if validation else "a run by itself"


def _check_same(stats: Stats | None, report: Report | None, plan: Plan | None) -> None:
    """Raises LokaError for records of different models, a report of other statistics, and a plan of another report."""
    records = {"stats": stats, "report": report, "plan": plan}
    given = [(name, record.model) for name, record in records.items() if record is not None]
    for name, model in given[1:]:
        differences = model.differences(given[0][1])
        if differences:
            raise LokaError(
                f"the {name} and the {given[0][0]} are of different models",
                why=truncated(differences, 6),
                way_out="give records of one model",
            )
    if stats is not None and report is not None:
        require_measured_on(report, stats)
    if plan is not None and report is not None:
        _check_planned_from(report, plan)


def _check_planned_from(report: Report, plan: Plan) -> None:
    here = {
        name: decision_of(report.sites[name], decision.candidate, "", {}).sqnr_db if name in report.sites else None
        for name, decision in plan.decisions.items()
        if decision.sqnr_db is not None
    }
    others = [
        f"{name}: {plan.decisions[name].candidate} has {plan.decisions[name].sqnr_db} dB in the plan, and {found} here"
        for name, found in here.items()
        if found != plan.decisions[name].sqnr_db
    ]
    if others:
        raise LokaError(
            "the plan is of another report: no number of one stands beside the other's",
            why=truncated(others, 6),
            way_out="give the report that it was planned from, or leave one of them out",
        )
