"""Of a page: where FP8 runs, why, and what it saves; the layers that stay in high precision, and why."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loka.core.budget import upper_bound
from loka.core.recipe import Gemm
from loka.core.records.plan import Decision, Plan
from loka.core.records.report import HP
from loka.planner.decision import saved_us
from loka.report.pages.html import Cell, Html, code, fold, join, number, paragraph, section, table, tag, tiles
from loka.report.pages.svg import WIDTH

TITLE = "Where FP8 runs, and why"


@dataclass(frozen=True)
class LayerRow:
    """The decisions of one layer. Times in microseconds are sums over those of its GEMMs that were timed."""

    path: str
    decisions: dict[Gemm, Decision]

    @property
    def fp8(self) -> bool:
        return any(d.candidate != HP for d in self.decisions.values())

    @property
    def hp_us(self) -> float | None:
        times = [d.hp_microseconds.value for d in self.decisions.values() if d.hp_microseconds]
        return sum(times) if times else None

    @property
    def saved_us(self) -> float | None:
        """None where nothing was timed."""
        return None if self.hp_us is None else sum(map(saved_us, self.decisions.values()))


def layer_rows(plan: Plan) -> list[LayerRow]:
    """By layer, those that save most first; without times in the model's order."""
    by_path: dict[str, dict[Gemm, Decision]] = {}
    for decision in plan.decisions.values():
        by_path.setdefault(decision.path, {})[decision.problem.gemm] = decision
    rows = [LayerRow(path, found) for path, found in by_path.items()]
    return sorted(rows, key=lambda row: -(row.saved_us or 0.0))


def plan_section(plan: Plan) -> Html:
    rows = layer_rows(plan)
    low, high = [row for row in rows if row.fp8], [row for row in rows if not row.fp8]
    counts = sum(d.candidate != HP for d in plan.decisions.values())
    known = [
        (f"GEMMs in {plan.eight_bits}", f"{counts} of {len(plan.decisions)}", ""),
        (f"layers with {plan.eight_bits}", f"{len(low)} of {len(rows)}", ""),
        *_time_tiles(plan),
    ]
    if plan.kl is not None:
        known.append(("predicted KL/H", f"{plan.kl.value:.2g}", ""))
    if plan.kl_limit is not None:
        known.append(("budget of KL/H", f"{plan.kl_limit:g}", ""))
    parts: list[Html] = [tiles(known), _bar(rows, plan.eight_bits) if plan.timed else Html("")]
    parts.append(paragraph(plan.summary()))
    if plan.limits:
        parts.append(_limits(plan))
    if low:
        parts.append(_layers(low, plan))
    if high:
        parts.append(_kept(high))
    if plan.notes:
        notes = tag("ul", *(tag("li", note) for note in plan.notes))
        parts.append(fold(f"notes of the planner: {len(plan.notes)}", notes))
    return section("plan", TITLE, *parts)


def _limits(plan: Plan) -> Html:
    rows = []
    for name, limit in plan.limits.items():
        kl = plan.kl_of(name)
        spent = upper_bound(kl) if kl else 0.0
        rows.append(
            (
                name or "all rows",
                number(kl.value if kl else 0.0, "{:.2e}"),
                Cell((f"[{kl.low:.2e}, {kl.high:.2e}]" if kl else "-") + plan.lacks(name), ""),
                number(spent, "{:.2e}"),
                number(limit, "{:.2e}"),
                number(100 * spent / limit if limit else None, "{:.0f} %"),
            )
        )
    header = ("part", "predicted KL/H", "95 % interval", "charged", "limit", "spent")
    return table(header, rows, caption="Limits by task and segment", first=30)


def _time_tiles(plan: Plan) -> Iterable[tuple[str, str, str]]:
    if not plan.timed or not plan.gemm_times:
        return [("speed", "not timed", "")]
    before, after = map(sum, zip(*plan.gemm_times, strict=True))
    return [
        ("GEMMs in hp", f"{before / 1000:.2f} ms", ""),
        ("GEMMs by plan", f"{after / 1000:.2f} ms, {before / after:.2f}x", ""),
    ]


