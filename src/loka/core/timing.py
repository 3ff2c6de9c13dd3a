"""Timing of GPU work as a race: CUDA-graph replays, interleaved, the hopeless dropped early.

A round replays the graph of every function still in the race once, in random order, with the
L2 cache overwritten in between, so clock drift and cache state fall on all alike. Names are
compared within rounds: sequential means pick the wrong winner of a 2 % gap in 12-18 % of
cases, the median of paired log-ratios in 0.1 % at 25 rounds.

Most of 25 candidates are hopeless, so a fixed number of rounds spends most of its time on
what nobody will run. The race looks at the samples after every few rounds, drops whoever is
clearly slower than the leader, and ends when nothing is left open. `race` is this logic and
knows no GPU; `time_interleaved` captures the graphs and samples them.
"""

import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from loka.core.error import Estimate
from loka.core.exceptions import first_line
from loka.core.recording import Recording, record

Sample = Callable[[Sequence[str], int], Mapping[str, Sequence[float]]]
"""(names, rounds) -> microseconds of each name in each round; rounds are paired over names."""

# The level of the interval on which a name is dropped. The race looks at most 10 times (after
# 9, 15, ... 60 rounds) and drops on the lower end, so a name that in truth equals the leader is
# dropped in at most 10 * 0.25 % = 2.5 % of races (union bound, distribution-free).
LEVEL = 0.995
TIE = 0.01  # names within 1 % of the leader are equal to it for every purpose
MAX_ROUNDS = 60
_BATCH = 6

