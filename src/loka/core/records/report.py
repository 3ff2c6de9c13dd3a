"""The record that measuring hands to planning: error and time of every candidate at every site."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from loka.core.device import Fingerprint
from loka.core.error import Estimate
from loka.core.numerics.effect import OLD
from loka.core.problem import Problem
from loka.core.recipe import Gemm, recipe_in
from loka.core.records.coverage import Coverage
from loka.core.records.parts import WHOLE, Part, are_correlations
from loka.core.signature import ModelSignature
from loka.core.storage.codec import decode, named, record, sparse
from loka.core.storage.record_file import RecordFile
from loka.core.table import format_table

HP = "hp"  # the candidate that is always there: the model's own precision
REGION = "region"  # a layer as a part of a compiled region (loka/compiler)
REGION_INT8 = "region_int8"  # likewise, with `output` in INT8
CHAINED = 4  # layers of a chain that `Report.times_in_chains` is of


def site_name(path: str, gemm: Gemm) -> str:
    return f"{path}/{gemm}"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One candidate at one site. Times only where a GPU was there.

    `errors` by measure name: "sqnr_db", "mere"; "row_db", "row_p99_db" where rows are examples; of gradients
    "angle", "shrink", "bias", "variance" (core/numerics/gemm_error.py, core/numerics/direction.py); of
    `output` GEMMs "ne": the predicted KL/H, where the probe knows the effect.

    `kl_by_part` is the same of single tasks and segments of rows, by the part's name (core/records/parts.py).

    `rounds` is how long it stayed in the race of the site: a name that left early was clearly
    slower than one at least as exact. `speedup` is free of clock drift and compares candidates;
    `microseconds` of candidates with different `rounds` were taken at different clocks.
    `unsupported` gives the reason when the candidate cannot run; nothing else is set then.
    """

    errors: Mapping[str, Estimate] = field(default_factory=dict)
    microseconds: Estimate | None = None
    speedup: Estimate | None = None
    rounds: int | None = None
    unsupported: str | None = None
    kl_by_part: Mapping[str, Estimate] = sparse(default_factory=dict)

    def beside(self, hp: Estimate) -> Estimate | None:
        """Microseconds by the clock at which high precision took `hp`'s median; None where nothing was raced."""
        return self.speedup.under(hp.value) if self.speedup is not None else None

    def kl_of(self, part: str) -> Estimate | None:
        """The predicted KL/H of a part; None where it is not known."""
        return self.errors.get("ne") if part == WHOLE else self.kl_by_part.get(part)


@dataclass(frozen=True, kw_only=True)
class SiteReport:
    """All candidates at one site. `unfinished` says what of its timing is missing, and why.

    Where a kernel had several algorithms for the problem and was timed, the fastest one's
    pinned name "kernel:recipe@3" stands in place of "kernel:recipe".

    `region_kl` is the predicted KL/H of recipes that regions run at `output` and no candidate here does, by recipe
    and part (core/records/parts.py).
    """

    path: str
    problem: Problem
    measurements: Mapping[str, Measurement]
    unfinished: str | None = None
    region_kl: Mapping[str, Mapping[str, Estimate]] = sparse(default_factory=dict)

    @property
    def name(self) -> str:
        return site_name(self.path, self.problem.gemm)

    def measured(self, candidate: str) -> Measurement | None:
        """Of a candidate, or of one whose errors stand for its own (`stand_in`). KL/H is of its own recipe, or not
        known: power-of-two scales cost up to five times as much of it, most at layers of one output."""
        found = self.stand_in(candidate)
        if found is None or found.unsupported or candidate in self.measurements:
            return found
        kl = self.kl_of_recipe(recipe_in(candidate))
        errors = {name: error for name, error in found.errors.items() if name != "ne"}
        errors |= {"ne": kl[WHOLE]} if WHOLE in kl else {}
        return replace(found, errors=errors, kl_by_part={part: each for part, each in kl.items() if part != WHOLE})

    def stand_in(self, candidate: str) -> Measurement | None:
        """Of a candidate, or of one whose SQNR and MERE stand for its own: alike without power-of-two scales, worse
        with fast accumulation."""
        kernel, _, recipe = candidate.replace("_pow2", "").partition(":")
        names = (candidate, f"{kernel}:{recipe}", f"{kernel}_fast:{recipe}")
        return next((self.measurements[name] for name in names if name in self.measurements), None)

    def kl_of_recipe(self, recipe: str) -> Mapping[str, Estimate]:
        """The predicted KL/H of a recipe at this site, by part, whichever kernel runs it."""
        for name, found in self.measurements.items():
            if recipe_in(name) == recipe and not found.unsupported:
                whole = {WHOLE: found.errors["ne"]} if "ne" in found.errors else {}
                return {**whole, **found.kl_by_part}
        return self.region_kl.get(recipe, {})


