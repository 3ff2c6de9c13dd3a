"""The record that planning hands to convert: one decision for every site, with its reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from loka.core.budget import Budget, known_effect, total_effect
from loka.core.device import Fingerprint
from loka.core.error import Estimate
from loka.core.exceptions import FileRefused, require_kind
from loka.core.problem import Problem
from loka.core.recipe import RECIPES, Gemm, recipe_in
from loka.core.records.coverage import Coverage
from loka.core.records.parts import WHOLE
from loka.core.records.report import HP, site_name
from loka.core.signature import ModelSignature
from loka.core.storage.codec import decode, record, sparse
from loka.core.storage.record_file import RecordFile
from loka.core.table import format_table

IN_REGION = "in a compiled region"
"""How the reason of a decision for one begins."""
_TOGETHER = {"chains": "chains", "crosses": "stacks of cross layers", "turned": "turned layers"}


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What runs at one site, and why.

    `candidate` is "hp" or "kernel:recipe". `rejected` says why each other candidate lost;
    `runner_up` is the best of those. Times and speed-up are None where none were measured;
    they are of the GEMM by itself, with both its operands quantized for it alone; in a region the time is
    its share of what the layer takes there, and the speed-up is that of the layer with the code around it.
    `saved_us` is what it saves to share those passes with an earlier GEMM of the layer. `kl` is the predicted
    KL/H, of an FP8 `output` GEMM where the probe estimated it; `kl_by_part` that of tasks and segments.
    """

    path: str
    problem: Problem
    candidate: str
    reason: str
    sqnr_db: Estimate | None = None
    mere: Estimate | None = None
    kl: Estimate | None = sparse(None, name="ne")
    microseconds: Estimate | None = None
    hp_microseconds: Estimate | None = None
    speedup: Estimate | None = None
    saved_us: float = 0.0
    runner_up: str | None = None
    rejected: Mapping[str, str] = field(default_factory=dict)
    kl_by_part: Mapping[str, Estimate] = sparse(default_factory=dict)

    def kl_of(self, part: str) -> Estimate | None:
        return self.kl if part == WHOLE else self.kl_by_part.get(part)

    @property
    def site(self) -> str:
        return site_name(self.path, self.problem.gemm)