_CACHE_BYTES = 256 << 20  # several times the 60 MB L2 of an H200
_REPLAY_MICROSECONDS = 2000.0  # of the baseline: long against the 0.5 us resolution of events
_MAX_CALLS = 8


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One function: microseconds of a call, and the baseline's time over its own.

    Medians with distribution-free 95 % intervals, unbounded below 6 rounds. `speedup` comes from
    the rounds shared with the baseline, so clock drift cancels; `microseconds` of functions that
    left the race at different times were taken at different clocks.
    """

    microseconds: Estimate
    speedup: Estimate
    rounds: int


@dataclass(frozen=True, kw_only=True)
class Race:
    """What a race found. `samples` are microseconds by round, from the first round on.

    Attributes:
        winner: the fastest of those still running at the end; near-ties are not separated.
        ended: "decided", or "rounds" or "deadline" when those ran out with something open.
        failures: functions that raised, with the error's first line; they have no timing.
    """

    timings: Mapping[str, Timing]
    samples: Mapping[str, tuple[float, ...]]
    winner: str
    rounds: int
    ended: Literal["decided", "rounds", "deadline"]
    failures: Mapping[str, str] = field(default_factory=dict)


def median_interval(samples: Sequence[float], level: float = 0.95) -> Estimate:
    """Median with a distribution-free interval from order statistics (sign test, exact).

    Unbounded where so few samples allow no interval of this level (fewer than 6 for 95 %).
    """
    ordered = sorted(samples)
    count = len(ordered)
    middle = statistics.median(ordered)
    rank = _rank(count, level)
    if rank == 0:
        return Estimate(middle, -math.inf, math.inf)
    return Estimate(middle, ordered[rank - 1], ordered[count - rank])


@functools.lru_cache(maxsize=1024)
def _rank(count: int, level: float) -> int:
    """The largest r with P(Binomial(count, 1/2) < r) <= (1 - level) / 2."""
    total = rank = 0
    while True:
        total += math.comb(count, rank)
        if total / 2**count > (1 - level) / 2:
            return rank
        rank += 1


def race(
    sample: Sample,
    names: Sequence[str],
    *,
    baseline: str,
    keep: Collection[str] = (),
    rivals: Mapping[str, Collection[str]] | None = None,
    tie: float = TIE,
    max_rounds: int = MAX_ROUNDS,
    deadline: float | None = None,
) -> Race:
    """Samples `names` until each is clearly slower than its leader, tied with it, or time is up.

    After each batch of rounds a name is compared with the fastest of its rivals by the median of
    paired log-ratios. One whose interval at `LEVEL` lies above zero leaves with its samples. The
    rest is decided when every interval lies within `tie` and every speed-up is known to `tie`.

    Args:
        sample: measures; called for fewer names as the race goes on.
        baseline: speed-ups are over it; it is never dropped.
        keep: further names that are never dropped.
        rivals: for each name, those that may drive it out; by default all. A fast candidate
            that a budget may refuse must not drive out one that the budget would admit.
        deadline: of `time.monotonic()`. At least one batch is sampled, whatever the time.

    Raises ValueError for an unknown baseline and fewer than one round.
    """
    if baseline not in names:
        raise ValueError(f"baseline {baseline!r} is not among {sorted(names)}")
    if max_rounds < 1:
        raise ValueError(f"max_rounds is {max_rounds}; a race needs at least one")
    samples: dict[str, list[float]] = {name: [] for name in names}
    running = list(names)
    protected = {baseline, *keep}
    rounds = 0
    batch = _first_look()
    ended: Literal["decided", "rounds", "deadline"] | None = None
    while ended is None:
        batch = min(batch, max_rounds - rounds)
        for name, times in sample(tuple(running), batch).items():
            samples[name].extend(times)
        rounds += batch
        batch = _BATCH
        slower, undecided = _judge(samples, running, baseline, rivals, tie)
        running = [name for name in running if name not in slower or name in protected]
        if not undecided:
            ended = "decided"
        elif rounds >= max_rounds:
            ended = "rounds"
        elif deadline is not None and time.monotonic() >= deadline:
            ended = "deadline"
    return Race(
        timings={name: timing_of(samples[baseline], times) for name, times in samples.items()},
        samples={name: tuple(times) for name, times in samples.items()},
        winner=_fastest(_standings(samples, running)),
        rounds=rounds,
        ended=ended,
    )


def _first_look() -> int:
    """The fewest rounds that can separate two names at `LEVEL`: 9, all of one sign."""
    return next(count for count in range(1, 64) if _rank(count, LEVEL))


def _judge(
    samples: Mapping[str, Sequence[float]],
    running: Sequence[str],
    baseline: str,
    rivals: Mapping[str, Collection[str]] | None,
    tie: float,
) -> tuple[set[str], set[str]]:
    standings = _standings(samples, running)
    slower, undecided = set(), set()
    for name in running:
        against = [n for n in running if n == name or rivals is None or n in rivals.get(name, ())]
        leader = _fastest({n: standings[n] for n in against})
        if leader != name:
            behind = median_interval(_log_ratios(samples[name], samples[leader]), LEVEL)
            if behind.low > 0:
                slower.add(name)
                continue
            if not (behind.low >= -tie and behind.high <= tie):
                undecided.add(name)
        if name != baseline:
            speedup = median_interval(_log_ratios(samples[baseline], samples[name]))
            if speedup.high - speedup.low > 2 * tie:
                undecided.add(name)
    return slower, undecided


def _standings(samples: Mapping[str, Sequence[float]], running: Sequence[str]) -> dict[str, float]:
    """Median log time of each name against the middle of its rounds: drift falls out."""
    logs = {name: [math.log(time) for time in samples[name]] for name in running}
    middles = [statistics.median(together) for together in zip(*logs.values(), strict=True)]
    return {
        name: statistics.median(own - middle for own, middle in zip(times, middles, strict=True))
        for name, times in logs.items()
    }


def _fastest(standings: Mapping[str, float]) -> str:
    return min(standings, key=lambda name: (standings[name], name))


def _log_ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Of the rounds both ran in: everyone is there from the first round until it leaves."""
    return [math.log(a / b) for a, b in zip(above, below, strict=False)]


def timing_of(baseline: Sequence[float], times: Sequence[float]) -> Timing:
    """Of a function's microseconds by round, beside those of the baseline in the same rounds."""
    ratio = median_interval(_log_ratios(baseline, times))
    microseconds = median_interval(times)
    return Timing(
        microseconds=replace(microseconds, low=max(microseconds.low, 0.0)),
        speedup=ratio.mapped(math.exp),
        rounds=len(times),
    )