@record(ignore=None)  # what earlier versions timed of several layers as one
@dataclass(frozen=True, kw_only=True)
class Report(RecordFile, kind="loka-report", version=2, way_out="measure again with `loka measure STATS --out REPORT`"):
    """Measurements of a model on one machine.

    Attributes:
        skipped: sites and layers without measurements, and why there are none to make.
        quantize_once_savings: what one pass for both copies of a tensor saves over two, in microseconds: by
            layer, tensor ("input", "weight", "grad_output") and casts "e4m3_row+e4m3_tensor" of
            the row-major copy and of the transposed one. Only of timed layers.
        coverage: what share of a step's matmul FLOPs are sites, as the statistics have it.
        region_times: by layer, the time of "hp", "region" and "region_int8": all its GEMMs and the code
            around them, compiled (measurement/times/region_times.py). Only of timed layers.
        times_in_chains: the same of a layer among others in a region, of those that feed each other.
        reads: by layer, those that feed it, as the statistics have it.
        final_rate: as the statistics have it: the last learning rate as a share of its peak.
        no_effect: by layer, why its effect on KL/H is not known, or is old.
        centres: by layer, what centred recipes take off its input, a number a column.
        hot_columns: by layer and hot recipe, its columns.
        parts: tasks and segments of rows that have a KL/H of their own, as the statistics have them.
        not_clicks: as the statistics have it: why KL/H may mean nothing here; "" where nothing speaks for it.
        alike: as the statistics have it: layers that change the logit alike, and their correlations.
        notes: what was not measured in full, and why.
        complete: everything was measured in full; measuring again goes on with what is missing.
    """

    model: ModelSignature
    machine: Fingerprint
    stats_digest: str
    settings: Mapping[str, Any]
    sites: Mapping[str, SiteReport]
    skipped: Mapping[str, str] = field(default_factory=dict)
    quantize_once_savings: Mapping[str, Mapping[str, Mapping[str, Estimate]]] = named("sharing", default_factory=dict)
    region_times: Mapping[str, Mapping[str, Measurement]] = sparse(default_factory=dict)
    times_in_chains: Mapping[str, Mapping[str, Measurement]] = sparse(default_factory=dict)
    reads: Mapping[str, tuple[str, ...]] = sparse(default_factory=dict)
    coverage: Coverage | None = sparse(None)
    final_rate: float | None = sparse(None)
    no_effect: Mapping[str, str] = sparse(default_factory=dict)
    centres: Mapping[str, tuple[float, ...]] = sparse(default_factory=dict)
    hot_columns: Mapping[str, Mapping[str, tuple[int, ...]]] = sparse(default_factory=dict)
    parts: Mapping[str, Part] = sparse(default_factory=dict)
    not_clicks: str = sparse("")
    alike: Mapping[str, Mapping[str, float]] = sparse(default_factory=dict)
    notes: tuple[str, ...] = ()
    complete: bool = True

    @property
    def timed(self) -> bool:
        return any(m.microseconds for site in self.sites.values() for m in site.measurements.values())

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Report:
        """What earlier versions timed of several layers as one (`chain_times`, `turned_times`) is dropped."""
        report = decode(cls, content)
        for name, site in report.sites.items():
            if site.path not in report.model.layers:
                raise ValueError(f"site {name} is of no layer of the model")
            if name != site.name:
                raise ValueError(f"site {name} is {site.name}")
            if HP not in site.measurements or site.measurements[HP].unsupported:
                raise ValueError(f"{name}: {HP} was not measured")
            for candidate, measured in site.measurements.items():
                if not measured.unsupported and not {"sqnr_db", "mere"} <= measured.errors.keys():
                    raise ValueError(f"{name}: {candidate} has neither errors nor a reason")
            _require_times(name, site.measurements)
        for times in (report.region_times, report.times_in_chains):
            for path, arms in times.items():
                _require_times(f"{path} in a region", arms)
        if not are_correlations(report.alike):
            raise ValueError("alike has a correlation that cannot be")
        return report

    def __str__(self) -> str:
        found = {name for s in self.sites.values() for m in s.measurements.values() for name in m.errors}
        shown = {title: column for title, column in _ERRORS.items() if title in _ALWAYS or column[0] in found}
        header = ("site", "MxNxK", "candidate", *shown, "us", "speed-up", "unsupported")
        rows = [row for site in self.sites.values() for row in _rows(site, list(shown.values()))]
        state = "" if self.complete else " (incomplete: measure again to go on)"
        lines = [f"Report of {self.model.name} on {self.machine}{state}", format_table(header, rows)]
        if not self.timed and self.machine.target == "cpu":
            lines.append("Not timed: this machine has no GPU; errors only.")
        for path, tensors in self.quantize_once_savings.items():
            best = [_most_saved(name, pairs) for name, pairs in tensors.items() if pairs]
            lines += [f"one pass for both copies saves at most, at {path}: {', '.join(best)}"] if best else []
        for among, timed in (("", self.region_times), (" among others", self.times_in_chains)):
            for path, times in timed.items():
                lines += [line for arm in (REGION, REGION_INT8) if (line := _region_line(path, times, arm, among))]
        lines += [f"not measured: {path}: {reason}" for path, reason in self.skipped.items()]
        lines += [str(part) for part in self.parts.values()]
        lines += [f"note: {line}" for line in self.unknown_effects()]
        lines += [f"note: {self.not_clicks}"] if self.not_clicks else []
        lines += [f"note: {note if len(note) <= 400 else note[:400] + ' ...'}" for note in self.notes]
        return "\n".join(lines)

    def unknown_effects(self) -> list[str]:
        """A line for each reason why effects on KL/H are not known, or known from earlier steps only."""
        layers: dict[str, list[str]] = {}
        for path, reason in self.no_effect.items():
            layers.setdefault(reason, []).append(path)
        return [_unknown(", ".join(paths), why) for why, paths in layers.items()]


