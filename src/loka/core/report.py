"""The record that measuring hands to planning: error and time of every candidate at every site."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loka.core.device import Fingerprint
from loka.core.error import Estimate
from loka.core.files import read_record, write_record
from loka.core.problem import DTYPES, Problem
from loka.core.recipe import Gemm
from loka.core.signature import ModelSignature
from loka.core.table import format_table

_KIND, _VERSION = "loka-report", 1
_WAY_OUT = "measure again with `loka measure STATS --out REPORT`"

HP = "hp"  # the candidate that is always there: the model's own precision


def site_name(path: str, gemm: Gemm) -> str:
    return f"{path}/{gemm}"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One candidate at one site. `errors` by measure name; times only where a GPU was there.

    `unsupported` gives the reason when the candidate cannot run; nothing else is set then.
    """

    errors: Mapping[str, Estimate] = field(default_factory=dict)
    microseconds: Estimate | None = None
    speedup: Estimate | None = None
    unsupported: str | None = None


@dataclass(frozen=True, kw_only=True)
class SiteReport:
    """All candidates at one site."""

    path: str
    problem: Problem
    measurements: Mapping[str, Measurement]

    @property
    def name(self) -> str:
        return site_name(self.path, self.problem.gemm)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Measurements of a model on one machine. `complete` is False while measuring goes on."""

    model: ModelSignature
    machine: Fingerprint
    stats_digest: str
    settings: Mapping[str, Any]
    sites: Mapping[str, SiteReport]
    skipped: Mapping[str, str] = field(default_factory=dict)
    complete: bool = True

    @property
    def timed(self) -> bool:
        return any(m.microseconds for site in self.sites.values() for m in site.measurements.values())

    def save(self, path: Path | str) -> None:
        write_record(Path(path), kind=_KIND, version=_VERSION, content=_to_json(self))

    @classmethod
    def load(cls, path: Path | str) -> Report:
        """Raises FileRefused for a missing, truncated or edited file."""
        return read_record(Path(path), kind=_KIND, version=_VERSION, way_out=_WAY_OUT, parse=_from_json)

    def __str__(self) -> str:
        rows = []
        for site in self.sites.values():
            problem = site.problem
            for candidate, measured in site.measurements.items():
                sqnr, speedup = measured.errors.get("sqnr_db"), measured.speedup
                rows.append(
                    (
                        site.name,
                        f"{problem.m}x{problem.n}x{problem.k}",
                        candidate,
                        f"{sqnr.value:.1f}" if sqnr else "-",
                        f"{measured.errors['mere'].value:.3f}" if "mere" in measured.errors else "-",
                        f"{measured.microseconds.value:.1f}" if measured.microseconds else "-",
                        f"{speedup.value:.2f}x" if speedup else "-",
                        measured.unsupported or "",
                    )
                )
        header = ("site", "MxNxK", "candidate", "sqnr_db", "mere", "us", "speed-up", "unsupported")
        state = "" if self.complete else " (incomplete: measuring was interrupted)"
        lines = [f"Report of {self.model.name} on {self.machine}{state}", format_table(header, rows)]
        if not self.timed:
            lines.append("Not timed: this machine has no GPU; errors only.")
        lines += [f"not measured: {path}: {reason}" for path, reason in self.skipped.items()]
        return "\n".join(lines)


def number_to_json(value: float) -> float | str:
    """JSON has no infinities; they are written as text."""
    return value if math.isfinite(value) else str(value)


def estimate_to_json(estimate: Estimate | None) -> list[float | str] | None:
    if estimate is None:
        return None
    return [number_to_json(v) for v in (estimate.value, estimate.low, estimate.high)]


def estimate_from_json(content: list[float | str] | None) -> Estimate | None:
    return None if content is None else Estimate(*(float(v) for v in content))


def problem_to_json(problem: Problem) -> dict[str, Any]:
    return {**problem.__dict__, "gemm": problem.gemm.value}


def problem_from_json(content: Mapping[str, Any]) -> Problem:
    problem = Problem(**{**content, "gemm": Gemm(content["gemm"])})
    if problem.dtype not in DTYPES or not all(
        isinstance(side, int) and side > 0 for side in (problem.m, problem.n, problem.k)
    ):
        raise ValueError(f"{problem} is no problem")
    return problem


def _to_json(report: Report) -> dict[str, Any]:
    sites = {}
    for name, site in report.sites.items():
        measurements = {
            candidate: {
                "errors": {key: estimate_to_json(value) for key, value in measured.errors.items()},
                "microseconds": estimate_to_json(measured.microseconds),
                "speedup": estimate_to_json(measured.speedup),
                "unsupported": measured.unsupported,
            }
            for candidate, measured in site.measurements.items()
        }
        sites[name] = {
            "path": site.path,
            "problem": problem_to_json(site.problem),
            "measurements": measurements,
        }
    return {
        "model": report.model.to_json(),
        "machine": report.machine.to_json(),
        "stats_digest": report.stats_digest,
        "settings": dict(report.settings),
        "sites": sites,
        "skipped": dict(report.skipped),
        "complete": report.complete,
    }


def _from_json(content: Mapping[str, Any]) -> Report:
    model = ModelSignature.from_json(content["model"])
    sites = {}
    for name, site in content["sites"].items():
        if site["path"] not in model.layers:
            raise ValueError(f"site {name} is of no layer of the model")
        measurements = {}
        for candidate, entry in site["measurements"].items():
            errors = {key: estimate_from_json(value) for key, value in entry["errors"].items()}
            if not entry["unsupported"] and not {"sqnr_db", "mere"} <= set(errors):
                raise ValueError(f"{name}: {candidate} has neither errors nor a reason")
            measurements[candidate] = Measurement(
                errors={key: value for key, value in errors.items() if value is not None},
                microseconds=estimate_from_json(entry["microseconds"]),
                speedup=estimate_from_json(entry["speedup"]),
                unsupported=entry["unsupported"],
            )
        sites[name] = SiteReport(
            path=site["path"], problem=problem_from_json(site["problem"]), measurements=measurements
        )
    return Report(
        model=model,
        machine=Fingerprint.from_json(content["machine"]),
        stats_digest=content["stats_digest"],
        settings=content["settings"],
        sites=sites,
        skipped=content["skipped"],
        complete=content["complete"],
    )
