"""Times of collectives on the ranks that are there, in rounds.

A round times every collective at every size once, in an order of its own that all ranks share, so that drift
falls on all alike. One timing is a few calls back to back behind a call that lets the ranks meet. On a GPU
they are queued behind a kernel that waits, so that events around them see the GPU and not Python: the host is
ahead, as it is taken to be in a forecast. Where it was not, that timing is dropped.

How many calls and rounds are taken follows from the slowest rank's first timings, which all ranks know:
whatever a rank does here, the others do in the same order.
"""

from __future__ import annotations

import json
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
from loka.core.exchange import gather
from loka.core.timing import median_interval
from loka.distributed.gradient_codec import all_gather
from loka.scaling.cluster.collectives import OPS, Op

reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # its name from 2.13 on

Point = tuple[Op, int]

_LEAST, _MOST = 7, 15  # rounds; six allow an interval of 95 %
_CALLS = 20  # back to back, at most
_BACK_TO_BACK = 5e3  # us that they should take together
_AHEAD = (500.0, 60.0)  # us that a GPU waits for the host, and for each call besides
_LONGEST_WAIT = 50e3
ITEM = 2  # bytes: bf16, as forecasts have it on the wire


class Buffers:
    """Two of `size` bytes on a device. Raises RuntimeError where they do not fit."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.device = device
        self.source, self.target = (
            torch.zeros(size // ITEM, dtype=torch.bfloat16, device=device) for _ in range(2)
        )

    def call(self, op: Op, size: int, group: Any) -> Callable[[], object]:
        """The collective of `size` bytes: of what an all-gather makes, a reduce-scatter takes."""
        ranks, count = dist.get_world_size(group), size // ITEM
        source, target = self.source[:count], self.target[:count]
        calls: dict[Op, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(source, group=group),
            "all_gather": lambda: all_gather(target, source[: count // ranks], group=group),
            "reduce_scatter": lambda: reduce_scatter(target[: count // ranks], source, group=group),
            "all_to_all": lambda: dist.all_to_all_single(target, source, group=group),
        }
        return calls[op]


def whole(size: int, ranks: int) -> int:
    """The most bytes up to `size` of which each rank has as many elements."""
    return size // (ITEM * ranks) * ITEM * ranks


def timed(
    buffers: Buffers, sizes: Sequence[int], group: Any, *, seconds: float
) -> tuple[dict[Point, Estimate], list[float]]:
    """Microseconds of each collective at each size on the ranks of `group`, and for each of its ranks how
    many times as long as the fastest one it took, in the mean. A collective of that group.

    Args:
        seconds: that the rounds should take; below `_LEAST` rounds it takes longer.
    """
    ranks = dist.get_world_size(group)
    points = [(op, whole(size, ranks)) for size in sizes for op in OPS]
    clock = _Clock(buffers.device)
    calls = {point: buffers.call(*point, group) for point in points}
    first = []
    for point in points:
        clock.us(calls[point], 2)  # connections and channels are made on the first call
        first.append(clock.us(calls[point], 1))
    agreed = torch.tensor(first, dtype=torch.float64, device=buffers.device).nan_to_num(1.0).clamp_min(1.0)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    slowest = dict(zip(points, agreed.tolist(), strict=True))
    counts = {point: max(1, min(_CALLS, int(_BACK_TO_BACK / us))) for point, us in slowest.items()}
    each = sum(us * (counts[point] + 1) + _lead(counts[point]) for point, us in slowest.items())
    rounds = max(_LEAST, min(_MOST, int(seconds * 1e6 / each)))
    mine: dict[Point, list[float]] = {point: [] for point in points}
    drawn = random.Random(0)
    for _ in range(rounds):
        order = list(points)
        drawn.shuffle(order)
        for point in order:
            mine[point].append(clock.us(calls[point], counts[point]))
    every = [json.loads(one) for one in gather(json.dumps([*mine.values()]).encode(), group)]
    return _over_ranks(points, every)


def _over_ranks(
    points: Sequence[Point], every: Sequence[Sequence[Sequence[float]]]
) -> tuple[dict[Point, Estimate], list[float]]:
    """`every`: [ranks, points, rounds] in us, nan where a rank's host was late."""
    found: dict[Point, Estimate] = {}
    logs: list[list[float]] = [[] for _ in every]
    for place, point in enumerate(points):
        every_round = zip(*(rank[place] for rank in every), strict=True)
        kept = [times for times in every_round if not any(map(math.isnan, times))]
        if len(kept) < _LEAST - 1:
            raise LokaError(
                f"the GPU waited for its host in {len(every[0][place]) - len(kept)} of "
                f"{len(every[0][place])} timings of {point[0]}, {point[1]} bytes",
                way_out="calibrate while nothing else runs on this machine's processors",
            )
        found[point] = median_interval([max(times) for times in kept])
        middles = [statistics.median(times) for times in zip(*kept, strict=True)]
        for rank, middle in enumerate(middles):
            logs[rank].append(math.log(middle / min(middles)))
    return found, [math.exp(statistics.fmean(rank)) for rank in logs]


def _lead(count: int) -> float:
    """Microseconds that a GPU waits for a host that queues so many calls."""
    return _AHEAD[0] + _AHEAD[1] * count


class _Clock:
    """Microseconds of a call, in the mean of several back to back behind one more."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._longer = device, 1.0

    def lead(self, count: int) -> float:
        """Microseconds that the GPU waits."""
        return min(self._longer * _lead(count), _LONGEST_WAIT)

    def us(self, call: Callable[[], object], count: int) -> float:
        """nan where the GPU waited for the host."""
        if self._device.type != "cuda":
            call()
            begun = time.perf_counter()
            for _ in range(count):
                call()
            return (time.perf_counter() - begun) * 1e6 / count
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(2e3 * self.lead(count)))  # cycles: of 2 GHz, and a wait is longer at less
        call()
        start.record()
        for _ in range(count):
            call()
        late = start.query()  # whoever waits for whom, this one rank's waits are its own affair
        end.record()
        end.synchronize()
        if late:
            self._longer *= 2
            return math.nan
        return max(start.elapsed_time(end) * 1e3 / count, 1e-3)


def memory_gbps(buffers: Buffers) -> Estimate:
    """GB/s that kernels between GEMMs reach: a copy, a product and a sum of whole buffers, in the middle, the
    slowest and the fastest of them."""
    source, target, clock = buffers.source, buffers.target, _Clock(buffers.device)
    size = source.numel() * ITEM
    kernels: tuple[tuple[int, Callable[[], object]], ...] = (
        (2, lambda: target.copy_(source)),
        (2, lambda: torch.mul(source, 2.0, out=target)),
        (3, lambda: torch.add(source, target, out=target)),
    )
    found = []
    for streams, kernel in kernels:
        clock.us(kernel, 2)
        times = [us for us in (clock.us(kernel, 4) for _ in range(_LEAST)) if not math.isnan(us)]
        if not times:
            raise LokaError(
                "the GPU waited for its host whenever its memory was timed",
                way_out="calibrate while nothing else runs on this machine's processors",
            )
        found.append(streams * size / statistics.median(times) / 1e3)
    return Estimate(statistics.median(found), min(found), max(found))
