"""The record of a validation: every arm's pairs, verdicts and curves, as a frozen value and as JSON."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loka.core.error import Estimate, estimate_mean
from loka.core.storage.codec import inline, record, sparse
from loka.core.storage.record_file import RecordFile
from loka.validation.annealed import Annealed
from loka.validation.arms import title_of
from loka.validation.paired import PairedDifference, Verdict
from loka.validation.runs import Run
from loka.validation.variance import Expected
from loka.validation.verdicts import RowsVerdict, joined


@dataclass(frozen=True, kw_only=True)
class SeedPair:
    """The difference between the two runs of a training seed, with intervals over rows."""

    seed: int
    difference: PairedDifference = inline()


@record(derived=("verdict",))
@dataclass(frozen=True, kw_only=True)
class ArmVerdict:
    """One arm against the control, pair by pair.

    `average` is None where no pair is done; `broke` says where a run ended in NaN. `readings` compare all
    rows in other ways: no verdict goes by them. `key` is a digest of what the arm does. Of several tasks an
    arm has one of these for each, named by `task`. `unjudged` are segments that its plan limits, and no division has.
    """

    name: str
    pairs: tuple[SeedPair, ...]
    average: RowsVerdict | None
    segments: tuple[RowsVerdict, ...] = ()
    broke: str = ""
    readings: tuple[RowsVerdict, ...] = ()
    key: str = ""
    task: str = sparse("")
    unjudged: tuple[str, ...] = sparse(())

    @property
    def unjudged_line(self) -> str:
        """What to do about them, where there are any."""
        features = dict.fromkeys(re.findall(r"^(?:dense|sparse):\d+", "\n".join(self.unjudged), re.MULTILINE))
        options = " ".join(f"--segment {each}[:N]" for each in features)
        return (
            f"{self.title}: NOT judged, though the plan limits them: {', '.join(self.unjudged)}; give "
            f"{options or 'divisions that have them'}, as the probe was given"
        )

    @property
    def title(self) -> str:
        """The arm, and its task where there are several."""
        return title_of(self.name, self.task)

    @property
    def differences(self) -> dict[int, PairedDifference]:
        """By seed."""
        return {pair.seed: pair.difference for pair in self.pairs}

    @property
    def verdict(self) -> Verdict:
        """Of the average and all segments together; an arm that ends in NaN fails."""
        if self.broke:
            return "fail"
        return joined(each.verdict for each in (self.average, *self.segments)) if self.average else "undecided"


@dataclass(frozen=True)
class BandPoint:
    """After `rows` training rows, the control's NE and the arm's relative difference in percent, of the
    rows since the point before, with the interval over pairs."""

    rows: int
    control: float
    arm: float
    difference: Estimate


@record(derived=("verdict",))
@dataclass(frozen=True, kw_only=True)
class Validation(
    RecordFile, kind="loka-validation", version=1, way_out="`loka validate` writes it again; finished runs are kept"
):
    """Paired runs of a control and one or more arms; `context` says what was run on what.

    `planned` is the number of pairs of a validation that may stop after any pair (validation/sequential.py),
    None where one look was meant; `annealed` says whether the control was; `world` is a digest of model, rows
    and configuration without the seeds, `setting` one without the model too. `expected` is the spread between
    pairs that a bank gave before the first ones, by task: it is settled with them.
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
    setting: str = sparse("")
    expected: Mapping[str, Expected] = sparse(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        return joined(arm.verdict for arm in self.arms)

    def band(self, arm: str, task: str = "") -> list[BandPoint]:
        """The training curves of `arm` and the control, and their difference over the finished pairs."""
        runs = {(run.arm, run.seed): run for run in self.runs if not run.broke and run.task == task}
        pairs = [
            (runs[self.control, seed].curve, runs[arm, seed].curve)
            for seed in self.seeds
            if (self.control, seed) in runs and (arm, seed) in runs
        ]
        by_rows = [
            ({p.rows: p.recent_ne for p in control}, {p.rows: p.recent_ne for p in other}) for control, other in pairs
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
