"""The record of `loka scale --network`: what eight bits would give a step on many GPUs.

Ends of intervals are those of all inputs at once, each at its own end: GEMM times' are of 95 %, those of
assumptions are what the network file says.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from loka.core.error import Estimate
from loka.core.records.network import Quantity
from loka.core.storage.record_file import RecordFile
from loka.core.table import format_table


@dataclass(frozen=True, kw_only=True)
class Swing:
    """The speed-up with one input at its low and at its high end, all others at their values."""

    low: float
    high: float

    @property
    def size(self) -> float:
        return abs(self.high - self.low)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Of a step, in microseconds, at the values of all inputs. `exposed`: nothing computes, for the wire is
    not done; `wire`: of all collectives, hidden behind compute or not; `sent`: bytes of their buffers."""

    gemms: float
    other: float
    exposed: float
    wire: float
    sent: float


@dataclass(frozen=True, kw_only=True)
class AcrossRow:
    """A step on `gpus` GPUs by plan, against the same engine in bf16 throughout.

    Attributes:
        gather: of FSDP2's weights; "-" of DDP, which gathers none.
        bf16, planned: microseconds of the step.
        speedup: bf16 over planned.
        format_gain: of gather and gradients alone: the step by plan with both in bf16, over this one.
        swings: of `speedup`, by input.
    """

    gpus: int
    engine: str
    gather: str
    gradients: str
    bf16: Estimate
    planned: Estimate
    speedup: Estimate
    format_gain: Estimate
    bf16_parts: Parts
    parts: Parts
    swings: Mapping[str, Swing]

    @property
    def plain(self) -> bool:
        """Whether everything on the wire is in bf16."""
        return self.gather != "fp8" and self.gradients == "bf16"


@dataclass(frozen=True, kw_only=True)
class Across(RecordFile, kind="loka-scale-across", version=1, way_out="run `loka scale --network` again"):
    """A model's step on many GPUs.

    Attributes:
        batch_size: rows of each GPU.
        times: where GEMM times are from, in words.
        assumptions: every input that is not a GEMM time, by name.
        units: what FSDP2 shards each for itself, besides the root.
        notes: what is not in it, and what was taken so.
        memory: estimated bytes of a GPU, for "8 ddp" and so on by what they are; `capacity`: 0 if unknown.
    """

    model: str
    batch_size: int
    gpu: str
    network: str
    times: str
    rows: tuple[AcrossRow, ...]
    assumptions: Mapping[str, Quantity]
    units: tuple[str, ...]
    notes: tuple[str, ...]
    memory: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    capacity: float = 0.0

    def answers(self) -> list[str]:
        """The questions of a team, each answered with the numbers that it rests on."""
        lines = []
        for engine in dict.fromkeys(row.engine for row in self.rows):
            mine = [row for row in self.rows if row.engine == engine]
            plain = [row for row in mine if row.plain]
            lines.append(f"{engine}: {_where_it_pays(plain)}")
            lines.append(f"  where eight bits stop paying: {_where_it_stops(plain)}")
            formats = dict.fromkeys((row.gather, row.gradients) for row in mine if not row.plain)
            for gather, gradients in formats:
                told = ", ".join(
                    f"{row.gpus}: {row.format_gain.shown('.2f', 'x')} {_word(row.format_gain)}"
                    for row in mine
                    if (row.gather, row.gradients) == (gather, gradients)
                )
                lines.append(f"  {_format(gather, gradients)}, against bf16 on the wire: {told}")
        return lines

    def falsified_by(self) -> list[str]:
        """Measurements that would show it to be wrong."""
        most = max(row.gpus for row in self.rows)
        lines = [
            f"a step of {row.engine} on {row.gpus} GPUs outside {_ms(row.bf16)} ms in bf16, or outside "
            f"{_ms(row.planned)} ms by plan"
            for row in self.rows
            if row.plain and row.gpus == most
        ]
        return [
            *lines,
            "collectives of nccl-tests outside the alphas and bandwidths assumed, or slower beside compute",
            "a profile in which gathers do not run ahead as assumed, or the GPU waits for the host",
        ]

    def __str__(self) -> str:
        lines = [
            f"{self.model}, {self.batch_size} rows a GPU, on {self.gpu}, {self.network}",
            f"GEMM times: {self.times}.",
            format_table(_HEADER, [_row(row) for row in self.rows]),
            "GEMMs, other, exposed (nothing computes, the wire is not done) and wire in ms, MB of the",
            "buffers of all collectives: in bf16 > by plan, at the values of all inputs.",
            *self.answers(),
            *self._memory(),
            "What moves the speed-up most, each input alone from its low to its high end:",
            *_swings(self.rows),
            "Assumptions:",
            *(f"  {name}: {quantity}" for name, quantity in self.assumptions.items()),
            *(f"note: {note}" for note in self.notes),
            "Falsified by:",
            *(f"  {line}" for line in self.falsified_by()),
        ]
        return "\n".join(lines)

    def _memory(self) -> list[str]:
        totals = {name: sum(parts.values()) for name, parts in self.memory.items()}
        if not totals:
            return []
        header = ("GB, estimated", "all", *next(iter(self.memory.values())))
        rows = [
            (name, *(f"{size / 1e9:.2f}" for size in (totals[name], *parts.values())))
            for name, parts in self.memory.items()
        ]
        most = f"{self.capacity / 1e9:.0f} GB" if self.capacity else "an unknown size"
        over = ", ".join(name for name, total in totals.items() if total > self.capacity > 0)
        return [format_table(header, rows), f"The GPU has {most}{over and '. WARNING: too little for '}{over}."]


