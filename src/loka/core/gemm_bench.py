"""The record of a GEMM benchmark: every shape raced again after planning, against each library.

The winner of many is timed too well by having been picked, so what was chosen is raced again on
fresh draws and rounds. A `Contest` is such a race, at one site or over the three GEMMs of a layer.
Its *arms* are "hp", "choice" (the plan), each library alone ("torch": its best candidate wherever
one can run), and each library with a dispatcher of its own ("torch or hp": where it is faster).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loka.core.device import Fingerprint
from loka.core.error import Estimate
from loka.core.files import read_record, write_record
from loka.core.recipe import Gemm
from loka.core.report import HP, estimate_from_json, estimate_to_json, required_estimate, site_name
from loka.core.timing import Timing

_KIND, _VERSION = "loka-bench-gemm", 1
_WAY_OUT = "run `loka bench gemm --out FOLDER` again, in a new folder"

CHOICE = "choice"
_BETWEEN = " | "


def or_hp(library: str) -> str:
    """The arm of a library that leaves sites where it is slower in high precision."""
    return f"{library} or hp"


@dataclass(frozen=True, kw_only=True)
class Use:
    """A place in a model that has a layer's shape, `count` times."""

    model: str
    site: str
    count: int


@dataclass(frozen=True, kw_only=True)
class SuiteLayer:
    """One distinct shape: input [rows, in_features], weight [out_features, in_features]."""

    rows: int
    in_features: int
    out_features: int
    uses: tuple[Use, ...]

    @property
    def gflop(self) -> float:
        """Of one GEMM; each of the three has as many."""
        return 2e-9 * self.rows * self.in_features * self.out_features

    @property
    def count(self) -> int:
        return sum(use.count for use in self.uses)

    def __str__(self) -> str:
        return f"{self.rows}x{self.in_features}x{self.out_features}"


@dataclass(frozen=True, kw_only=True)
class Contest:
    """A race of arms, all kept to its end.

    Attributes:
        arms: arm -> what it runs: "hp" or a candidate, for a layer three of them (`joined`).
        timings: by what ran; arms that run the same share one. Speed-ups are over "hp".
        versus: arm -> its time over the choice's, from paired rounds: above 1 the choice is
            faster. Exactly 1 where both run the same.
        failures: what ran -> why it has no timing.
        sqnr_db, reason: the choice's error and the plan's reason; of sites only.
    """

    arms: Mapping[str, str]
    timings: Mapping[str, Timing] = field(default_factory=dict)
    versus: Mapping[str, Estimate] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    sqnr_db: Estimate | None = None
    reason: str = ""

    def timing(self, arm: str) -> Timing | None:
        return self.timings.get(self.arms.get(arm, ""))


def joined(candidates: Mapping[str, str]) -> str:
    """One text for the candidates of a layer's GEMMs: "hp" where all are."""
    names = [candidates[gemm.value] for gemm in Gemm]
    return HP if set(names) == {HP} else _BETWEEN.join(names)


def parted(text: str) -> tuple[str, ...]:
    """The candidates in a text of `joined`; one for a site."""
    return tuple(text.split(_BETWEEN))


@dataclass(frozen=True, kw_only=True)
class GemmBench:
    """A benchmark on one machine.

    Attributes:
        settings: everything that decides what was measured and how finely.
        libraries: why each library that LoKA knows has no candidate here, or "" if it has.
        layers: distinct shapes by path.
        not_covered: rows of the suite that are no linear layers, and what they are.
        too_large: linear rows that this GPU has no memory for, and what they need.
        contests: by layer path, and by site "path/gemm".
        plan_digest: of the decisions that were confirmed.
        complete: every layer was confirmed.
    """

    machine: Fingerprint
    command: str
    settings: Mapping[str, Any]
    libraries: Mapping[str, str]
    layers: Mapping[str, SuiteLayer]
    not_covered: Mapping[str, str]
    too_large: Mapping[str, str]
    contests: Mapping[str, Contest]
    plan_digest: str
    complete: bool

    @property
    def tie(self) -> float:
        return float(self.settings["tie"])

    @property
    def active(self) -> tuple[str, ...]:
        return tuple(name for name, missing in self.libraries.items() if not missing)

    def sites(self) -> dict[str, Contest]:
        """The contests of sites, in the order of layers."""
        names = [site_name(path, gemm) for path in self.layers for gemm in Gemm]
        return {name: self.contests[name] for name in names if name in self.contests}

    def whole_layers(self) -> dict[str, Contest]:
        return {path: self.contests[path] for path in self.layers if path in self.contests}

    def save(self, path: Path | str) -> None:
        write_record(Path(path), kind=_KIND, version=_VERSION, content=_to_json(self))

    @classmethod
    def load(cls, path: Path | str) -> GemmBench:
        """Raises FileRefused for a missing, truncated or edited file."""
        return read_record(Path(path), kind=_KIND, version=_VERSION, way_out=_WAY_OUT, parse=_from_json)


def _to_json(bench: GemmBench) -> dict[str, Any]:
    contests = {
        place: {
            "arms": dict(contest.arms),
            "timings": {
                name: {
                    "microseconds": estimate_to_json(timing.microseconds),
                    "speedup": estimate_to_json(timing.speedup),
                    "rounds": timing.rounds,
                }
                for name, timing in contest.timings.items()
            },
            "versus": {arm: estimate_to_json(ratio) for arm, ratio in contest.versus.items()},
            "failures": dict(contest.failures),
            "sqnr_db": estimate_to_json(contest.sqnr_db),
            "reason": contest.reason,
        }
        for place, contest in bench.contests.items()
    }
    return {
        "machine": bench.machine.to_json(),
        "command": bench.command,
        "settings": dict(bench.settings),
        "libraries": dict(bench.libraries),
        "layers": {
            path: {**asdict(layer), "uses": [asdict(use) for use in layer.uses]}
            for path, layer in bench.layers.items()
        },
        "not_covered": dict(bench.not_covered),
        "too_large": dict(bench.too_large),
        "contests": contests,
        "plan_digest": bench.plan_digest,
        "complete": bench.complete,
    }


def _from_json(content: Mapping[str, Any]) -> GemmBench:
    layers = {
        path: SuiteLayer(**{**layer, "uses": tuple(Use(**use) for use in layer["uses"])})
        for path, layer in content["layers"].items()
    }
    contests = {}
    for place, entry in content["contests"].items():
        timings = {
            name: Timing(
                microseconds=required_estimate(timing["microseconds"]),
                speedup=required_estimate(timing["speedup"]),
                rounds=timing["rounds"],
            )
            for name, timing in entry["timings"].items()
        }
        contests[place] = Contest(
            arms=entry["arms"],
            timings=timings,
            versus={arm: required_estimate(ratio) for arm, ratio in entry["versus"].items()},
            failures=entry["failures"],
            sqnr_db=estimate_from_json(entry["sqnr_db"]),
            reason=entry["reason"],
        )
    return GemmBench(
        machine=Fingerprint.from_json(content["machine"]),
        command=content["command"],
        settings=content["settings"],
        libraries=content["libraries"],
        layers=layers,
        not_covered=content["not_covered"],
        too_large=content["too_large"],
        contests=contests,
        plan_digest=content["plan_digest"],
        complete=content["complete"],
    )
