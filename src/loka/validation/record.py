"""The record of a validation: every arm's pairs, verdicts and curves, as a frozen value and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loka.core.error import Estimate, estimate_mean
from loka.core.storage.codec import conforming, decode, encode
from loka.core.storage.files import read_record, write_record
from loka.validation.annealed import Annealed
from loka.validation.paired import PairedDifference, Verdict
from loka.validation.runs import Run
from loka.validation.verdicts import Judgement, joined

_KIND, _VERSION = "loka-validation", 1


@dataclass(frozen=True, kw_only=True)
class ArmVerdict:
    """One arm against the control. `pairs` by seed: each with its per-example interval.

    `average` is None, and `broke` says why, where a run of it ended in NaN or no pair is done. `readings`
    judge all rows in other ways, for reading: no verdict goes by them. `key` is a digest of what the arm
    does.
    """

    name: str
    pairs: Mapping[int, PairedDifference]
    average: Judgement | None
    segments: tuple[Judgement, ...] = ()
    broke: str = ""
    readings: tuple[Judgement, ...] = ()
    key: str = ""

    @property
    def verdict(self) -> Verdict:
        """Of the average and all segments together; an arm that ends in NaN fails."""
        if self.broke:
            return "fail"
        return joined(self.average, self.segments) if self.average else "undecided"


@dataclass(frozen=True)
class BandPoint:
    """After `rows` training rows, the control's NE and the arm's relative difference in percent, of the
    rows since the point before, with the interval over pairs."""

    rows: int
    control: float
    arm: float
    difference: Estimate


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Paired runs of a control and one or more arms; `context` says what was run on what.

    `planned` is the number of pairs of a validation that may stop after any pair (validation/sequential.py),
    None where one look was meant; `annealed` says whether the control was; `world` is a digest of model, rows
    and configuration without the seeds.
    """

    model: str
    control: str
    limit: float
    segment_limit: float
    seeds: tuple[int, ...]
    arms: tuple[ArmVerdict, ...]
    runs: tuple[Run, ...]
    context: Mapping[str, Any] = field(default_factory=dict)
    planned: int | None = None
    annealed: Annealed | None = None
    world: str = ""

    @property
    def verdict(self) -> Verdict:
        """fail where an arm fails, pass where all pass."""
        verdicts = {arm.verdict for arm in self.arms}
        if "fail" in verdicts:
            return "fail"
        return "pass" if verdicts == {"pass"} else "undecided"

    def band(self, arm: str) -> list[BandPoint]:
        """The training curves of `arm` and the control, and their difference over the finished pairs."""
        runs = {(run.arm, run.seed): run for run in self.runs if not run.broke}
        pairs = [
            (runs[self.control, seed].curve, runs[arm, seed].curve)
            for seed in self.seeds
            if (self.control, seed) in runs and (arm, seed) in runs
        ]
        by_rows = [
            ({p.rows: p.recent_ne for p in control}, {p.rows: p.recent_ne for p in other})
            for control, other in pairs
        ]
        if not by_rows:
            return []
        common = set.intersection(*(set(curve) for pair in by_rows for curve in pair))
        points = []
        for rows in sorted(common):
            values = [(control[rows], other[rows]) for control, other in by_rows]
            if not all(math.isfinite(a) and a > 0 and math.isfinite(b) for a, b in values):
                continue
            means = [math.fsum(column) / len(values) for column in zip(*values, strict=True)]
            gap = estimate_mean([100 * (b / a - 1) for a, b in values])
            points.append(BandPoint(rows, means[0], means[1], gap))
        return points

    def save(self, path: Path | str) -> None:
        write_record(Path(path), kind=_KIND, version=_VERSION, content=self.to_json())

    @classmethod
    def load(cls, path: Path | str) -> Validation:
        """Raises FileRefused for a missing, truncated or edited file."""
        way_out = "`loka validate` writes it again; finished runs are kept"
        return read_record(Path(path), kind=_KIND, version=_VERSION, way_out=way_out, parse=cls.from_json)

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "control": self.control,
            "limit": self.limit,
            "segment_limit": self.segment_limit,
            "seeds": list(self.seeds),
            "verdict": self.verdict,
            "arms": [_arm_to_json(arm) for arm in self.arms],
            "runs": [run.to_json() for run in self.runs],
            "context": dict(self.context),
            "planned": self.planned,
            "annealed": self.annealed.to_json() if self.annealed else None,
            "world": self.world,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Validation:
        """Raises LookupError, TypeError or ValueError for what `to_json` did not make."""
        names = ("model", "control", "limit", "segment_limit", "context")
        annealed = content.get("annealed")
        found = cls(
            **{name: content[name] for name in names},
            seeds=tuple(content["seeds"]),
            arms=tuple(_arm_from_json(entry) for entry in content["arms"]),
            runs=tuple(Run.from_json(entry) for entry in content["runs"]),
            planned=content.get("planned"),
            annealed=None if annealed is None else Annealed.from_json(annealed),
            world=content.get("world", ""),
        )
        return conforming(found)


_PAIR = ("ne_percent", "auc", "calibration")


def _arm_to_json(arm: ArmVerdict) -> dict[str, Any]:
    return {
        "name": arm.name,
        "verdict": arm.verdict,
        "pairs": [
            {
                "seed": seed,
                "rows": pair.rows,
                **{name: encode(getattr(pair, name)) for name in _PAIR},
                **({"kl_percent": encode(pair.kl_percent)} if pair.kl_percent else {}),
            }
            for seed, pair in arm.pairs.items()
        ],
        "average": arm.average.to_json() if arm.average else None,
        "segments": [segment.to_json() for segment in arm.segments],
        "broke": arm.broke,
        "readings": [reading.to_json() for reading in arm.readings],
        "key": arm.key,
    }


def _arm_from_json(content: Mapping[str, Any]) -> ArmVerdict:
    pairs = {}
    for entry in content["pairs"]:
        estimates = {name: decode(Estimate, entry[name]) for name in _PAIR}
        kl = decode(Estimate, entry["kl_percent"]) if "kl_percent" in entry else None
        pairs[entry["seed"]] = PairedDifference(**estimates, rows=entry["rows"], kl_percent=kl)
    average = content["average"]
    return ArmVerdict(
        name=content["name"],
        pairs=pairs,
        average=None if average is None else Judgement.from_json(average),
        segments=tuple(Judgement.from_json(entry) for entry in content["segments"]),
        broke=content["broke"],
        readings=tuple(Judgement.from_json(entry) for entry in content.get("readings", ())),
        key=content.get("key", ""),
    )
