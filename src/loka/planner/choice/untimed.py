"""What a site runs where nothing was timed: the most exact, or what costs the model least."""

from collections.abc import Mapping

from loka.core.records.report import Measurement, SiteReport
from loka.planner.choice.limits import Limits, cost_of, share_spent


def most_exact(admitted: Mapping[str, Measurement]) -> tuple[str, str, dict[str, str]]:
    """The candidate with the largest `sqnr_db`, of those within its interval the first by name.

    Returns the candidate, the reason for it, and why each other one lost.
    """
    errors = {name: m.errors["sqnr_db"] for name, m in admitted.items()}
    best = max(sorted(errors), key=lambda name: errors[name].value)
    equal = sorted(name for name, error in errors.items() if error.high >= errors[best].low)
    chosen = equal[0]
    lost = {
        name: f"tied with {chosen}, which comes first" if name in equal else f"less exact: {error} dB"
        for name, error in errors.items()
        if name != chosen
    }
    return chosen, "smallest error; not timed" + ties(equal[1:]), lost


def least_effect(
    site: SiteReport, admitted: Mapping[str, Measurement], limits: Limits
) -> tuple[str, str, dict[str, str]]:
    """As `most_exact`, by what a candidate spends of the budget of KL/H: of several limits, of the one that
    it spends the largest share of."""
    costs = {name: share_spent(cost_of(site, name, limits), limits) for name in admitted}
    chosen = min(costs, key=lambda name: (costs[name], name))
    if len(limits) > 1:
        lost = {name: f"costs more: {cost:.1%} of a limit" for name, cost in costs.items() if name != chosen}
        return chosen, "smallest share of its limits on KL/H; not timed", lost
    (part,) = limits
    lost = {name: f"costs more: KL/H {admitted[name].kl_of(part)}" for name in admitted if name != chosen}
    return chosen, "smallest KL/H; not timed", lost


def ties(names: list[str]) -> str:
    return f" (tied with {len(names)} more)" if names else ""