def time_interleaved(
    functions: Mapping[str, Callable[[], object]],
    *,
    baseline: str,
    device: torch.device,
    keep: Collection[str] = (),
    rivals: Mapping[str, Collection[str]] | None = None,
    tie: float = TIE,
    max_rounds: int = MAX_ROUNDS,
    deadline: float | None = None,
    seed: int = 0,
) -> Race:
    """Races `functions` under CUDA graphs; arguments as for `race`.

    A function should rotate its own buffers: each of the 1 to 8 calls captured in a graph is a
    call of it. One that raises is in `failures` and the others go on; what the baseline raises,
    and an error after which CUDA is unusable, is raised.

    Raises ValueError off CUDA and for an unknown baseline.
    """
    if device.type != "cuda":
        raise ValueError(f"times are taken under CUDA graphs; {device} has none")
    if baseline not in functions:
        raise ValueError(f"baseline {baseline!r} is not among {sorted(functions)}")
    with torch.cuda.device(device):
        cache = torch.empty(_CACHE_BYTES, dtype=torch.uint8, device=device)
        graphs, failures, calls = _capture_all(functions, baseline)
        generator = random.Random(seed)

        def sample(names: Sequence[str], rounds: int) -> dict[str, list[float]]:
            order = list(names)
            events = []
            for _ in range(rounds):
                generator.shuffle(order)
                for name in order:
                    cache.fill_(1)
                    events.append((name, *timed_replay(graphs[name])))
            return samples_of(events, names, calls)

        found = race(
            sample,
            list(graphs),
            baseline=baseline,
            keep=keep,
            rivals=rivals,
            tie=tie,
            max_rounds=max_rounds,
            deadline=deadline,
        )
    return replace(found, failures=failures)


def _capture_all(
    functions: Mapping[str, Callable[[], object]], baseline: str
) -> tuple[dict[str, Recording], dict[str, str], int]:
    # All graphs share one memory pool, so that 25 of them need the memory of one: each writes
    # its intermediates and outputs over the others'. That is sound because graphs are replayed
    # one after another, each writes before it reads, and nobody reads an output afterwards.
    place = _new_pool()
    warm_up(functions[baseline])
    alone = captured(functions[baseline], 1, place)
    alone.replay()
    events = [timed_replay(alone) for _ in range(3)]
    torch.cuda.synchronize()
    once = min(elapsed(begin, end) for begin, end in events)
    calls = max(1, min(_MAX_CALLS, round(_REPLAY_MICROSECONDS / once)))
    graphs, failures = {}, {}
    for name, function in functions.items():
        try:
            if name != baseline:
                warm_up(function)
            graphs[name] = captured(function, calls, place)
        except Exception as error:
            if name == baseline:
                raise
            if not still_usable():
                raise
            failures[name] = first_line(error)
            place = _new_pool()  # no later graph shares memory with a capture that failed
    for graph in graphs.values():
        graph.replay()
    return graphs, failures, calls


def warm_up(function: Callable[[], object], stream: torch.cuda.Stream | None = None) -> None:
    """Compiles kernels and creates library handles outside the capture."""
    stream = stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.synchronize()  # a fault of this function must not surface in the next one


def _new_pool() -> dict[str, Any]:
    """Where to capture. The stream is explicit because torch's own stays on the first device used."""
    return {"pool": torch.cuda.graph_pool_handle(), "stream": torch.cuda.Stream()}


def captured(function: Callable[[], object], calls: int, place: Mapping[str, Any]) -> Recording:
    """A graph of `calls` calls; `place`: its pool and stream. Raises what `function` raises; CUDA is then as before."""

    def body() -> None:
        for _ in range(calls):
            function()

    return record(body, place["stream"].device, **place)[0]


def timed_replay(graph: Recording) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Queued, with events around it that `elapsed` reads once the device is done."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    return begin, end


def event_on(device: torch.device) -> torch.cuda.Event:
    """An event recorded now on the current stream of `device`; `elapsed` reads the time between two of them."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def elapsed(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    """Microseconds, never zero: logarithms are taken of them."""
    return max(begin.elapsed_time(end) * 1e3, 1e-3)


def samples_of(
    events: Iterable[tuple[str, torch.cuda.Event, torch.cuda.Event]], names: Iterable[str], calls: int
) -> dict[str, list[float]]:
    """Microseconds of one of the `calls` in each replay of `timed_replay`, by name; waits for the device."""
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in names}
    for name, begin, end in events:
        samples[name].append(elapsed(begin, end) / calls)
    return samples


def still_usable() -> bool:
    """Whether CUDA still works: after an illegal memory access every later call fails too."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def is_broken(device: torch.device) -> bool:
    """Whether `device` is a GPU that nothing can be computed on any more in this process."""
    return device.type == "cuda" and not still_usable()
