"""A paired comparison as a record: bf16 and a plan, same seed, same rows, same order."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loka.core.storage.codec import record
from loka.core.storage.record_file import RecordFile
from loka.train.metrics import Quality
from loka.validation.paired import AcrossPairs, PairedDifference, Verdict, across_pairs


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One training run and its quality on held-out rows. `runs` counts its FP8 GEMMs (`nn.fp8_runs`)."""

    name: str
    quality: Quality
    train_ne: float
    rows_per_second: float
    runs: Mapping[str, int] = field(default_factory=dict)


@record(derived=("verdict",))
@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two runs from the same initial weights over the same batches."""

    seed: int
    bf16: Arm
    fp8: Arm
    difference: PairedDifference

    @property
    def verdict(self) -> Verdict:
        """Of these two runs alone, over rows: other seeds are another question."""
        return self.difference.verdict


@record(derived=("across",))
@dataclass(frozen=True, kw_only=True)
class Comparison(RecordFile, kind="loka-train", version=1, way_out="run the demo again; finished runs are kept"):
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
        """Over training seeds; None for a single pair, which has no variance."""
        return across_pairs([pair.difference for pair in self.pairs]) if len(self.pairs) > 1 else None
