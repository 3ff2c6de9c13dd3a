"""The card of a frozen model: what it is, what it was calibrated with, and what eight bits cost it."""

from collections.abc import Mapping
from dataclasses import dataclass

from loka.core.device import Fingerprint
from loka.core.storage.codec import sparse
from loka.core.storage.record_file import RecordFile
from loka.core.table import format_table
from loka.serve.rows import Form
from loka.serve.watch.agreement import AnswerError
from loka.serve.watch.monitor import Range


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """`name` is the user's, such as "clicks of 2026-11-21"; `sha256` is of the values of all rows."""

    name: str
    batches: int
    rows: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class SiteCard:
    """One FP8 site, whose weight has `sides` N, K and had this dtype. `scale` of its input: "row" or "group"
    (current), or "static". `even`: the weight has one scale for all rows. `sqnr_db`: error of its `output` on
    the calibration rows against the GEMM in high precision; inf where equal."""

    candidate: str
    sides: tuple[int, ...]
    dtype: str
    scale: str
    even: bool
    sqnr_db: float
    range: Range


@dataclass(frozen=True, kw_only=True)
class Card:
    """What is written beside the weights. `modules`: classes by path. `autocast`: the dtype of autocast in every
    request, or None.

    `in_hp`: for each bucket, the FP8 sites that run in high precision there. `dropped`: keys of weights that are kept
    in FP8 only. `kept`: why other weights of FP8 sites are kept in high precision too. `scratch`: attributes that the
    model's forward writes to, which the replay of a graph would not do. `dense_bytes`: the bytes of the FP8 weights
    with their scales, and of the same weights in bf16.
    """

    model: str
    modules: Mapping[str, str]
    machine: Fingerprint
    loka: str
    calibration: Calibration
    form: Form
    autocast: str | None
    buckets: tuple[int, ...]
    in_hp: tuple[tuple[str, ...], ...]
    sites: Mapping[str, SiteCard]
    unreached: tuple[str, ...]
    answers: tuple[AnswerError, ...]
    dropped: tuple[str, ...]
    kept: tuple[str, ...]
    scratch: tuple[str, ...]
    dense_bytes: tuple[int, ...]

    @property
    def blind(self) -> tuple[str, ...]:
        """The sites whose rows differ so much among themselves that the alarm would miss a shift of 20 times."""
        return tuple(name for name, site in self.sites.items() if site.range.blind)

    def __str__(self) -> str:
        low, high = self.dense_bytes
        rows = [
            (name, site.candidate, site.scale, f"{site.sqnr_db:.1f}", f"{2.0**site.range.limit:.1f}x")
            for name, site in self.sites.items()
        ]
        lines = [
            f"{self.model}, frozen on {self.machine}, loka {self.loka}",
            f"calibrated with {self.calibration.rows} rows of {self.calibration.name!r} "
            f"(sha256 {self.calibration.sha256[:12]})",
            format_table(("site", "runs", "scale", "sqnr_db", "alarm beyond"), rows),
            *(f"output {place} {error}" for place, error in enumerate(self.answers)),
            f"weights of sites in eight bits: {low} bytes, {low / max(high, 1):.3f} of bf16's {high}",
        ]
        for bucket, names in zip(self.buckets, self.in_hp, strict=True):
            if names:
                lines.append(f"{bucket} rows: {len(names)} of {len(rows)} sites run in high precision")
        lines += [f"kept in high precision too: {line}" for line in self.kept]
        lines += [f"no row reached {name}; it raises if one does" for name in self.unreached]
        lines += [f"the alarm is blind at {name}: its rows differ by more than 20 times" for name in self.blind]
        if self.scratch:
            lines.append(
                "no CUDA graphs, and answers may go by requests before: forward writes to " + ", ".join(self.scratch)
            )
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Folder(
    RecordFile,
    kind="loka-serve-card",
    version=6,
    way_out="name a folder that `save` of a frozen model wrote, or freeze and save again",
):
    """What a folder's `card.json` holds: the card, and the sha256 of each other file by name.

    `data`: digests by name of what modules kept that no file holds, as `load` takes it from the model that it is given.
    """

    card: Card
    files: Mapping[str, str]
    data: Mapping[str, str] = sparse(default_factory=dict)