def _bar(rows: Sequence[LayerRow], eight_bits: str) -> Html:
    total = sum(row.hp_us or 0.0 for row in rows)
    if not total:
        return Html("")
    at, marks = 0.0, []
    for row in sorted(rows, key=lambda row: (not row.fp8, -(row.hp_us or 0.0))):
        wide = (row.hp_us or 0.0) / total * WIDTH
        colour = "var(--a)" if row.fp8 else "var(--line)"
        label = f"{row.path}: {row.hp_us or 0:.0f} us in hp, {100 * (row.hp_us or 0) / total:.1f} %"
        marks.append(
            tag(
                "rect",
                tag("title", label),
                x=f"{at:.2f}",
                y=0,
                width=f"{max(wide - 0.6, 0.2):.2f}",
                height=16,
                fill=colour,
            )
        )
        at += wide
    share = sum(row.hp_us or 0.0 for row in rows if row.fp8) / total
    drawing = tag("svg", *marks, viewBox=f"0 0 {WIDTH:g} 16", role="img", aria_label="time by layer")
    caption = f"{100 * share:.0f} % of the linear layers' time lies in layers with {eight_bits} (blue)"
    return tag("figure", drawing, tag("figcaption", caption))


def _layers(rows: Sequence[LayerRow], plan: Plan) -> Html:
    header = ("layer", "saves us", "hp us", *(gemm.value for gemm in Gemm), "sqnr dB", "KL/H", "why")
    order = ", by time saved" if plan.timed else ""
    return table(
        header,
        [_layer(row) for row in rows],
        caption=f"Layers with {plan.eight_bits}{order}; sqnr is the lowest of its GEMMs",
    )


def _layer(row: LayerRow) -> tuple[object, ...]:
    fp8 = {gemm: d for gemm, d in row.decisions.items() if d.candidate != HP}
    errors = [d.sqnr_db.value for d in fp8.values() if d.sqnr_db]
    effects = [d.kl.value for d in fp8.values() if d.kl]
    return (
        code(row.path),
        number(row.saved_us),
        number(row.hp_us),
        *(_runs(row.decisions.get(gemm)) for gemm in Gemm),
        number(min(errors) if errors else None),
        number(sum(effects) if effects else None, "{:.1e}"),
        Cell(_reasons(row.decisions), "", "wrap"),
    )


def _runs(decision: Decision | None) -> Cell:
    if decision is None:
        return Cell("-", "", "hp")
    if decision.candidate == HP:
        return Cell(HP, HP, "hp")
    kernel, _, recipe = decision.candidate.partition(":")
    shown = join([tag("span", kernel, class_="soft"), tag("br"), code(recipe)])
    return Cell(tag("span", shown, title=str(decision.problem)), decision.candidate)


def _reasons(decisions: dict[Gemm, Decision]) -> Html:
    grouped: dict[str, list[str]] = {}
    for gemm, decision in decisions.items():
        grouped.setdefault(decision.reason, []).append(gemm.value)
    first = next((d for d in decisions.values() if d.candidate != HP), next(iter(decisions.values())))
    short = first.reason.partition(";")[0]
    items = [tag("li", f"{', '.join(gemms)}: {reason}") for reason, gemms in grouped.items()]
    runners = {
        f"{gemm.value}, next best {d.runner_up}: {d.rejected.get(d.runner_up, '')}"
        for gemm, d in decisions.items()
        if d.runner_up
    }
    items += [tag("li", runner) for runner in sorted(runners)]
    return fold(short, tag("ul", *items))


def _kept(rows: Sequence[LayerRow]) -> Html:
    header = ("layer", "hp us", "MxNxK of output", "why")
    cells = []
    for row in rows:
        output = row.decisions.get(Gemm.OUTPUT) or next(iter(row.decisions.values()))
        problem = output.problem
        cells.append(
            (
                code(row.path),
                number(row.hp_us),
                Cell(f"{problem.m}x{problem.n}x{problem.k}", problem.flops),
                Cell(_reasons(row.decisions), "", "wrap"),
            )
        )
    return fold(f"{len(rows)} layers stay in high precision", table(header, cells, caption="Layers in hp"))