@record(ignore=None)  # what earlier versions noted of layers that are not run as one
@dataclass(frozen=True, kw_only=True)
class Plan(
    RecordFile,
    kind="loka-plan",
    version=2,
    way_out="plan again with `loka plan REPORT --out PLAN`; override single sites with --force SITE=CANDIDATE",
):
    """Decisions for all sites of a model, measured on `machine`.

    `centres`: by layer whose `output` runs by a centred recipe, what it takes off its input, by column.
    `hot_columns`: by layer whose `output` runs by a hot recipe, its columns.
    `limits`: what the budget allows each task and segment in KL/H, by the part's name; empty where it has one
    limit for the whole model, `budget.ne`, or none.
    `force`: pairs of a pattern of sites and the candidate that was forced there, the first that fits; `target`: what
    it was planned for. Both are as `plan` was given them, to plan in the same way again.
    """

    model: ModelSignature
    machine: Fingerprint
    budget: Budget
    timed: bool
    decisions: Mapping[str, Decision]
    coverage: Coverage | None = sparse(None)
    centres: Mapping[str, tuple[float, ...]] = sparse(default_factory=dict)
    hot_columns: Mapping[str, tuple[int, ...]] = sparse(default_factory=dict)
    limits: Mapping[str, float] = sparse(default_factory=dict)
    force: tuple[tuple[str, str], ...] = sparse(())
    target: Literal["python", "package"] = sparse("python")
    notes: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Plan:
        """Raises FileRefused also for a plan of an earlier version by which layers run together."""
        _refuse_together(content)
        plan = decode(cls, content)
        strange = [name for name, decision in plan.decisions.items() if decision.path not in plan.model.layers]
        if strange:
            raise ValueError(f"decision {strange[0]} names no layer of the model")
        return plan

    def candidates(self, path: str) -> dict[str, str]:
        """GEMM name -> candidate at one module; "hp" where the plan says nothing."""
        found = {d.problem.gemm.value: d.candidate for d in self.decisions.values() if d.path == path}
        return {gemm: found.get(gemm, HP) for gemm in ("output", "grad_input", "grad_weight")}

    @property
    def output_recipes(self) -> dict[str, str]:
        """By layer, the recipe of its `output` GEMM where that is FP8."""
        return {
            d.path: recipe_in(d.candidate)
            for d in self.decisions.values()
            if d.problem.gemm is Gemm.OUTPUT and d.candidate != HP
        }

    @property
    def kl(self) -> Estimate | None:
        """The predicted KL/H of the model: the sum over what runs in FP8. None where nothing
        of it was estimated; `kl_unknown` names what the sum lacks."""
        return self.kl_of(WHOLE)

    def kl_of(self, part: str) -> Estimate | None:
        """The same of a task, a segment or a task in a segment, by its name (core/records/parts.py)."""
        effects = (known_effect(d.kl_of(part)) for d in self.decisions.values())
        known = [effect for effect in effects if effect is not None]
        return total_effect(known) if known else None

    @property
    def kl_limit(self) -> float | None:
        """What the whole model may spend; None without such a limit."""
        return None if self.limits and WHOLE not in self.limits else self.budget.whole

    @property
    def kl_unknown(self) -> tuple[str, ...]:
        """FP8 `output` sites without an estimate of their KL/H, or with one that says nothing, such
        as nan or an interval without an upper end."""
        return self.kl_unknown_of(WHOLE)

    def kl_unknown_of(self, part: str) -> tuple[str, ...]:
        """The same of a task, a segment or a task in a segment."""
        return tuple(
            d.site
            for d in self.decisions.values()
            if d.problem.gemm is Gemm.OUTPUT and d.candidate != HP and known_effect(d.kl_of(part)) is None
        )

    def __str__(self) -> str:
        header = ["site", "MxNxK", "runs", "sqnr_db", "us", "hp us", "speed-up", "why"]
        rows = [list(_row(decision)) for decision in self.decisions.values()]
        if any(decision.kl for decision in self.decisions.values()):
            header.insert(4, "KL/H")
            for row, decision in zip(rows, self.decisions.values(), strict=True):
                row.insert(4, _show(decision.kl, "{:.1e}"))
        lines = [f"Plan for {self.model.name}, measured on {self.machine}", format_table(header, rows)]
        lines.append(self.summary())
        lines += self.coverage_lines()
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def summary(self) -> str:
        """One line: how many sites in FP8, by candidate, and the GEMM time if measured."""
        counts = Counter(decision.candidate for decision in self.decisions.values())
        low = len(self.decisions) - counts[HP]
        parts = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        text = f"{low} of {len(self.decisions)} sites in {self.eight_bits}: {parts}"
        if not self.timed:
            return f"{text}. Not timed: chosen on error alone, no speed is claimed.{self._spent()}"
        times = self.gemm_times
        if not times:
            return f"{text}. None of what it runs was timed: no speed is claimed.{self._spent()}"
        before, after = map(sum, zip(*times, strict=True))
        untimed = len(self.decisions) - len(times)
        left = f" {untimed} sites were not timed." if untimed else ""
        joined = any(d.reason.startswith(IN_REGION) for d in self.decisions.values())
        around = ", regions in cells of single layers: loka.confirm times whole steps" if joined else ""
        return (
            f"{text}. Linear-layer GEMM time, quantization included: {before:.0f} us in hp, "
            f"{after:.0f} us by plan ({before / max(after, 1e-9):.2f}x){around}.{left}{self._spent()}"
        )

    @property
    def gemm_times(self) -> tuple[tuple[float, float], ...]:
        """Microseconds of each GEMM that was timed: in hp, and by the plan, less what it saves by sharing."""
        times = ((d.hp_microseconds, d.microseconds, d.saved_us) for d in self.decisions.values())
        return tuple((hp.value, us.value - saved) for hp, us, saved in times if hp and us)

    @property
    def eight_bits(self) -> str:
        """What runs by it, in words."""
        return "FP8 or INT8" if any(_in_integers(d.candidate) for d in self.decisions.values()) else "FP8"

    def coverage_lines(self) -> list[str]:
        """What share of the step's matmul FLOPs runs in eight bits by this plan, and what the rest is."""
        if self.coverage is None:
            return []
        runs = {(d.path, d.problem.gemm.value): d.candidate != HP for d in self.decisions.values()}
        return self.coverage.planned_lines(runs, self.eight_bits)

    def _spent(self) -> str:
        if self.limits:
            spent = ((name, self.kl_of(name), limit) for name, limit in self.limits.items())
            parts = (
                f"{name or 'all rows'} {kl or 'nothing'} of {limit:g}{self.lacks(name)}" for name, kl, limit in spent
            )
            return f" Predicted KL/H by part, and its budget: {'; '.join(parts)}."
        missing = len(self.kl_unknown)
        asked = self.budget.ne is not None or any(d.kl is not None for d in self.decisions.values())
        if self.kl is None and not (missing and asked):
            return ""
        limit = f"; the budget is {self.kl_limit:g}" if self.kl_limit is not None else ""
        if self.kl is None:
            return f" Predicted KL/H: unknown, {missing} without an estimate{limit}."
        return f" Predicted KL/H: {self.kl}{self.lacks(WHOLE)}{limit}."

    def lacks(self, part: str) -> str:
        """What `kl_of` lacks, in words; "" for a whole sum."""
        missing = len(self.kl_unknown_of(part))
        return f", and {missing} without an estimate" if missing else ""


def _show(estimate: Estimate | None, pattern: str) -> str:
    return pattern.format(estimate.value) if estimate else "-"


def require_plan(given: object) -> None:
    """Raises LokaError for what is no plan, such as the path of one."""
    require_kind(given, Plan, "the plan", way_out="loka.plan(report), or loka.Plan.load(path)")


def _in_integers(candidate: str) -> bool:
    recipe = RECIPES.get(recipe_in(candidate))
    return recipe is not None and recipe.output is not None and recipe.output[0].format.uniform


def _row(decision: Decision) -> tuple[str, ...]:
    problem = decision.problem
    return (
        decision.site,
        f"{problem.m}x{problem.n}x{problem.k}",
        decision.candidate,
        _show(decision.sqnr_db, "{:.1f}"),
        _show(decision.microseconds, "{:.1f}"),
        _show(decision.hp_microseconds, "{:.1f}"),
        _show(decision.speedup, "{:.2f}x"),
        decision.reason,
    )


def _refuse_together(content: Mapping[str, Any]) -> None:
    together = {kind: content[kind] for kind in _TOGETHER if content.get(kind)}
    if together:
        raise FileRefused(
            "this plan was planned by an earlier version, which ran several layers as one",
            why=[f"{_TOGETHER[kind]}: {', '.join(map(str, found))}" for kind, found in together.items()],
            way_out="plan again from its report: `loka plan REPORT --out PLAN`",
        )
