"""Times several ways to do the same thing on all ranks, in turns, and lets rank 0 decide for all of them.

A collective ends when the last rank has joined, so in each round the slowest rank counts. Ranks that decided for
themselves, by clocks that differ, would wait for each other in different collectives. Call none of this between two
steps of training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from loka.core.exchange import broadcast_json, gather_json
from loka.core.records.report import HP
from loka.core.storage.codec import decode, encode
from loka.core.timing import TIE, Timing, timing_of

_ROUNDS = 11
_CACHE_BYTES = 256 << 20  # several times the L2 of an H200; written in about 60 us
_FILL_SECONDS, _MOST_FILLS = 60e-6, 100

Ways = Mapping[str, Callable[[], object]]
Timer = Callable[[Ways, torch.device], Mapping[str, Sequence[float]]]
"""Microseconds of each way in each round, on this rank; all ranks take equally many rounds."""


@dataclass(frozen=True)
class Choice:
    """What `ranks` ranks decided: `taken`. `told` is a table with the times and the reasons."""

    ranks: int
    taken: tuple[str, ...]
    told: str

    def __str__(self) -> str:
        return self.told

    def of_the_first(self) -> Choice:
        """The choice of rank 0, on every rank. A collective."""
        return decode(Choice, broadcast_json(encode(self)))


def compared(ways: Ways, device: torch.device, timer: Timer, *, baseline: str = HP) -> dict[str, Timing]:
    """The timing of each way, by the slowest rank of each round; `Timing.speedup` is over `baseline`. A collective."""
    mine = {name: list(times) for name, times in timer(ways, device).items()}
    ranks = gather_json(mine)
    slowest = {name: [max(times) for times in zip(*(one[name] for one in ranks), strict=True)] for name in mine}
    return {name: timing_of(slowest[baseline], times) for name, times in slowest.items()}


def is_faster(timing: Timing) -> bool:
    """Whether a way is faster than the baseline by more than noise: its whole interval lies beyond what counts as
    equal.
    """
    return timing.speedup.low > 1 + TIE


def time_in_turns(ways: Ways, device: torch.device) -> dict[str, list[float]]:
    """Times each way once a round, after a call that warms it up.

    On CUDA it measures time on the device, by events. Work before them keeps the device busy while the host launches,
    and a collective makes the ranks begin together. On a CPU it measures the time of the call.
    """
    cache = torch.empty(_CACHE_BYTES if device.type == "cuda" else 0, dtype=torch.uint8, device=device)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_ROUNDS):
        for name, run in ways.items():
            began = time.perf_counter()
            run()
            launched = time.perf_counter() - began
            found[name].append(max(_microseconds(run, device, cache, launched), 1e-3))
    return found


def _microseconds(run: Callable[[], object], device: torch.device, cache: torch.Tensor, launched: float) -> float:
    together = torch.zeros(1, device=device)
    if device.type != "cuda":
        dist.all_reduce(together)
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) * 1e6
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    for _ in range(min(math.ceil(1.5 * launched / _FILL_SECONDS), _MOST_FILLS)):
        cache.fill_(1)
    dist.all_reduce(together)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3
