"""Of a page: error and time of every site, and the frontier of KL/H against time."""

from dataclasses import dataclass

from loka.core.exceptions import LokaError
from loka.core.records.plan import Plan
from loka.core.records.report import HP, Measurement, Report, SiteReport
from loka.planner.frontier import Frontier, frontier
from loka.report.pages.html import Cell, Html, code, figure, fold, join, missing, number, paragraph, section, table, tag
from loka.report.pages.svg import Frame, fit

SITES, FRONTIER = "Error and time of every site", "KL/H against speed"


@dataclass(frozen=True)
class Best:
    """The candidate shown for a site: the plan's, else the fastest, else the most exact one."""

    site: SiteReport
    candidate: str
    measured: Measurement
    decided: bool

    @property
    def hp_us(self) -> float | None:
        hp = self.site.measurements.get(HP)
        return hp.microseconds.value if hp and hp.microseconds else None

    @property
    def effect(self) -> float:
        """On KL/H, 0 where it is not known."""
        return self.measured.errors["ne"].value if "ne" in self.measured.errors else 0.0


def best_of(site: SiteReport, plan: Plan | None) -> Best | None:
    """None where no FP8 candidate can run."""
    runs = {name: m for name, m in site.measurements.items() if name != HP and not m.unsupported}
    decision = plan.decisions.get(site.name) if plan else None
    if decision is not None and decision.candidate != HP:
        measured = site.measured(decision.candidate)  # in a region perhaps under another name
        if measured is not None and not measured.unsupported:
            return Best(site, decision.candidate, measured, True)
    timed = {name: m.speedup.value for name, m in runs.items() if m.speedup}
    if timed:
        name = max(timed, key=lambda key: (timed[key], key))
    elif runs:
        errors = {name: m.errors["sqnr_db"].value for name, m in runs.items()}
        name = max(errors, key=lambda key: (errors[key], key))
    else:
        return None
    return Best(site, name, runs[name], False)


def sites_section(report: Report, plan: Plan | None) -> Html:
    found = [best for site in report.sites.values() if (best := best_of(site, plan)) is not None]
    found.sort(key=lambda best: (-(best.hp_us or 0.0), -best.effect, best.site.name))
    rule = "fastest" if report.timed else "most exact (nothing was timed)"
    candidate = f"the plan's candidate, or the {rule} where it keeps hp" if plan else f"the {rule} candidate"
    if report.timed and plan:
        candidate += ". Times are of a GEMM alone, which quantizes both its operands; a plan decides by layer, whose "
        candidate += "GEMMs share those passes"
    state = "" if report.complete else " The report is incomplete: measuring again goes on."
    notes = [paragraph(f"{len(report.sites)} sites on {report.machine}. Each shows {candidate}.{state}")]
    if report.timed:
        notes.append(_scatter(found))
    notes.append(_table(found, timed=report.timed))
    if report.skipped:
        skipped = [(code(path), Cell(reason, reason, "wrap")) for path, reason in report.skipped.items()]
        notes.append(table(("not measured", "why"), skipped, caption="Not measured", first=8))
    said = [*report.unknown_effects(), *filter(None, [report.not_clicks]), *report.notes]
    if said:
        notes.append(fold(f"notes of the measurement: {len(said)}", tag("ul", *(tag("li", note) for note in said))))
    return section("sites", SITES, *notes)


def _scatter(found: list[Best]) -> Html:
    timed = [(best, best.measured.speedup, best.measured.errors.get("sqnr_db")) for best in found]
    points = [(best, speed.value, error.value) for best, speed, error in timed if speed and error]
    if not points:
        return Html("")
    frame = Frame.of(
        fit([error for _, _, error in points]),
        fit([speed for _, speed, _ in points], log=True, include=[1.0]),
        log_y=True,
    )
    frame.rule(y=1.0)
    frame.text(frame.x.high, 1.0, "as fast as hp", anchor="end", dy=-4)
    for best, speed, error in points:
        frame.dot(
            error,
            speed,
            "a" if best.decided else "b",
            f"{best.site.name}: {best.candidate}, {error:.1f} dB, {speed:.2f}x",
            hollow=not best.decided,
        )
    drawing = frame.draw(
        label="speed-up against error of each site",
        x_title="sqnr of the result, dB (right is more exact)",
        y_title="speed-up over hp",
        y_format="{:g}x".format,
    )
    decided = sum(best.decided for best, _, _ in points)
    return figure(drawing, f"Each dot is a GEMM: {decided} run in eight bits by plan (filled), the others do not.")


