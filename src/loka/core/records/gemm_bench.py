"""The record of a GEMM benchmark: every shape raced again after planning, against each library.

The winner of many is timed too well by having been picked, so what was chosen is raced again on
fresh draws and rounds. A `Contest` is such a race, at one site or over the three GEMMs of a layer.
Its *arms* are "hp", "choice" (the plan), each library alone ("torch": its best candidate wherever
one can run), and each library with a dispatcher of its own ("torch or hp": where it is faster).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loka.core.device import Fingerprint
from loka.core.error import Estimate
from loka.core.recipe import Gemm
from loka.core.records.report import HP, site_name
from loka.core.storage.codec import record
from loka.core.storage.record_file import RecordFile
from loka.core.timing import Timing

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


@record(ignore=None)
@dataclass(frozen=True, kw_only=True)
class GemmBench(
    RecordFile, kind="loka-bench-gemm", version=1, way_out="run `loka bench gemm --out FOLDER` again, in a new folder"
):
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
