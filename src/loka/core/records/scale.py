"""The record of `loka scale`: what eight bits would give a model, told before any of it has run.

Every time is labelled with where it is from: "measured" at that very shape, "interpolated" between measured
shapes, or "unknown", and then there is no number. Intervals are of 95 %.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from loka.core.budget import Budget
from loka.core.device import Fingerprint
from loka.core.error import Estimate, exactly
from loka.core.records.coverage import Coverage, Uncovered
from loka.core.storage.codec import sparse
from loka.core.storage.record_file import RecordFile
from loka.core.table import format_table

Origin = Literal["measured", "interpolated", "unknown"]
Answer = Literal["yes", "perhaps", "no", "unknown"]


@dataclass(frozen=True, kw_only=True)
class SiteTimes:
    """One GEMM of a layer, by itself.

    Attributes:
        m, n, k: out [m, n] = A [m, k] @ B [n, k]^T.
        bf16: microseconds.
        eight: microseconds in eight bits, with what it takes to quantize both operands.
        speedup: bf16 over eight; below 1 eight bits lose.
        origin: of the less certain of the two times.
        helps: whether eight bits shorten the layer with this GEMM in them; "perhaps" where the interval
            holds 1.
    """

    m: int
    n: int
    k: int
    bf16: Estimate | None
    eight: Estimate | None
    speedup: Estimate | None
    origin: Origin
    helps: Answer


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """The GEMMs of a layer that run in a step; several layers of one shape have equal ones.

    Attributes:
        path: of the layer; a layer that is called twice is listed twice.
        weight_dtype: of the stored weights: float32 ones are cast or quantized in every step.
        flops: of all its GEMMs.
        gemms: by name.
        speedup: of the layer, each GEMM in eight bits or bf16 as is faster; 1 where bf16 stays everywhere.
        origin: of `speedup`.
        why: what to know of it: why a time is unknown, why it stays in bf16 whatever its time.
    """

    path: str
    rows: int
    in_features: int
    out_features: int
    weight_dtype: str
    flops: float
    gemms: Mapping[str, SiteTimes]
    speedup: Estimate | None
    origin: Origin
    why: str = sparse("")

    @property
    def bf16(self) -> Estimate:
        """Microseconds of its GEMMs in bf16, as far as they are known."""
        return _sum(site.bf16 for site in self.gemms.values() if site.bf16)


@dataclass(frozen=True, kw_only=True)
class Scale(RecordFile, kind="loka-scale", version=1, way_out="run `loka scale` again"):
    """A model's step on one GPU, as far as stored measurements tell.

    Attributes:
        gpu: as it was asked for; `machine` is the one that was measured.
        kernels: whose times: "all" libraries, or "torch" alone.
        layers: in the order of calls.
        coverage: the FLOPs of the step by site, and of what is no site.
        regions: what compiled steps of measured models gained with their layers joined: for reference.
        notes: how this was found, where that matters.
    """

    model: str
    batch_size: int
    gpu: str
    machine: Fingerprint
    kernels: str
    layers: tuple[LayerTimes, ...]
    coverage: Coverage
    regions: Mapping[str, Estimate]
    notes: tuple[str, ...] = ()

    @property
    def known(self) -> tuple[LayerTimes, ...]:
        return tuple(layer for layer in self.layers if layer.speedup is not None)

    @property
    def bf16(self) -> Estimate:
        """Microseconds of all known layers in bf16; its ends are those of all GEMMs at once."""
        return _sum(layer.bf16 for layer in self.known)

    @property
    def speedup(self) -> Estimate | None:
        """Of the GEMM time of all known layers, by sites. Its ends are those of all layers at once: errors of
        neighbours are alike, so they are not taken to cancel."""
        total = self.bf16.value
        if not total:
            return None
        left = [
            sum(layer.bf16.value / getattr(layer.speedup, end) for layer in self.known)
            for end in ("value", "low", "high")
        ]
        return Estimate(*(total / time for time in left))

    def counts(self) -> dict[Answer, int]:
        """How many sites eight bits help, layer by layer and GEMM by GEMM."""
        found: dict[Answer, int] = {"yes": 0, "perhaps": 0, "no": 0, "unknown": 0}
        for layer in self.layers:
            for site in layer.gemms.values():
                found[site.helps] += 1
        return found

    @property
    def unknown_share(self) -> float:
        """The share of the sites' FLOPs whose times are unknown."""
        total = sum(layer.flops for layer in self.layers)
        unknown = sum(layer.flops for layer in self.layers if layer.speedup is None)
        return unknown / total if total else 0.0

    def verdict(self) -> str:
        """In words, with the numbers they rest on."""
        counts = self.counts()
        total, speedup = sum(counts.values()), self.speedup
        if speedup is None:
            return (
                f"Whether eight bits help is not known: none of the {total} sites is near a shape that was "
                f"measured on {self.machine.device}. Measure there: `loka probe`, `loka measure`, "
                "`loka plan`."
            )
        parts = [f"Eight bits help {counts['yes']} of {total} sites ({self._origins()})"]
        parts += [f"perhaps {counts['perhaps']} more"] if counts["perhaps"] else []
        gained = (
            f"{_factor(speedup)} with eight bits where they pay; bf16 stays elsewhere"
            if speedup.high > 1
            else "and bf16 stays everywhere"
        )
        lines = [f"{', '.join(parts)}. GEMM time by sites: {_microseconds(self.bf16)} us in bf16, {gained}."]
        if self.unknown_share:
            lines.append(f"{_percent(self.unknown_share)} of the sites' FLOPs are of unknown time and not in it.")
        lines.append(_WORDS[_grade(speedup)])
        return " ".join(lines)

    def _origins(self) -> str:
        found = [site.origin for layer in self.layers for site in layer.gemms.values()]
        counts = {origin: found.count(origin) for origin in get_args(Origin)}
        return ", ".join(f"{count} {origin}" for origin, count in counts.items() if count)

    def __str__(self) -> str:
        lines = [
            f"{self.model}, a training step of {self.batch_size} rows, on {self.machine}",
            f"Kernels: {_KERNELS.get(self.kernels, self.kernels)}.",
            format_table(_HEADER, _rows(self.layers, self.coverage.total)),
            *_shares(self.coverage),
            *(f"note: {note}" for note in self.notes),
            self.verdict(),
            "FP8 us are of a GEMM alone, with the quantizing of its operands; by sites, the GEMMs of a layer "
            "share that, and each runs as is faster. Intervals of 95 %.",
            "Not in it: elementwise work, norms, embeddings, the optimizer, what checkpoints of activations "
            "compute again, launches of an eager step, communication. Whether eight bits are safe is Probe's to tell.",
        ]
        if self.regions:
            gains = [found.value for found in self.regions.values()]
            told = ", ".join(f"{name} {found.value:.2f}x" for name, found in self.regions.items())
            lines.append(
                "For reference, no promise: under torch.compile, which joins layers in regions, measured "
                f"steps gained {min(gains):.2f}x to {max(gains):.2f}x ({told})."
            )
        return "\n".join(lines)