def _table(found: list[Best], *, timed: bool) -> Html:
    header = ("site", "MxNxK", "hp us", "us", "speed-up", "sqnr dB", "MERE", "KL/H", "candidate")
    rows = []
    for best in found:
        problem, measured = best.site.problem, best.measured
        errors, time, speed = measured.errors, measured.microseconds, measured.speedup
        runs = join([code(best.candidate), " in the plan" if best.decided else ""])
        rows.append(
            (
                code(best.site.name),
                Cell(f"{problem.m}x{problem.n}x{problem.k}", problem.flops),
                number(best.hp_us),
                number(time.value if time else None),
                number(speed.value if speed else None, "{:.2f}x", kind=_speed_kind(measured)),
                number(errors["sqnr_db"].value if "sqnr_db" in errors else None),
                number(errors["mere"].value if "mere" in errors else None, "{:.3f}"),
                number(errors["ne"].value if "ne" in errors else None, "{:.1e}"),
                Cell(runs, best.candidate, "" if best.decided else "hp"),
            )
        )
    return table(header, rows, caption="Sites by their time in hp" if timed else "Sites by their predicted KL/H")


def _speed_kind(measured: Measurement) -> str:
    if measured.speedup is None:
        return ""
    return "good" if measured.speedup.low > 1 else "bad" if measured.speedup.high < 1 else ""


def frontier_section(report: Report, plan: Plan | None) -> Html:
    try:
        found = frontier(report, plan.budget if plan else None)
    except LokaError as error:
        reason = error.way_out or error.what
        return missing("frontier", FRONTIER, f"No frontier: {error.what}. {reason[:1].upper()}{reason[1:]}.")
    return section(
        "frontier",
        FRONTIER,
        paragraph(
            "What each budget of KL/H buys. A step is a plan; its bar is the 95 % interval of the predicted "
            "KL/H. The knee is the last plan up to which KL/H buys more than average."
        ),
        paragraph(report.not_clicks) if report.not_clicks else None,
        figure(_frontier(found, plan), _caption(found)),
        _points_table(found),
    )


def _frontier(found: Frontier, plan: Plan | None) -> Html:
    spent = [point.spent for point in found.points if point.spent > 0]
    least = min(spent, default=1e-6)
    left = least / 3  # where a logarithm shows a plan that spends nothing
    share = [100 * point.time / found.base for point in found.points]
    frame = Frame.of((left, 1.4 * max(spent, default=1e-5)), fit(share), log_x=True)
    frame.line(
        [(max(point.spent, left), percent) for point, percent in zip(found.points, share, strict=True)], "a", steps=True
    )
    for point, percent in zip(found.points, share, strict=True):
        if point.spent > 0:
            frame.interval(max(point.kl.low, left), point.kl.high, percent, "shade", width=5)
        label = f"budget {point.budget:.1e}: {len(point.fp8)} sites, {percent:.1f} % of hp, KL/H +{point.kl}"
        frame.dot(max(point.spent, left), percent, "a", label)
    knee = found.knee
    at = 100 * knee.time / found.base
    frame.dot(max(knee.spent, left), at, "b", f"knee: budget {knee.budget:.1e}", radius=6, hollow=True)
    frame.text(max(knee.spent, left), at, "knee", dx=9, dy=-7, soft=False)
    if plan is not None and plan.kl_limit:
        frame.rule(x=plan.kl_limit, colour="b")
        frame.text(plan.kl_limit, frame.y.high, "budget", dx=4, dy=10)
    unit = "linear-layer time" if found.unit == "us" else "FLOPs, halved in eight bits"
    return frame.draw(
        label="time against predicted KL/H",
        x_title="predicted KL/H, upper end",
        y_title=f"{unit}, % of hp",
        x_format=lambda v: "0" if v == left else f"{v:.0e}".replace("e-0", "e-"),
        x_ticks=[left, *(tick for tick in frame.x.ticks() if tick > 1.5 * left)],
    )


def _caption(found: Frontier) -> str:
    if found.unit == "us":
        return f"hp takes {found.base:.0f} us on {found.machine}; quantization is in all times."
    return "Not timed: FLOPs stand for time, halved in eight bits; no speed is claimed."


def _points_table(found: Frontier) -> Html:
    header = ("budget of KL/H", "predicted KL/H", "sites in eight bits", "% of hp", "")
    rows = [
        (
            number(point.budget, "{:.1e}"),
            number(point.kl.value, "{:.1e}"),
            number(len(point.fp8), "{:d}"),
            number(100 * point.time / found.base),
            "knee" if point.knee else "",
        )
        for point in found.points
    ]
    return table(header, rows, caption="Plans on the frontier", first=10)
