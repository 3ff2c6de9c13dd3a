"""Limits on what layers lose together: by the sum of their effects, and by the correlations of what they change.

A choice within a limit goes by the sum (ne_budget.py). Where layers are alike they lose more together, so what the sum
may spend is tightened until that is within, too.
"""

from collections.abc import Callable

from loka.core.records.plan import Plan
from loka.core.records.report import Report
from loka.planner.choice.limits import Limits, charged_alone, lost_alike
from loka.planner.choice.ne_budget import Granted

_TIGHTENED = 64  # rounds at most; each spends less, down to what is forced
_GIVEN_BACK = 8

Decided = tuple[Granted | None, Plan]


def within_together(report: Report, limits: Limits, decide: Callable[[Limits], Decided]) -> Decided:
    """What `decide` gives for limits on the sum by which its layers keep `limits` together; above them only where no
    limit helps, as of what is forced.

    A limit becomes what the sum spent times limit / lost, by which the next round spends less. That may leave out more
    than need be: then half of the way back is tried, eight times.
    """
    charged, failed, found = limits, limits, decide(limits)
    before: dict[str, float] = {}
    for _ in range(_TIGHTENED):
        over = _over(found[1], report, limits)
        spent = {at: charged_alone(found[1], at) for at in over}
        if not over or spent == before:
            break
        failed, before = charged, spent
        charged = {at: min(limit, spent[at]) * over[at] if at in over else limit for at, limit in charged.items()}
        found = decide(charged)
    if failed is charged or _over(found[1], report, limits):
        return found
    for _ in range(_GIVEN_BACK):
        middle = {at: (limit + failed[at]) / 2 for at, limit in charged.items()}
        tried = decide(middle)
        if _over(tried[1], report, limits):
            failed = middle
        else:
            charged, found = middle, tried
    return found


def _over(decided: Plan, report: Report, limits: Limits) -> dict[str, float]:
    """Of limits that are exceeded: what their layers may lose, over what they do."""
    lost = {at: lost_alike(decided, report, at) for at in limits}
    return {at: limit / lost[at] for at, limit in limits.items() if lost[at] > limit}
