"""Which units of FSDP2 gather their weights in FP8: a decision by measured times, one for all ranks.

A unit gathers in FP8 where that is faster by more than noise, and in its own dtype where the two tie: that
one rounds nothing. FP8 units need one all-reduce of scales a forward for all of them together. Where they do
not save more than it takes, none of them gathers in FP8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from loka.core.error import Estimate
from loka.core.table import format_table
from loka.core.timing import Timing
from loka.distributed.timed_ways import is_faster

FP8, HP = "fp8", "hp"


@dataclass(frozen=True, kw_only=True)
class UnitGather:
    """What the gathers of one step take, in microseconds of the slowest rank, medians of all rounds.

    `fp8_us` with quantizing the shards and transposing the weights that came, `hp_us` with quantizing what
    came; `speedup` is `hp_us` over `fp8_us`, of paired rounds, with its 95 % interval.
    """

    unit: str
    weights: int
    fp8_us: float
    hp_us: float
    speedup: Estimate
    in_fp8: bool


@dataclass(frozen=True, kw_only=True)
class GatherChoice:
    """Of the units with weights that FP8 gathers can take. `scales_us`: what agreeing on scales takes a step,
    of all units together. `str()` is a table with the times."""

    ranks: int
    scales_us: float
    units: tuple[UnitGather, ...]
    notes: tuple[str, ...] = ()

    def why_not(self, unit: str) -> str | None:
        """Why `unit` does not gather in FP8; None where it does."""
        for one in self.units:
            if one.unit == unit:
                return None if one.in_fp8 else f"not faster by time: {one.speedup} times bf16's speed"
        return "its gather was not timed"

    def __str__(self) -> str:
        header = ("unit", "weights", "FP8 us", "own dtype us", "speedup of FP8", "gathers in")
        rows = [
            (
                one.unit or "(root)",
                one.weights,
                f"{one.fp8_us:.1f}",
                f"{one.hp_us:.1f}",
                one.speedup,
                "FP8" if one.in_fp8 else "its own dtype",
            )
            for one in self.units
        ]
        lines = [format_table(header, rows)] if rows else ["no unit has weights that FP8 gathers can take"]
        lines.append(f"timed on {self.ranks} ranks; agreeing on scales takes {self.scales_us:.1f} us a step")
        return "\n".join([*lines, *self.notes])


def decide(
    units: Mapping[str, tuple[int, Mapping[str, Timing]]], scales: Timing | None, *, ranks: int
) -> GatherChoice:
    """Of each unit its number of weights, and the timings of `FP8` over the baseline `HP`."""
    found = [
        UnitGather(
            unit=unit,
            weights=weights,
            fp8_us=timed[FP8].microseconds.value,
            hp_us=timed[HP].microseconds.value,
            speedup=timed[FP8].speedup,
            in_fp8=is_faster(timed[FP8]),
        )
        for unit, (weights, timed) in units.items()
    ]
    saved = sum(one.hp_us - one.fp8_us for one in found if one.in_fp8)
    notes = []
    if scales is not None and any(one.in_fp8 for one in found) and saved <= scales.microseconds.high:
        found = [replace(one, in_fp8=False) for one in found]
        notes.append(f"FP8 gathers would save {saved:.1f} us a step, not more than agreeing on scales takes")
    return GatherChoice(
        ranks=ranks,
        scales_us=scales.microseconds.value if scales is not None else 0.0,
        units=tuple(found),
        notes=tuple(notes),
    )
