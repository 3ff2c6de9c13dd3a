"""How long whole steps of a run take, with tables, data, optimizers and the host: what a plan gains shows here.

    step     from its begin to the begin of the next one, on the clock of the device
    pace     mean of the medians of eight steps each, over the last 64 steps, with Student's interval

Steps of another kind (sampled ones) do not count, and a stall now and then (a checkpoint) moves no median. Steps next
to each other are alike, because host and reader stay the same for a while, so eight of them count as one sample.
"""

import math
import statistics
from collections import deque

import torch

from loka.core.error import Estimate, estimate_mean
from loka.core.timing import TIE, elapsed, event_on

KEPT = 64
SETTLED = 24  # steps, after which all is compiled and captured
_EIGHT, _LEAST = 8, 3


class Pace:
    """The pace of a run on `device`. Only `read` waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: torch.cuda.Event | None = None
        self._steps: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=KEPT)

    def step(self, *, counts: bool) -> None:
        """Notes that a step begins. `counts` is False for a step of another kind."""
        before, self._begun = self._begun, self._now() if counts or self._begun else None
        if before and self._begun:
            self._steps.append((before, self._begun))
        if not counts:
            self._begun = None

    def read(self) -> Estimate | None:
        """The milliseconds of a step, or None after fewer than 24 of them; what was noted is forgotten."""
        if self._steps:
            self._steps[-1][1].synchronize()
        steps = [elapsed(begin, end) / 1e3 for begin, end in self._steps]
        self._steps.clear()
        eights = [statistics.median(steps[at : at + _EIGHT]) for at in range(0, len(steps) - _EIGHT + 1, _EIGHT)]
        return estimate_mean(eights) if len(eights) >= _LEAST else None

    def _now(self) -> torch.cuda.Event:
        return event_on(self._device)


def pace_on(device: torch.device) -> Pace | None:
    """A Pace for the device, or None where steps are not timed."""
    return Pace(device) if device.type == "cuda" else None


def gain(before: Estimate, now: Estimate) -> Estimate:
    """How many times as fast steps `now` are as those `before`, from the ends of both intervals."""
    high = before.high / now.low if now.low > 0 else math.inf
    return Estimate(before.value / now.value, before.low / now.high, high)


def worth_it(gained: Estimate, least: float) -> bool:
    """Whether a plan stays: it is surely faster, by a percent at least, or no slower than a `min_speedup` below 1
    allows.
    """
    return gained.low > min(least, 1.0) and gained.value > min(least, 1.0 + TIE)