def _require_times(where: str, measurements: Mapping[str, Measurement]) -> None:
    """Plans divide by them, and compare their ends. An end may be 0 or infinite, as of few rounds."""
    for name, measured in measurements.items():
        for what, time in (("microseconds", measured.microseconds), ("speed-up", measured.speedup)):
            if time is not None and not (0 < time.value < math.inf and 0 <= time.low <= time.value <= time.high):
                raise ValueError(f"{where}: {name} has {what} that cannot be, {time}")


def _region_line(path: str, times: Mapping[str, Measurement], arm: str, among: str) -> str | None:
    region, hp = times.get(arm), times.get(HP)
    if region is None or hp is None or not region.microseconds or not hp.microseconds:
        return None
    where = f"{path}, its output in INT8," if arm == REGION_INT8 else path
    return (
        f"in a compiled region{among} {where} takes {region.microseconds.value:.1f} us with the code around it, "
        f"{hp.microseconds.value:.1f} us in hp ({region.speedup.value if region.speedup else 1.0:.2f}x)"
    )


def _unknown(paths: str, why: str) -> str:
    if why.startswith(OLD):
        why = why.removeprefix(OLD)
        return f"effect on KL/H known from earlier steps, not renewed by the latest: {paths}: {why}"
    return f"effect on KL/H not known: {paths}: {why}"


# Columns of the table: the measure, and how it is written.
_ERRORS: dict[str, tuple[str, Callable[[float], str]]] = {
    "sqnr_db": ("sqnr_db", "{:.1f}".format),
    "row_db": ("row_db", "{:.1f}".format),
    "mere": ("mere", "{:.3f}".format),
    "shrink_%": ("shrink", lambda share: f"{100 * share:+.2f}"),
    "bias_%": ("bias", lambda share: f"{100 * share:+.3f}"),
    "KL/H": ("ne", "{:.1e}".format),
}
_ALWAYS = ("sqnr_db", "mere")


def _rows(site: SiteReport, shown: Sequence[tuple[str, Callable[[float], str]]]) -> list[tuple[str, ...]]:
    problem = site.problem
    place = (site.name, f"{problem.m}x{problem.n}x{problem.k}")

    def rank(item: tuple[str, Measurement]) -> tuple[bool, float]:
        time = item[1].microseconds
        return item[0] != HP, time.value if time else 0.0

    rows: list[tuple[str, ...]] = []
    for candidate, measured in sorted(site.measurements.items(), key=rank):
        if not measured.unsupported:
            errors, speedup = measured.errors, measured.speedup
            numbers = (
                *(written(errors[name].value) if name in errors else "-" for name, written in shown),
                f"{measured.microseconds.value:.1f}" if measured.microseconds else "-",
                f"{speedup.value:.2f}x" if speedup else "-",
            )
            rows.append((*place, candidate, *numbers, ""))
    reasons = Counter(m.unsupported for m in site.measurements.values() if m.unsupported)
    if reasons:
        others = "; ".join(f"{reason} (x{n})" if n > 1 else str(reason) for reason, n in reasons.items())
        rows.append((*place, f"({reasons.total()} more)", *[""] * (len(shown) + 2), others))
    return rows


def _most_saved(tensor: str, pairs: Mapping[str, Estimate]) -> str:
    best = max(pairs, key=lambda pair: pairs[pair].value)
    return f"{tensor} {best} {pairs[best].value:.1f} us"
