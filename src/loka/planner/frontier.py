"""What each budget of KL/H buys: plans over a range of `Budget.ne`, so that a user picks the knee.

    saved(plan) = sum over sites in eight bits of (hp time - time)

All points have one base, the hp time of all measured sites. Without times FLOPs stand for them,
halved in eight bits (planner/choice/ne_budget.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from loka.core.budget import Budget, budget_of, upper_bound
from loka.core.error import Estimate, exactly
from loka.core.exceptions import LokaError
from loka.core.records.parts import WHOLE, tasks_in
from loka.core.records.plan import Plan
from loka.core.records.report import HP, Report
from loka.core.storage.codec import named, sparse
from loka.core.storage.record_file import RecordFile
from loka.core.table import format_table
from loka.planner.choice.limits import WAY_OUT, spent_of
from loka.planner.decision import saved_us
from loka.planner.plan import plan

_UNLIMITED = 1e9  # no model loses so much
_DECADES = 4  # that the default range covers below the largest effect


@dataclass(frozen=True, kw_only=True)
class Point:
    """A budget and what became of it. `kl` is the sum of its layers' effects; `spent`, which the budget limits, its
    upper end, or what they lose together where that is more; `fp8` the candidates of the sites that are not in hp;
    `knee` marks the frontier's knee."""

    budget: float
    kl: Estimate = named("ne")
    spent: float
    time: float
    fp8: Mapping[str, str]
    knee: bool = False


@dataclass(frozen=True, kw_only=True)
class Frontier(RecordFile, kind="loka-frontier", version=1, way_out="run `loka plan --frontier` again"):
    """`points` by rising budget, each faster than the one before; the first spends nothing.

    `base` is the time in hp, in `unit`: "us", or "FLOPs" of what was not timed. Of `tasks` each has
    the budget, and KL/H is that of the one that spends most.
    """

    model: str
    machine: str
    base: float
    unit: str
    points: tuple[Point, ...]
    tasks: tuple[str, ...] = sparse(())

    @property
    def knee(self) -> Point:
        """The last point up to which KL/H buys more time than on average over the whole frontier."""
        return next(point for point in self.points if point.knee)

    def __str__(self) -> str:
        header = ("budget", "predicted KL/H", "upper end", "in eight bits", "time", "speed-up", "saved per 1e-6", "")
        rows = []
        for before, point in zip((None, *self.points), self.points, strict=False):
            rate = "-"
            if before is not None:
                bought = (before.time - point.time) / max(point.spent - before.spent, 1e-300)
                rate = f"{100 * bought * 1e-6 / self.base:.3g} %"
            rows.append(
                (
                    f"{point.budget:.2e}",
                    str(point.kl),
                    f"{point.spent:.2e}",
                    len(point.fp8),
                    f"{point.time:.4g}",
                    f"{self.base / max(point.time, 1e-9):.3f}x",
                    rate,
                    "knee" if point.knee else "",
                )
            )
        title = f"KL/H against linear-layer time for {self.model}, measured on {self.machine}"
        if self.unit == "us":
            note = f"hp takes {self.base:.0f} us, quantization included in all times."
        else:
            note = "Not timed: FLOPs stand for time, halved in eight bits; no speed is claimed."
        if self.tasks:
            note += f" Each of {', '.join(self.tasks)} has the budget; KL/H is that of the one that spends most."
        return f"{title}\n{format_table(header, rows)}\n{note}"


def frontier(
    report: Report, budget: Budget | None = None, *, limits: Iterable[float] | None = None, count: int = 24
) -> Frontier:
    """Plans `report` at each limit of KL/H, everything else as `budget` says.

    Args:
        limits: values of `Budget.ne`; by default 0 and `count` of them in even ratios, from what the cheapest
            site costs to what all together do, over four decades at most.

    Raises:
        LokaError: no site of the report has an estimate of its KL/H, or there is no limit to plan at.
        ValueError: a budget of another kind.
    """
    budget = budget_of(budget)
    limits = None if limits is None else list(limits)
    if not isinstance(count, int) or count < 1:
        raise LokaError(f"count is {count!r}; it is a number of limits", way_out="1 or more, such as 24")
    if limits is not None and not limits:
        raise LokaError("limits names no limit of KL/H", way_out="some, such as (0, 1e-5, 1e-4), or leave it out")
    everything = plan(report, replace(budget, ne=_UNLIMITED))
    tasks = tasks_in(report.parts)
    parts = tasks or (WHOLE,)
    if all(everything.kl_of(part) is None for part in parts):
        raise LokaError(
            f"no candidate of {report.model.name} has an estimate of its KL/H within this budget",
            why=list(everything.notes[:4]),
            way_out=WAY_OUT,
        )
    if limits is None:
        limits = [0.0, *_range(report, parts, _most(everything, report, parts)[1], count)]
    points: list[Point] = []
    for limit in sorted(limits):
        made = plan(report, replace(budget, ne=limit))
        fp8 = {site: found.candidate for site, found in made.decisions.items() if found.candidate != HP}
        time = base_time(report) - saved_time(made)
        if points and not time < points[-1].time:  # what layers lose together makes no even staircase
            continue
        effect, spent = _most(made, report, parts)
        points.append(Point(budget=limit, kl=effect, spent=spent, time=time, fp8=fp8))
    knee = _knee(points)
    return Frontier(
        model=report.model.name,
        machine=str(report.machine),
        base=base_time(report),
        unit="us" if report.timed else "FLOPs",
        points=tuple(replace(point, knee=point is knee) for point in points),
        tasks=tasks,
    )


def _most(found: Plan, report: Report, parts: Sequence[str]) -> tuple[Estimate, float]:
    """The loss of the part that spends most, by the sum, and what it spends."""
    spent = {part: spent_of(found, report, part) for part in parts}
    dearest = max(parts, key=spent.__getitem__)
    return found.kl_of(dearest) or exactly(0.0), spent[dearest]


def _knee(points: Sequence[Point]) -> Point:
    first, last = points[0], points[-1]
    rate = (first.time - last.time) / max(last.spent - first.spent, 1e-300)
    return max(points, key=lambda point: (first.time - point.time) - rate * (point.spent - first.spent))


def base_time(report: Report) -> float:
    """The time of all measured sites in hp: in microseconds, or in FLOPs where nothing was timed."""
    total = 0.0
    for site in report.sites.values():
        if report.timed:
            hp = site.measurements[HP].microseconds
            total += hp.value if hp else 0.0
        else:
            total += site.problem.flops
    return total


def saved_time(made: Plan) -> float:
    """How much of `base_time` the plan saves, in the same unit."""
    if made.timed:
        return sum(map(saved_us, made.decisions.values()))
    return sum(d.problem.flops / 2 for d in made.decisions.values() if d.candidate != HP)


def _range(report: Report, parts: Sequence[str], largest: float, count: int) -> list[float]:
    known = [
        [kl for part in parts if (kl := measured.kl_of(part)) is not None]
        for site in report.sites.values()
        for measured in site.measurements.values()
    ]
    costs = [max(map(upper_bound, each)) for each in known if each]
    smallest = min((cost for cost in costs if 0 < cost < largest), default=largest)
    low = max(smallest, largest / 10**_DECADES)
    ratio = (largest / low) ** (1 / max(count - 1, 1)) if low > 0 else 1.0
    return [low * ratio**index for index in range(count - 1)] + [largest * (1 + 1e-9)]
