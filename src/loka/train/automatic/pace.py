"""How long steps of a run take, whole: with tables, data, optimizers and the host. What a plan gains shows here.

    step     from its begin to the begin of the next one, on the device's clock
    pace     mean of medians of eight steps, of the last 64, with Student's interval

Steps of another kind (sampled ones) do not count; a stall now and then (a checkpoint) moves no median. Steps side by
side are alike, as the host and the reader are for a while, so that eights count as one each.
"""

import math
import statistics
from collections import deque

import torch

from loka.core.error import Estimate, estimate_mean
from loka.core.timing import TIE, elapsed

KEPT = 64
SETTLED = 24  # steps, after which all is compiled and captured
_EIGHT, _LEAST = 8, 3


class Pace:
    """Of a run on `device`, which is never waited for but by `read`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: torch.cuda.Event | None = None
        self._steps: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=KEPT)

    def step(self, *, counts: bool) -> None:
        """A step begins, which is like the others or does not count."""
        before, self._begun = self._begun, self._now() if counts or self._begun else None
        if before and self._begun:
            self._steps.append((before, self._begun))
        if not counts:
            self._begun = None

    def read(self) -> Estimate | None:
        """Milliseconds of a step, and forgets them; None of fewer than 24."""
        if self._steps:
            self._steps[-1][1].synchronize()
        steps = [elapsed(begin, end) / 1e3 for begin, end in self._steps]
        self._steps.clear()
        eights = [statistics.median(steps[at : at + _EIGHT]) for at in range(0, len(steps) - _EIGHT + 1, _EIGHT)]
        return estimate_mean(eights) if len(eights) >= _LEAST else None

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def pace_on(device: torch.device) -> Pace | None:
    """None where nothing is timed."""
    return Pace(device) if device.type == "cuda" else None


def gain(before: Estimate, now: Estimate) -> Estimate:
    """Of steps `now` over those `before`, from the ends of both intervals."""
    high = before.high / now.low if now.low > 0 else math.inf
    return Estimate(before.value / now.value, before.low / now.high, high)


def worth_it(gained: Estimate, least: float) -> bool:
    """Whether a plan stays: it is surely faster, and by a percent, or as slow as a budget's `min_speedup` allows."""
    return gained.low > min(least, 1.0) and gained.value > min(least, 1.0 + TIE)
