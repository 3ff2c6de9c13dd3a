"""Timing of GPU work: CUDA-graph replays, interleaved, with quantiles and paired ratios.

Each function is captured once, `calls` times over, into a graph. A round replays every graph
once in random order, with the L2 cache overwritten in between, so clock drift and cache
state fall on all alike. The ratio to the baseline is taken within a round: sequential means
pick the wrong winner of a 2 % gap in 12-18 % of cases, the median of paired log-ratios in
0.1 % at 25 rounds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from loka.core.error import Estimate

_CACHE_BYTES = 256 << 20  # several times the 60 MB L2 of an H200


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Microseconds of one call (median and its interval) and speed-up over the baseline."""

    microseconds: Estimate
    speedup: Estimate


def median_interval(samples: Sequence[float]) -> Estimate:
    """Median with a distribution-free 95 % interval from order statistics.

    Ranks n/2 -+ 0.98 sqrt(n), the normal approximation of the sign test (Conover 1999, 3.2).
    """
    ordered = sorted(samples)
    count = len(ordered)
    half = 0.98 * math.sqrt(count)
    low = max(math.floor(count / 2 - half), 0)
    high = min(math.ceil(count / 2 + half), count - 1)
    middle = ordered[count // 2] if count % 2 else (ordered[count // 2 - 1] + ordered[count // 2]) / 2
    return Estimate(middle, ordered[low], ordered[high])


def time_interleaved(
    functions: Mapping[str, Callable[[], object]],
    *,
    baseline: str,
    device: torch.device,
    calls: int = 8,
    rounds: int = 25,
    seed: int = 0,
) -> dict[str, Timing]:
    """Times each function under a CUDA graph. A function should rotate its own buffers.

    Raises ValueError off CUDA and for an unknown baseline.
    """
    if device.type != "cuda":
        raise ValueError(f"times are taken under CUDA graphs; {device} has none")
    if baseline not in functions:
        raise ValueError(f"baseline {baseline!r} is not among {sorted(functions)}")
    graphs = {name: _capture(function, calls, device) for name, function in functions.items()}
    samples: dict[str, list[float]] = {name: [] for name in functions}
    cache = torch.empty(_CACHE_BYTES, dtype=torch.uint8, device=device)
    order = list(graphs)
    generator = random.Random(seed)
    for graph in graphs.values():
        graph.replay()
    events = []
    for _ in range(rounds):
        generator.shuffle(order)
        for name in order:
            cache.fill_(1)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graphs[name].replay()
            end.record()
            events.append((name, begin, end))
    torch.cuda.synchronize(device)
    for name, begin, end in events:
        samples[name].append(begin.elapsed_time(end) * 1e3 / calls)
    return {
        name: Timing(
            microseconds=median_interval(times),
            speedup=_ratio(samples[baseline], times),
        )
        for name, times in samples.items()
    }


def _ratio(baseline: Sequence[float], times: Sequence[float]) -> Estimate:
    logs = [math.log(base / time) for base, time in zip(baseline, times, strict=True)]
    estimate = median_interval(logs)
    return Estimate(math.exp(estimate.value), math.exp(estimate.low), math.exp(estimate.high))


def _capture(function: Callable[[], object], calls: int, device: torch.device) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles kernels and creates library handles outside the capture
            function()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    return graph
