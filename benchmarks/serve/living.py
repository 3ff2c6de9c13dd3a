"""A server under load, under new weights, and from a folder."""

import json
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from arms import How
from cells import Cell

from loka.core import compiling
from loka.serve import Server, graphs, load, loading
from loka.serve.load_test import load_test, percentile
from loka.serve.rows import leaves

REQUESTS = 32  # different ones, asked in turn


def request_of(cell: Cell, how: How, rows: int, seed: int = 7) -> list[torch.Tensor]:
    """Random normal rows on the device."""
    generator = torch.Generator(how.device).manual_seed(seed)
    tensors, _ = replace(cell, rows=1).batch(how.device, tiny=how.tiny)
    return [torch.randn(rows, *t.shape[1:], device=how.device, generator=generator).to(t.dtype) for t in tensors]


def asker_of(cell: Cell, how: How, server: Server, bucket: int) -> Callable[[int], Any]:
    """Asks for as many rows, at random, as `bucket` answers, and waits; each thread has a stream."""
    draw, here = random.Random(bucket), threading.local()
    less = max((other for other in server.card.buckets if other < bucket), default=0)
    requests = [request_of(cell, how, draw.randint(less + 1, bucket), seed) for seed in range(REQUESTS)]

    def ask(turn: int) -> Any:
        request = requests[turn % REQUESTS]
        if how.device.type == "cpu":
            return server(request)
        here.stream = getattr(here, "stream", None) or torch.cuda.Stream()
        with torch.cuda.stream(here.stream):
            answer = server(request)
            here.stream.synchronize()
        return answer

    return ask


def while_asked(
    call: Callable[[int], object], threads: int, meanwhile: Callable[[], object]
) -> list[BaseException | None]:
    """`meanwhile()` while threads call with rising numbers; what each raised, which ended it."""
    done = threading.Event()

    def work(turn: int) -> None:
        while not done.is_set():
            call(turn)
            turn += threads

    with ThreadPoolExecutor(threads) as pool:
        working = [pool.submit(work, turn) for turn in range(threads)]
        try:
            meanwhile()
        finally:
            done.set()
        return [each.exception() for each in working]


def under_load(cell: Cell, how: How, server: Server, bucket: int, seconds: float) -> dict[str, Any]:
    """Latencies at 70 % of what 4 threads get back to back: arrivals by a clock, and Poisson's."""
    ask, times = asker_of(cell, how, server, bucket), list[float]()
    for turn in range(REQUESTS):
        ask(turn)
    while_asked(lambda turn: (ask(turn), times.append(time.perf_counter())), 4, lambda: time.sleep(1))
    saturated = (len(times) - 1) / (times[-1] - times[0])
    found: dict[str, Any] = {"saturated_per_s": saturated}
    for name, even in (("even", True), ("poisson", False)):
        one = load_test(ask, rate=0.7 * saturated, seconds=seconds, threads=4, even=even)
        found[name] = vars(one) | {"p99_over_p50": one.p99_over_p50}
    return found


def refreshed(cell: Cell, how: How, server: Server) -> dict[str, Any]:
    """New weights alone, and while requests go on, each of which must be answered by one version whole."""
    state, buckets = cell.model(how.device, tiny=how.tiny).bfloat16().state_dict(), server.card.buckets
    states = (state, {key: value.roll(1, 0) if value.dim() > 1 else value for key, value in state.items()})
    ask, answers, spent = asker_of(cell, how, server, buckets[len(buckets) // 2]), [], []
    for weights in states:
        began = time.perf_counter()
        server.refresh(weights)
        spent.append(time.perf_counter() - began)
        answers.append([leaves(ask(turn).output)[0].clone() for turn in range(REQUESTS)])
    found: dict[str, Any] = {"refresh_s": spent, "parameters": sum(v.numel() for v in state.values())}
    if how.device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        server.refresh(state)
        end.record()
        torch.cuda.synchronize()
        kernels = launched(lambda: server.refresh(states[1]))
        found |= {"device_ms": sum(us for _, _, us in kernels) / 1e3, "span_ms": begin.elapsed_time(end)}
        found["longest"] = kernels[:8]
    last, times, mixed = server.version, list[float](), list[int]()

    def check(turn: int) -> None:
        began = time.perf_counter()
        answer = ask(turn)
        times.append(time.perf_counter() - began)
        right = answers[(answer.version - last + 1) % 2][turn % REQUESTS]
        if not torch.equal(leaves(answer.output)[0], right):
            mixed.append(turn)

    lost = while_asked(check, 3, lambda: [server.refresh(states[turn % 2]) for turn in range(6)])
    found |= {"p50_p99_ms": [1e3 * percentile(times, share) for share in (50.0, 99.0)]}
    return found | {"asked": len(times), "mixed": len(mixed), "lost": [str(e) for e in lost if e]}


def launched(call: Callable[[], object]) -> list[tuple[str, int, float]]:
    """Name, how often, and microseconds of what a call has the device do, the longest first."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    found = [
        (event.key, event.count, float(event.self_device_time_total))
        for event in profile.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return sorted(found, key=lambda each: -each[2])


def load_times(command: list[str], server: Server) -> dict[str, Any]:
    """Seconds of `load`, in a fresh process whose compile caches are this one's."""
    with tempfile.TemporaryDirectory() as folder:
        server.save(folder)
        done = subprocess.run([*command, "--load-from", folder], capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1])) if done.stdout else {"failed": done.stderr[-400:]}


def load_here(cell: Cell, how: How, folder: Path) -> dict[str, float]:
    """All of it, and parts: `_graph` compiles and holds `record`; `check` is of kernels and the plan."""
    model, spent = cell.model(how.device, tiny=how.tiny).bfloat16().eval(), dict[str, float]()

    def timed(function: Any, *args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            name = function.__name__
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - began

    for owner, name in (
        (loading, "_read"), (compiling, "_compiled"), (loading, "_check_same"), (loading, "check"),
        (graphs, "record"), (graphs, "_microseconds"), (graphs.Capturer, "_graph"),
    ):  # fmt: skip
        setattr(owner, name, _wrapped(timed, getattr(owner, name)))
    timed(load, folder, model)
    return spent


def _wrapped(timed: Any, function: Any) -> Any:
    return lambda *args, **options: timed(function, *args, **options)
