"""Work spread over threads: results in order, or as they are done. Arrow and numpy release Python's lock.

Both are generators that own their threads: when one is closed, or an exception passes through it (an
interrupt too), what has not begun is cancelled and the threads end before it returns.
"""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from threading import Event
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def processors() -> int:
    """How many CPUs this process may use; under torchrun its share of those of the machine."""
    present = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(present // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def in_order(function: Callable[[T], R], items: Iterable[T], *, workers: int, ahead: int) -> Generator[R, None, None]:
    """`function` of each item in the items' order; at most `ahead` results are begun or wait to be taken."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix="loka-data")
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def as_done(
    function: Callable[[T], R], items: Iterable[T], *, workers: int, stop: Event | None = None
) -> Generator[R, None, None]:
    """`function` of each item, whichever is done first; `workers` results at most are begun or wait.

    `stop` is set before threads are waited for, so that a long `function` can look at it and give up.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix="loka-data")
    running: set[Future[R]] = set()
    try:
        for item in items:
            running.add(pool.submit(function, item))
            if len(running) >= workers:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    finally:
        if stop is not None:
            stop.set()
        pool.shutdown(cancel_futures=True)
