"""Times of collectives on the ranks that are there.

A round times every collective at every size, in an order that all ranks share, so that drift falls on all
alike. One timing is a few calls back to back behind a call in which ranks meet. On a GPU they are queued
behind a kernel that waits, so that events see the GPU and not Python; a timing in which the GPU waited for
the host is dropped.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from loka.core.error import Estimate
from loka.core.exceptions import LokaError
from loka.core.exchange import gather_json
from loka.core.records.network import OPS, Op
from loka.core.timing import elapsed, median_interval
from loka.distributed.gradient_codec import all_gather

reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its name from 2.13 on

Call = Callable[[], object]
Point = tuple[Op, int]

_LEAST, _MOST = 7, 15  # rounds; an interval of 95 % takes six
_CALLS = 20  # back to back, at most
_BACK_TO_BACK = 5e3  # us that they should take together
_ITEM = 2  # bytes: bf16, as forecasts have it on the wire


class Buffers:
    def __init__(self, size: int, device: torch.device) -> None:
        made = (torch.zeros(size // _ITEM, dtype=torch.bfloat16, device=device) for _ in range(2))
        self.source, self.target = made
        self.clock = Clock(device)

    def call(self, op: Op, size: int, group: Any) -> Call:
        """`size`: bytes of what an all-gather makes, a reduce-scatter takes."""
        count = size // _ITEM
        part = count // dist.get_world_size(group)
        source, target = self.source[:count], self.target[:count]
        calls: dict[Op, Call] = {
            "all_reduce": lambda: dist.all_reduce(source, group=group),
            "all_gather": lambda: all_gather(target, source[:part], group=group),
            "reduce_scatter": lambda: reduce_scatter(target[:part], source, group=group),
            "all_to_all": lambda: dist.all_to_all_single(target, source, group=group),
        }
        return calls[op]


def whole(size: int, ranks: int) -> int:
    """Bytes up to `size` of which each rank has as many elements."""
    return size // (_ITEM * ranks) * _ITEM * ranks


def timed(
    buffers: Buffers, sizes: Sequence[int], group: Any, *, seconds: float
) -> tuple[dict[Point, Estimate], list[float]]:
    """Microseconds of each collective at each size, and of each rank how many times as long as the fastest it
    took, in the mean. `seconds`: that the rounds should take."""
    points = [(op, whole(size, dist.get_world_size(group))) for size in sizes for op in OPS]
    clock, calls = buffers.clock, {point: buffers.call(*point, group) for point in points}
    first = []
    for call in calls.values():
        clock.us(call, 2)  # connections are made on the first call
        first.append(clock.us(call, 1))
    agreed = torch.tensor(first, dtype=torch.float64, device=clock.device).nan_to_num(1.0).clamp_min(1.0)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    slowest = dict(zip(points, agreed.tolist(), strict=True))
    counts = {point: max(1, min(_CALLS, int(_BACK_TO_BACK / us))) for point, us in slowest.items()}
    each = sum(us * (counts[point] + 1) + _lead(counts[point]) for point, us in slowest.items())
    mine: dict[Point, list[float]] = {point: [] for point in points}
    drawn = random.Random(0)
    for _ in range(max(_LEAST, min(_MOST, int(seconds * 1e6 / each)))):
        for point in drawn.sample(points, len(points)):
            mine[point].append(clock.us(calls[point], counts[point]))
    return over_ranks(points, gather_json([*mine.values()], group))


def over_ranks(
    points: Sequence[Point], every: Sequence[Sequence[Sequence[float]]]
) -> tuple[dict[Point, Estimate], list[float]]:
    """What `timed` returns, of [ranks, points, rounds]; nan where a host was late."""
    found: dict[Point, Estimate] = {}
    logs: list[list[float]] = [[] for _ in every]
    for place, point in enumerate(points):
        rounds = list(zip(*(rank[place] for rank in every), strict=True))
        kept = _on_time(rounds, f"{point[0]}, {point[1]} bytes", _LEAST - 1)
        found[point] = median_interval([max(times) for times in kept])
        middles = [statistics.median(times) for times in zip(*kept, strict=True)]
        for log, middle in zip(logs, middles, strict=True):
            log.append(math.log(middle / min(middles)))
    return found, [math.exp(statistics.fmean(log)) for log in logs]


def _on_time(rounds: list[tuple[float, ...]], what: str, least: int) -> list[tuple[float, ...]]:
    kept = [times for times in rounds if not any(map(math.isnan, times))]
    if len(kept) < least:
        late = f"{len(rounds) - len(kept)} of {len(rounds)} timings of {what}"
        way_out = "calibrate while nothing else runs on this machine's processors"
        raise LokaError(f"the GPU waited for its host in {late}", way_out=way_out)
    return kept


def _lead(count: int) -> float:
    """Microseconds that a GPU waits for a host that queues so many calls."""
    return 500.0 + 60.0 * count


class Clock:
    def __init__(self, device: torch.device) -> None:
        self.device, self._longer = device, 1.0

    def us(self, call: Call, count: int) -> float:
        """Microseconds of one of `count` calls; nan where the GPU waited for the host."""
        if self.device.type != "cuda":
            call()
            begun = time.perf_counter()
            for _ in range(count):
                call()
            return (time.perf_counter() - begun) * 1e6 / count
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        wait = min(self._longer * _lead(count), 50e3)
        torch.cuda._sleep(int(2e3 * wait))  # cycles, at 2 GHz
        call()
        start.record()
        for _ in range(count):
            call()
        late = start.query()
        end.record()
        end.synchronize()
        if late:
            self._longer *= 2
            return math.nan
        return elapsed(start, end) / count


def memory_gbps(buffers: Buffers) -> Estimate:
    """GB/s of a copy, a product and a sum of whole buffers."""
    source, target = buffers.source, buffers.target
    kernels: tuple[tuple[int, Call], ...] = (
        (2, lambda: target.copy_(source)),
        (2, lambda: torch.mul(source, 2.0, out=target)),
        (3, lambda: torch.add(source, target, out=target)),
    )
    found = []
    for streams, kernel in kernels:
        times = _on_time([(buffers.clock.us(kernel, 4),) for _ in range(_LEAST)], "its memory", 1)
        found.append(streams * source.numel() * _ITEM / statistics.median(us for (us,) in times) / 1e3)
    return Estimate(statistics.median(found), min(found), max(found))
