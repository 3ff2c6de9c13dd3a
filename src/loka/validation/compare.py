"""A paired comparison as a record: bf16 and a plan, same seed, same rows, same order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loka.core.error import Estimate
from loka.core.storage.codec import conforming, decode, encode
from loka.core.storage.files import read_record, write_record
from loka.train.metrics import Quality
from loka.validation.paired import AcrossPairs, PairedDifference, across_pairs

_KIND, _VERSION = "loka-train", 1


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One training run, judged on held-out rows. `runs` counts FP8 GEMMs by site, as `nn.fp8_runs`."""

    name: str
    quality: Quality
    train_ne: float
    rows_per_second: float
    runs: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two runs from the same initial weights over the same batches."""

    seed: int
    bf16: Arm
    fp8: Arm
    difference: PairedDifference


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All pairs of a model; `context` says what was run on what.

    `control` is bf16 once more with its initial weights nudged by less than bf16 resolves, and
    `noise` its difference from the first pair's bf16: what training makes of a change that
    nobody would call one.
    """

    model: str
    pairs: tuple[Pair, ...]
    control: Arm | None = None
    noise: PairedDifference | None = None
    context: Mapping[str, Any] = field(default_factory=dict)

    @property
    def across(self) -> AcrossPairs | None:
        """Over training seeds; None for a single pair, which has no spread."""
        return across_pairs([pair.difference for pair in self.pairs]) if len(self.pairs) > 1 else None

    def save(self, path: Path | str) -> None:
        write_record(Path(path), kind=_KIND, version=_VERSION, content=_to_json(self))

    @classmethod
    def load(cls, path: Path | str) -> Comparison:
        """Raises FileRefused for a missing, truncated or edited file."""
        way_out = "run the demo again; finished runs are kept"
        return read_record(Path(path), kind=_KIND, version=_VERSION, way_out=way_out, parse=_from_json)


def _arm(arm: Arm) -> dict[str, Any]:
    quality = {name: encode(value) for name, value in asdict(arm.quality).items()}
    return {**asdict(arm), "quality": quality, "train_ne": encode(arm.train_ne)}


def _difference(difference: PairedDifference | AcrossPairs) -> dict[str, Any]:
    names = ("ne_percent", "auc", "calibration")
    return {
        **{name: encode(getattr(difference, name)) for name in names},
        "verdict": difference.verdict,
    }


def _to_json(comparison: Comparison) -> dict[str, Any]:
    pairs = [
        {
            "seed": pair.seed,
            "bf16": _arm(pair.bf16),
            "fp8": _arm(pair.fp8),
            "difference": _difference(pair.difference),
        }
        for pair in comparison.pairs
    ]
    across = comparison.across
    return {
        "model": comparison.model,
        "context": dict(comparison.context),
        "pairs": pairs,
        "control": _arm(comparison.control) if comparison.control else None,
        "noise": _difference(comparison.noise) if comparison.noise else None,
        "across": {**_difference(across), "pairs": across.pairs} if across else None,
    }


def _from_json(content: Mapping[str, Any]) -> Comparison:
    pairs = []
    for entry in content["pairs"]:
        bf16, fp8 = _arm_from_json(entry["bf16"]), _arm_from_json(entry["fp8"])
        difference = _difference_from_json(entry["difference"], rows=bf16.quality.rows)
        pairs.append(Pair(seed=entry["seed"], bf16=bf16, fp8=fp8, difference=difference))
    control = None if content["control"] is None else _arm_from_json(content["control"])
    noise = content["noise"]
    found = Comparison(
        model=content["model"],
        pairs=tuple(pairs),
        control=control,
        noise=_difference_from_json(noise, rows=pairs[0].difference.rows) if noise is not None else None,
        context=content["context"],
    )
    return conforming(found)


def _arm_from_json(content: Mapping[str, Any]) -> Arm:
    judged = {name: decode(float, value) for name, value in content["quality"].items() if name != "rows"}
    quality = Quality(rows=content["quality"]["rows"], **judged)
    return Arm(**{**content, "quality": quality, "train_ne": decode(float, content["train_ne"])})


def _difference_from_json(content: Mapping[str, Any], *, rows: int) -> PairedDifference:
    names = ("ne_percent", "auc", "calibration")
    return PairedDifference(**{name: decode(Estimate, content[name]) for name in names}, rows=rows)