_HEADER = (
    "GPUs", "engine", "gather", "gradients", "bf16 ms", "by plan ms", "speed-up", "GEMMs", "other",
    "exposed", "wire", "MB",
)  # fmt: skip
_MOST = 4  # inputs told of a row


def _row(row: AcrossRow) -> tuple[str, ...]:
    before, after = row.bf16_parts, row.parts
    pairs = (
        (before.gemms, after.gemms),
        (before.other, after.other),
        (before.exposed, after.exposed),
        (before.wire, after.wire),
    )
    return (
        str(row.gpus),
        row.engine,
        row.gather,
        row.gradients,
        _ms(row.bf16),
        _ms(row.planned),
        row.speedup.shown(".2f", "x"),
        *(f"{one / 1e3:.2f} > {other / 1e3:.2f}" for one, other in pairs),
        f"{before.sent / 1e6:.1f} > {after.sent / 1e6:.1f}",
    )


def _where_it_pays(rows: list[AcrossRow]) -> str:
    kinds = {word: [row for row in rows if _word(row.speedup) == word] for word in ("yes", "perhaps", "no")}
    told = [
        f"{text} at " + ", ".join(f"{row.gpus} ({row.speedup.shown('.2f', 'x')})" for row in kinds[word])
        for word, text in (
            ("yes", "eight bits pay"),
            ("perhaps", "it is open whether they do"),
            ("no", "they do not pay"),
        )
        if kinds[word]
    ]
    return f"with bf16 on the wire {'; '.join(told)}"


def _where_it_stops(rows: list[AcrossRow]) -> str:
    for row in sorted(rows, key=lambda row: row.gpus):
        if not any(_word(other.speedup) == "yes" for other in rows if other.gpus >= row.gpus):
            return f"from {row.gpus} GPUs on: the interval of their gain is not above 1.00"
    return f"nowhere up to {max(row.gpus for row in rows)} GPUs: the interval of their gain stays above 1.00"


def _swings(rows: tuple[AcrossRow, ...]) -> list[str]:
    lines = []
    for row in rows:
        if row.plain:
            first = sorted(row.swings.items(), key=lambda item: -item[1].size)[:_MOST]
            told = ", ".join(f"{name} {s.low:.3f}x to {s.high:.3f}x" for name, s in first)
            lines.append(f"  {row.gpus} GPUs, {row.engine}: {told}")
    return lines


def _word(gain: Estimate) -> str:
    if round(gain.low, 2) > 1:
        return "yes"
    return "perhaps" if round(gain.high, 2) > 1 else "no"


def _format(gather: str, gradients: str) -> str:
    parts = [*(["FP8 gather"] if gather == "fp8" else []), *([f"{gradients} gradients"] if gradients != "bf16" else [])]
    return " and ".join(parts)


def _ms(us: Estimate) -> str:
    return f"{us.value / 1e3:.2f} [{us.low / 1e3:.2f}, {us.high / 1e3:.2f}]"
