"""Open-loop load test: requests arrive by a Poisson process, whether earlier ones are answered or not.

    latency = end of the answer - arrival          waiting in the queue included

A closed loop waits for an answer before it asks again, so a slow server is asked less often and looks fast. The test is
bounded: arrivals end after `seconds`, and a request that is not answered `grace` seconds later counts as unanswered.
Percentiles are over all requests that arrived. A request that failed or came too late counts as slower than every
answered one: over the answered requests alone an overloaded server would look fast.
"""

import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loka.core.exceptions import ServeRefused, first_line

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
MOST_REQUESTS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a load test found. Latencies are in milliseconds, by percentile, over all requests that arrived; inf where
    that many were not answered. `rate`: requests a second that were asked for. `capacity`: requests a second that
    one thread answered back to back before the test. `failed` requests raised an error, and `unanswered` ones were
    late.
    """

    seconds: float
    rate: float
    capacity: float
    arrived: int
    answered: int
    failed: int
    unanswered: int
    milliseconds: dict[float, float]
    first_error: str = ""

    @property
    def p99_over_p50(self) -> float:
        """inf where the 99th percentile was not answered."""
        p99 = self.milliseconds[99.0]
        return p99 / self.milliseconds[50.0] if math.isfinite(p99) else math.inf

    def __str__(self) -> str:
        latencies = ", ".join(f"p{p:g} {_shown(value)}" for p, value in self.milliseconds.items())
        ratio = f"p99/p50 {self.p99_over_p50:.2f}; " if math.isfinite(self.p99_over_p50) else ""
        text = (
            f"{self.arrived} requests in {self.seconds:g} s at {self.rate:.1f}/s, "
            f"{self.rate / self.capacity:.0%} of the {self.capacity:.1f}/s that one thread answers "
            f"back to back; of all that arrived: {latencies}; "
            f"{ratio}{self.unanswered} unanswered, {self.failed} failed"
        )
        return f"{text} ({self.first_error})" if self.first_error else text


def _shown(milliseconds: float) -> str:
    return f"{milliseconds:.3f} ms" if math.isfinite(milliseconds) else "not answered"


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` percent of the values do not exceed (nearest rank); nan without values."""
    ordered = sorted(values)
    rank = math.ceil(round(share * len(ordered) / 100, 6))
    return ordered[max(rank, 1) - 1] if ordered else math.nan


def arrivals(rate: float, seconds: float, seed: int, *, even: bool = False) -> list[float]:
    """Arrival times in seconds, in [0, seconds), of a Poisson process of `rate` a second. With `even` they are evenly
    spaced.
    """
    draw, times, now = random.Random(seed), [], 0.0
    while (now := now + (1 / rate if even else draw.expovariate(rate))) < seconds:
        times.append(now)
    return times


def measure_capacity(answer: Callable[[int], object], *, seconds: float = 1.0) -> float:
    """How many requests a second one thread answers back to back, after three that warm up. Requests that fail take
    their time and do not count, so that a server which fails now and then can be tested.

    Raises ServeRefused where no request is answered.
    """
    failed = ""

    def answers(turn: int) -> bool:
        nonlocal failed
        try:
            answer(turn)
        except Exception as error:  # what a server raises
            failed = failed or first_line(error)
            return False
        return True

    for turn in range(3):
        answers(turn)
    began, asked, count = time.perf_counter(), 0, 0
    while (spent := time.perf_counter() - began) < seconds or not asked:
        count += answers(asked)
        asked += 1
    if not count:
        raise ServeRefused(
            f"the server answered none of the {asked} requests that measure its capacity",
            why=[failed],
            way_out="ask for a single answer first; requests that fail are counted where some are answered",
        )
    return count / spent


def load_test(
    answer: Callable[[int], object],
    *,
    rate: float | None = None,
    load: float = 0.7,
    seconds: float = 10.0,
    threads: int = 1,
    grace: float = 5.0,
    seed: int = 0,
    even: bool = False,
) -> Load:
    """Asks `answer(number of the request)` from `threads` threads; it returns when the answer is complete.

    Args:
        rate: arrivals a second; if it is left out, `load` times the capacity of one thread.
        even: arrivals are evenly spaced, so that requests wait only for delays of the server's own.

    Raises ServeRefused for an impossible rate, time or number of threads, for no request or more than a million, and
    for a server that answers none before the test. Requests that fail later are counted.
    """
    capacity = measure_capacity(answer, seconds=min(1.0, max(seconds, 0.01)))
    rate = load * capacity if rate is None else rate
    if not (0 < rate < math.inf and 0 < seconds < math.inf and threads > 0 and grace >= 0):
        raise ServeRefused(
            f"no load test has rate={rate}, seconds={seconds}, threads={threads}, grace={grace}",
            way_out="positive numbers, such as load=0.7, seconds=10, threads=1",
        )
    if rate * seconds > MOST_REQUESTS:
        raise ServeRefused(
            f"{rate * seconds:.0f} requests are more than {MOST_REQUESTS}", way_out="a lower rate or fewer seconds"
        )
    due = arrivals(rate, seconds, seed, even=even)
    if not due:
        raise ServeRefused(
            f"no request arrives in {seconds:g} s at {rate:.3g} a second", way_out="more seconds, or a higher rate"
        )
    latencies, errors = _run(answer, due, threads, seconds + grace)
    never = [math.inf] * (len(due) - len(latencies))
    return Load(
        seconds=seconds,
        rate=rate,
        capacity=capacity,
        arrived=len(due),
        answered=len(latencies),
        failed=len(errors),
        unanswered=len(due) - len(latencies) - len(errors),
        milliseconds={share: 1e3 * percentile([*latencies, *never], share) for share in PERCENTILES},
        first_error=errors[0] if errors else "",
    )


def _run(
    answer: Callable[[int], object], due: Sequence[float], threads: int, limit: float
) -> tuple[list[float], list[str]]:
    """Latencies in seconds, and errors, until `limit`. A request that is late by then may run on in a daemon thread."""
    turns = iter(range(len(due)))
    latencies: list[float] = []
    errors: list[str] = []
    closed = threading.Event()
    began = time.perf_counter()

    def work() -> None:  # each waits for an arrival itself: a thread that handed them out would add its own delays
        while (turn := next(turns, None)) is not None:
            time.sleep(max(due[turn] - (time.perf_counter() - began), 0))
            if closed.is_set():
                return
            try:
                answer(turn)
            except Exception as error:  # what a server raises is what is counted
                errors.append(first_line(error))
            else:
                latencies.append(time.perf_counter() - began - due[turn])

    workers = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(max(limit - (time.perf_counter() - began), 0))
    finally:
        closed.set()  # where Ctrl-C ends it, too: no request is asked from then on
    return list(latencies), list(errors)
