"""What differs between two plans."""

from dataclasses import dataclass

from loka.core.records.plan import Decision, Plan, require_plan
from loka.core.storage.codec import encode
from loka.core.table import format_table


@dataclass(frozen=True, kw_only=True)
class PlanDiff:
    """Decisions that differ between two plans, and what else differs in how the plans were made."""

    context: tuple[str, ...]
    sites: tuple[tuple[str, str, str, str], ...]
    same: int

    def __bool__(self) -> bool:
        return bool(self.context or self.sites)

    def __str__(self) -> str:
        lines = list(self.context)
        if self.sites:
            lines.append(format_table(("site", "first", "second", "why in the second"), self.sites))
        lines.append(f"{len(self.sites)} sites differ, {self.same} are the same")
        return "\n".join(lines)


def diff(first: Plan, second: Plan) -> PlanDiff:
    """Compares two plans site by site, with their models, machines and budgets, means and hot columns."""
    for plan in (first, second):
        require_plan(plan)
    context = [f"model: {line}" for line in second.model.differences(first.model)]
    context += [f"machine: {line}" for line in second.machine.differences(first.machine)]
    before, after = encode(first.budget), encode(second.budget)
    context += [
        f"budget: {name} {before.get(name)} -> {after.get(name)}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]
    context += [
        f"means that are taken off: those of {path} differ"
        for path in dict.fromkeys([*first.centres, *second.centres])
        if first.centres.get(path) != second.centres.get(path)
    ]
    context += [
        f"hot columns: those of {path} differ"
        for path in dict.fromkeys([*first.hot_columns, *second.hot_columns])
        if set(first.hot_columns.get(path, ())) != set(second.hot_columns.get(path, ()))
    ]
    names = list(dict.fromkeys([*first.decisions, *second.decisions]))
    sites = []
    for name in names:
        before_it, after_it = first.decisions.get(name), second.decisions.get(name)
        if _candidate(before_it) != _candidate(after_it):
            reason = after_it.reason if after_it else ""
            sites.append((name, _candidate(before_it), _candidate(after_it), reason))
    return PlanDiff(context=tuple(context), sites=tuple(sites), same=len(names) - len(sites))


def _candidate(decision: Decision | None) -> str:
    return decision.candidate if decision else "(no such site)"
