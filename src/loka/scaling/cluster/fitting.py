"""Steps told on many GPUs, and measured on few.

What computes in a step is told from GEMM times, bytes and guesses. Where somebody measured the step of an engine on
few GPUs, all of its compute is taken to be as many times longer, or shorter, as makes the step told there last as
long as the measured one; in bf16 and by plan each. So a guess that is wrong in the same way everywhere is gone, and
what differs with the number of GPUs (the wire, what a shard holds) is told as ever. Every setting of the inputs is
fitted for itself: none may contradict the measurement.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loka.core.error import Estimate
from loka.core.exceptions import LokaError
from loka.core.records.across import Parts
from loka.core.records.network import Network
from loka.scaling.cluster.collectives import End, check_ranks
from loka.scaling.cluster.pricing import Formats, Priced
from loka.scaling.cluster.schedule import Timeline, schedule

Ends = Mapping[str, End]
MEASURED = {False: "measured step in bf16", True: "measured step by plan"}
"""Inputs: how often as long it would take another time, on other GPUs of the kind."""
AGAIN = Estimate(1.0, 0.97, 1.03)
_EXACT = 1e-6  # of a step
_TRIES = 60


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """Microseconds of a step on `gpus` GPUs with bf16 on the wire, in bf16 and, if known, by plan. `engine`: as rows
    have it: ddp, fsdp2, or hsdp/8 in groups of 8."""

    engine: str
    gpus: int
    bf16: float
    planned: float | None = None

    def __post_init__(self) -> None:
        times = [one for one in (self.bf16, self.planned) if one is not None]
        if self.gpus < 1 or not all(0 < one < math.inf for one in times):
            raise LokaError(
                f"no step of {self.engine} on {self.gpus} GPUs takes {times} us",
                way_out="one GPU or more, and times above 0",
            )


def parsed_step(text: str) -> MeasuredStep:
    """ "ddp@2=29.9/22.9": a step on two GPUs took 29.9 ms in bf16, 22.9 by plan, which may be left out. Raises
    LokaError for another text."""
    number = r"(\d{1,9}(?:\.\d{1,9})?)"
    found = re.fullmatch(rf"(ddp|fsdp2|hsdp/\d{{1,6}})@(\d{{1,6}})={number}(?:/{number})?", text)
    if found is None:
        raise LokaError(
            f"--step {text!r} is no measured step",
            way_out="engine@GPUs=ms in bf16/ms by plan, such as ddp@2=29.9/22.9, hsdp/8@16=61.2",
        )
    engine, gpus, bf16, planned = found.groups()
    return MeasuredStep(
        engine=engine, gpus=int(gpus), bf16=float(bf16) * 1e3, planned=None if planned is None else float(planned) * 1e3
    )


@dataclass
class Steps:
    """The steps of an engine on `ranks` GPUs, by the formats of what is sent."""

    engine: str
    ranks: int
    rate: float
    network: Network
    priced: Mapping[Formats, Priced]
    fit: "Fit | None" = None
    known: dict[tuple[Any, ...], float] = field(default_factory=dict)

    def us(self, formats: Formats, ends: Ends, *, planned: bool) -> float:
        """Microseconds of the step with inputs at the ends that are given."""
        key = (formats, planned, tuple(sorted(ends.items())))
        if key not in self.known:
            self.known[key] = self.line(formats, ends, planned=planned).total
        return self.known[key]

    def parts(self, formats: Formats, *, planned: bool) -> Parts:
        line, priced = self.line(formats, {}, planned=planned), self.priced[formats]
        gemms = priced.gemm_us(planned=planned) * self._longer({}, planned=planned)
        return Parts(
            gemms=gemms, other=line.compute - gemms, exposed=line.exposed, wire=line.wire, sent=priced.sent_bytes
        )

    def line(self, formats: Formats, ends: Ends, *, planned: bool, longer: float | None = None) -> Timeline:
        """`longer`: how many times as long all that computes takes; None: as the fit has it."""
        longer = self._longer(ends, planned=planned) if longer is None else longer
        items = self.priced[formats].items(
            self.network, self.ranks, rate=self.rate, planned=planned, ends=ends, longer=longer
        )
        return schedule(items)

    def _longer(self, ends: Ends, *, planned: bool) -> float:
        return 1.0 if self.fit is None else self.fit.longer(ends, planned=planned)


@dataclass
class Fit:
    """`steps`: those of the measured step's own number of GPUs, of which `plain` has bf16 on the wire."""

    steps: Steps
    plain: Formats
    measured: MeasuredStep
    known: dict[tuple[Any, ...], float] = field(default_factory=dict)

    def longer(self, ends: Ends, *, planned: bool) -> float:
        """How many times as long compute takes as it is told, in bf16 or by plan."""
        planned = planned and self.measured.planned is not None
        key = (planned, tuple(sorted(ends.items())))
        if key not in self.known:
            us = self.measured.planned if planned else self.measured.bf16
            assert us is not None

            def total(longer: float) -> float:
                return self.steps.line(self.plain, ends, planned=planned, longer=longer).total

            us *= getattr(AGAIN, ends.get(MEASURED[planned], "value"))
            self.known[key] = _root(total, us)
        return self.known[key]

    def checked(self) -> "Fit":
        """Raises LokaError where the step is shorter than its collectives."""
        one = self.measured
        for planned, us in ((False, one.bf16), (True, one.planned)):
            least = self.steps.line(self.plain, {}, planned=planned, longer=0.0).total
            if us is not None and us <= least:
                raise LokaError(
                    f"a step of {one.engine} on {one.gpus} GPUs took {us / 1e3:.3f} ms",
                    why=[f"its collectives alone are told to take {least / 1e3:.3f} ms by {self.steps.network.name}"],
                    way_out="measure the links (loka scale calibrate), or check what was measured",
                )
        return self

    @property
    def note(self) -> str:
        one, before = self.measured, self.longer({}, planned=False)
        fitted = f"{one.engine}: fitted to a step on {one.gpus} GPUs, {one.bf16 / 1e3:.3f} ms in bf16"
        if one.planned is None:
            return f"{fitted}: compute takes {before:.3g} times as long as told without it, by plan too"
        after = self.longer({}, planned=True)
        return (
            f"{fitted} and {one.planned / 1e3:.3f} by plan: compute takes {before:.3g} and {after:.3g} times as "
            "long as told without it"
        )