_HEADER = ("layer", "GEMM", "MxNxK", "FLOPs", "bf16 us", "FP8 us", "speed-up", "from", "helps", "by sites")


def _sum(times: Iterable[Estimate]) -> Estimate:
    ends = [(time.value, time.low, time.high) for time in times]
    return Estimate(*(sum(each) for each in zip(*ends, strict=True))) if ends else exactly(0.0)


_KERNELS = {"all": "the fastest of all libraries at each shape", "torch": "torch's own"}
_WORTH = Budget.min_speedup  # what a plan asks by default

_WORDS = {
    "yes": "By sites it is worth a probe.",
    "little": "By sites there is little to win.",
    "open": "By sites it is open: only measuring tells.",
}


def _grade(speedup: Estimate) -> str:
    if speedup.low >= _WORTH:
        return "yes"
    return "little" if speedup.high < _WORTH else "open"


def _rows(layers: Iterable[LayerTimes], total: float) -> list[tuple[str, ...]]:
    alike: dict[tuple[object, ...], list[LayerTimes]] = {}
    for layer in layers:
        key = (layer.rows, layer.in_features, layer.out_features, layer.weight_dtype, tuple(layer.gemms))
        alike.setdefault((*key, layer.why), []).append(layer)
    rows: list[tuple[str, ...]] = []
    for several in alike.values():
        first = several[0]
        name = first.path if len(several) == 1 else f"{first.path} and {len(several) - 1} alike"
        flops = sum(layer.flops for layer in several) / len(first.gemms)
        for place, (gemm, site) in enumerate(first.gemms.items()):
            by_sites = _factor(first.speedup) if first.speedup else first.why or "unknown"
            rows.append(
                (
                    "" if place else name,
                    gemm,
                    f"{site.m}x{site.n}x{site.k}",
                    _percent(flops / total if total else 0.0),
                    _microseconds(site.bf16),
                    _microseconds(site.eight),
                    _factor(site.speedup) if site.speedup else "unknown",
                    site.origin,
                    site.helps,
                    "" if place else f"{by_sites}{f' ({first.why})' if first.speedup and first.why else ''}",
                )
            )
    return rows


def _shares(coverage: Coverage) -> list[str]:
    total = coverage.total or 1.0
    alike: dict[tuple[str, str], list[Uncovered]] = {}
    for rest in sorted(coverage.uncovered, key=lambda rest: -rest.flops):
        alike.setdefault((rest.op, rest.reason), []).append(rest)
    lines = coverage.lines()[:1]
    for several in alike.values():
        share = sum(rest.flops for rest in several) / total
        more = f" (with {len(several) - 1} more like it)" if len(several) > 1 else ""
        lines.append(f"{_percent(share)} are no site: {several[0]}{more}")
    return lines


def _microseconds(time: Estimate | None) -> str:
    if time is None:
        return "unknown"
    return f"{_three(time.value)} [{_three(time.low)}, {_three(time.high)}]"


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"


def _factor(speedup: Estimate) -> str:
    if speedup == exactly(1.0):
        return "1"
    return speedup.shown(".2f", "x")


def _percent(share: float) -> str:
    return "<0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"
