"""What the command line does with budgets of KL/H: naming one, the frontier, drift."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from loka.cli.terminal import say
from loka.core.budget import Budget
from loka.core.exceptions import LokaError, UnknownName
from loka.core.records.drift import drift, drift_guard, effects_of
from loka.core.records.parts import tasks_in
from loka.core.records.plan import Plan
from loka.core.records.report import Report
from loka.core.records.stats import Stats
from loka.measurement.same_statistics import require_measured_on, require_planned_from
from loka.planner.frontier import frontier
from loka.planner.replan import replan
from loka.report.frontier_plot import plot_frontier
from loka.report.plot import checked_path

_NAMED: dict[str, Callable[[], Budget]] = {"default": Budget, "paper": Budget.paper}


def named_budget(name: str, **others: Any) -> Budget:
    """The budget called `name`, with those of `others` that are not None.

    Raises UnknownName, and LokaError for a limit that makes no sense.
    """
    if name not in _NAMED:
        raise UnknownName(f"no budget is called {name!r}", way_out=f"one of {', '.join(_NAMED)}")
    given = {key: value for key, value in others.items() if value is not None}
    try:
        return replace(_NAMED[name](), **given)
    except ValueError as error:
        raise LokaError(str(error), way_out="a limit that makes sense, or leave the option out") from None


def limited_by_name(budget: Budget, given: Sequence[str], report: Report) -> Budget:
    """`budget` with a limit by each NAME=LIMIT of --ne-of: of a task of the report, else of a segment.

    Raises LokaError for a text that is no such pair, a name given twice, a limit that makes no sense, and for --ne
    beside a limit for each task.
    """
    tasks: dict[str, float] = {}
    segments: dict[str, float] = {}
    for text in given:
        before, _, limit = text.rpartition("=")
        name = before.strip()
        if name in tasks or name in segments:
            raise LokaError(f"--ne-of {text!r}: {name} has a limit already", way_out="give one")
        try:
            (tasks if name in tasks_in(report.parts) else segments)[name] = float(limit)
        except ValueError:
            raise LokaError(f"--ne-of {text!r} is not NAME=LIMIT", way_out="NAME=LIMIT, such as click=1e-4") from None
    if tasks and budget.ne is not None:
        raise LokaError(
            f"--ne {budget.ne:g} holds for each task, and --ne-of names {', '.join(tasks)}",
            way_out="leave --ne out and name every task, or leave those out",
        )
    try:
        return replace(budget, ne=tasks or budget.ne, segments=segments)
    except ValueError as error:
        raise LokaError(str(error), way_out="a limit of 0 or more") from None


def show_frontier(report: Report, budget: Budget, out: Path | None) -> None:
    as_json = out is not None and out.suffix == ".json"
    if out is not None and not as_json:
        checked_path(out)
    found = frontier(report, budget)
    say(found)
    for note in filter(None, [*report.unknown_effects(), report.not_clicks]):
        say(f"note: {note}")
    if out is None:
        return
    if as_json:
        found.save(out)
    else:
        plot_frontier(found, out)
    say(f"written: {out}")


HOLDS, REPLAN, CLOSE, UNKNOWN = 0, 1, 3, 4  # exit statuses of `loka drift`; 2 is an error's


def show_drift(plan: Plan, windows: Sequence[Stats], before: Stats | None, report: Report | None) -> int:
    """Prints how the last window differs, what would be decided differently and what the drift guard should
    do, and returns the exit status. Earlier windows count for the drift guard's patience alone.

    Raises LokaError where `before` is not what the plan was made of, or the report measured on."""
    by_part = [name for name in plan.limits if name]
    history = [drift(plan, window, before=before) for window in windows]
    if before is not None:
        require_planned_from(plan, before)
        if report is not None:
            require_measured_on(report, before)
    changed = None if report is None else replan(plan, report, effects_of(windows[-1]), windows[-1].alike)
    say(history[-1])
    status = REPLAN if history[-1].over_budget else HOLDS
    if changed is not None:
        say(f"planned again with the effects of this window, and the times of the report:\n{changed}")
        status = REPLAN if changed else status
    held = sorted(drift_guard(history))
    if held:
        say(f"the drift guard should hold in hp: {', '.join(held)}")
        return CLOSE
    if status == REPLAN:
        say("no layer is in doubt, but planning again would pay")
        return REPLAN
    unknown = history[-1].unknown
    if by_part:
        say(
            f"whether it keeps the limits of {', '.join(by_part)} is not known: a window tells the KL/H of "
            "the whole model. Probe, measure and plan again: loka probe, loka measure, loka plan"
        )
        return UNKNOWN
    if unknown:
        say(f"whether the plan holds is not known: this window does not tell of {', '.join(unknown)}")
        return UNKNOWN
    say("the plan holds")
    return HOLDS