def _root(total: Callable[[float], float], wanted: float) -> float:
    """Where `total`, which rises and is convex, is `wanted`; 0 where it is more everywhere. By false position, whose
    end that stays is given half its weight (Illinois)."""
    low, high = 0.0, 1.0
    under = total(low) - wanted
    if under >= 0:
        return 0.0
    while (over := total(high) - wanted) < 0:
        low, under, high = high, over, 2 * high
    stayed = 0
    for _ in range(_TRIES):
        middle = high - over * (high - low) / (over - under)
        found = total(middle) - wanted
        if abs(found) <= _EXACT * wanted:
            return middle
        if found < 0:
            low, under = middle, found
            over = over / 2 if stayed < 0 else over
            stayed = -1
        else:
            high, over = middle, found
            under = under / 2 if stayed > 0 else under
            stayed = 1
    return (low + high) / 2


def by_engine(measured: Sequence[MeasuredStep], rows: Mapping[str, int], network: Network) -> dict[str, MeasuredStep]:
    """`rows`: engines, with GPUs of a group. Raises LokaError for a step of an engine without a row, for two of one,
    and for GPUs that fill no nodes or are no two groups."""
    found = {one.engine: one for one in measured}
    strange = [one for one in found if one not in rows]
    if strange or len(found) < len(measured):
        raise LokaError(
            f"measured steps were given for {', '.join(one.engine for one in measured)}",
            why=["there is one for each engine of the forecast at most"],
            way_out=f"give at most one for each of {', '.join(rows)}",
        )
    for one in measured:
        if one.gpus > 1:
            check_ranks(one.gpus, network)
        if (group := rows[one.engine]) and (one.gpus <= group or one.gpus % group):
            raise LokaError(
                f"{one.gpus} GPUs are not two or more groups of {group}, for a step of {one.engine}",
                way_out=f"{2 * group} GPUs, or more such groups",
            )
    return found
