"""Ways to do the same among all ranks, timed in rounds, and compared by what the slowest rank takes.

A collective ends when the last rank is there, so of each round and way the largest time over the ranks
counts. All ranks time, rank 0 decides, and the others take its decision: clocks differ, and ranks that decide
for themselves wait for each other in other collectives. Call none of this between two steps of training.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from loka.core.exceptions import LokaError
from loka.core.exchange import broadcast, gather
from loka.core.timing import TIE, Timing, timing_of

ROUNDS = 11
_CACHE_BYTES = 256 << 20  # several times the L2 of an H200; written in about 60 us
_FILL_SECONDS = 60e-6
_MOST_FILLS = 100


@dataclass(frozen=True)
class Way:
    """`prepare` is not timed, and `run` is; both are collectives if `run` is one."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


Samples = Mapping[str, Sequence[float]]
Timer = Callable[[Mapping[str, Way], torch.device], Samples]
"""Microseconds of each way in each round, on this rank; all ranks call it, for equally many rounds."""


def time_in_turns(ways: Mapping[str, Way], device: torch.device) -> dict[str, list[float]]:
    """Each way once a round, behind a call that warms it up: a `Timer`.

    On CUDA by events, behind work that keeps the device busy while the host launches, and a collective
    that has the ranks begin together: time on the device. On a CPU the time of the call.
    """
    cache = torch.empty(_CACHE_BYTES if device.type == "cuda" else 0, dtype=torch.uint8, device=device)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            way.prepare()
            began = time.perf_counter()
            way.run()
            launched = time.perf_counter() - began
            found[name].append(_microseconds(way.run, device, cache, launched))
    return found


def _microseconds(
    run: Callable[[], object], device: torch.device, cache: torch.Tensor, launched: float
) -> float:
    one = torch.zeros(1, device=device)
    if device.type != "cuda":
        dist.all_reduce(one)
        began = time.perf_counter()
        run()
        return max((time.perf_counter() - began) * 1e6, 1e-3)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    for _ in range(min(math.ceil(1.5 * launched / _FILL_SECONDS), _MOST_FILLS)):
        cache.fill_(1)
    dist.all_reduce(one)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return max(begin.elapsed_time(end) * 1e3, 1e-3)


def slowest(samples: Samples) -> dict[str, list[float]]:
    """Of each way and round the time of the slowest rank, on all ranks. A collective.

    Raises LokaError where the ranks timed other ways, or other numbers of rounds; on all ranks.
    """
    mine = {name: list(times) for name, times in samples.items()}
    told = [json.loads(text) for text in gather(json.dumps(mine).encode(), None)]
    shapes = [{name: len(times) for name, times in one.items()} for one in told]
    if any(shape != shapes[0] for shape in shapes):
        raise LokaError(
            "the ranks timed other things",
            why=[f"rank {rank}: rounds {shape}" for rank, shape in enumerate(shapes)],
            way_out="give all ranks the same model and plan (loka.agree), sharded alike",
        )
    return {name: [max(round) for round in zip(*(one[name] for one in told), strict=True)] for name in mine}


def of_the_first(text: str) -> str:
    """What rank 0 says, on every rank. A collective."""
    return broadcast(text.encode(), None).decode()


def compared(samples: Samples, baseline: str) -> dict[str, Timing]:
    """`Timing.speedup` is the baseline's time over a way's own, of paired rounds."""
    return {name: timing_of(samples[baseline], times) for name, times in samples.items()}


def is_faster(timing: Timing) -> bool:
    """Than the baseline by more than noise: the whole interval lies beyond what counts as equal."""
    return timing.speedup.low > 1 + TIE
