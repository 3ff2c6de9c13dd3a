"""Captures each arm as it is ready, and replays all of them in turns.

`loka.core.timing.time_interleaved` captures all functions at once; here an arm is captured before the next
is compiled, since dynamo is reset between them and would compile an arm anew that is called again. Rounds,
dropping of caches and intervals are those of `loka.core.timing`.
"""

import gc
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from loka.core.error import Estimate
from loka.core.recording import Recording
from loka.core.timing import Race, captured, median_interval, race, samples_of, timed_replay, warm_up

Step = Callable[[], object]

_CACHE_BYTES = 256 << 20  # several times the L2
_REPLAY_SECONDS = 2e-3  # long against the 0.5 us resolution of events
_MAX_CALLS = 8


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel of one call: how often it ran, and the microseconds of all its runs together."""

    name: str
    count: float
    microseconds: float


@dataclass
class Arms:
    """What is ready to be timed on `device`; on a CPU plain calls stand for replays.

    All graphs share a memory pool: replayed one after the other, each writes before it reads, and nobody
    reads an output afterwards.
    """

    device: torch.device
    steps: dict[str, Step] = field(default_factory=dict)
    graphs: dict[str, Recording] = field(default_factory=dict)
    calls: int = 0  # of every graph, set by the first arm
    traced: bool = False  # whether `kernels` will be asked for
    first: Recording | None = None

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            self._new_pool()
            if self.traced:  # sets the tracer up, which had better know graphs from their capture on
                with profile(activities=[ProfilerActivity.CUDA]):
                    torch.zeros(1, device=self.device)

    def add(self, name: str, step: Step, leaves: Sequence[torch.Tensor]) -> None:
        """Warms `step` up on the stream of the capture, then captures it; gradients are given back after.

        What the step or its capture raises is raised, and the other arms are as they were.
        """
        if self.device.type != "cuda":
            step()
            self.steps[name], self.calls = step, 1
            return
        warm_up(step, self.stream)
        try:
            if not self.calls:
                self.calls = self._calls(step)
            graph = self._capture(step, self.calls)
        except Exception:
            self._new_pool()  # no later graph shares memory with a capture that failed
            raise
        graph.replay()
        torch.cuda.synchronize()
        self.steps[name], self.graphs[name] = step, graph  # the step keeps alive what the graph reads
        for leaf in leaves:
            leaf.grad = None
        gc.collect()

    def race(self, *, baseline: str, rounds: int) -> Race:
        """Every arm in every round, in random order, from a cold cache."""
        generator = random.Random(0)
        sample = self._replayed if self.graphs else self._called
        return race(
            lambda names, count: sample(names, count, generator),
            list(self.steps),
            baseline=baseline,
            keep=list(self.steps),
            max_rounds=rounds,
        )

    def kernels(self, name: str) -> list[Kernel]:
        """Of one call of an arm, by their time, the longest first. On a CPU: its operations."""
        if not self.graphs:
            return self._profiled(self.steps[name], 1)
        return self._profiled(self.graphs[name].replay, self.calls)

    def close(self) -> None:
        """Lets go of graphs and models."""
        self.first = None
        self.graphs.clear()
        self.steps.clear()
        torch._dynamo.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _new_pool(self) -> None:
        self.stream = torch.cuda.Stream(self.device)
        self.pool = torch.cuda.graph_pool_handle()

    def _calls(self, step: Step) -> int:
        # Kept: a pool that no graph holds while gradients lie in it takes no further capture.
        self.first = alone = self._capture(step, 1)
        alone.replay()
        once = min(samples_of([("", *timed_replay(alone))], [""], 1)[""][0] for _ in range(3)) / 1e6
        return max(1, min(_MAX_CALLS, round(_REPLAY_SECONDS / once)))

    def _capture(self, step: Step, calls: int) -> Recording:
        return captured(step, calls, {"pool": self.pool, "stream": self.stream})

    def _replayed(self, names: Sequence[str], rounds: int, generator: random.Random) -> dict[str, list[float]]:
        cache = torch.empty(_CACHE_BYTES, dtype=torch.uint8, device=self.device)
        events = []
        for _ in range(rounds):
            for name in generator.sample(names, len(names)):
                cache.fill_(1)
                events.append((name, *timed_replay(self.graphs[name])))
        return samples_of(events, names, self.calls)

    def _called(self, names: Sequence[str], rounds: int, generator: random.Random) -> dict[str, list[float]]:
        samples: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds):
            for name in generator.sample(names, len(names)):
                began = time.perf_counter()
                self.steps[name]()
                samples[name].append((time.perf_counter() - began) * 1e6)
        return samples

    def _profiled(self, run: Step, calls: int) -> list[Kernel]:
        cuda = self.device.type == "cuda"
        activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
        run()
        self._synchronize()
        with profile(activities=[activity]) as found:
            run()
            self._synchronize()
        kernels = [
            Kernel(
                name=event.key,
                count=event.count / calls,
                microseconds=(event.self_device_time_total if cuda else event.self_cpu_time_total) / calls,
            )
            for event in found.key_averages()
            if not cuda or event.device_type == DeviceType.CUDA
        ]
        return sorted(kernels, key=lambda kernel: -kernel.microseconds)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def ratio(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """The median of paired ratios, with a 95 % interval; unbounded below 6 rounds."""
    logs = median_interval([math.log(a / b) for a, b in zip(above, below, strict=True)])
    return Estimate(math.exp(logs.value), math.exp(logs.low), math.exp(logs.high))
