"""What a probe costs training: steps that it leaves alone, steps that it samples, and the share that results.

    python benchmarks/probe_overhead/probe_overhead.py --out benchmarks/probe_overhead/cpu.json
    python benchmarks/probe_overhead/probe_overhead.py --device cuda --model wukong:2gf --batch 8192 \\
        --how graph --out benchmarks/probe_overhead/h200.json

One training step (forward, loss, backward, Adam; embedding tables are looked up and not updated) on random
rows that lie on the device, the model's parts compiled (`--how compile`) and the whole step in a CUDA graph
(`--how graph`). Three measurements:

1. Segments of steps with a probe attached that samples none of them, interleaved with segments without one:
   the median of the paired ratios, with its 95 % interval by signs.
2. Sampled steps, each timed with the step after it, against plain ones; and the most memory of either.
3. A run with every="auto" for the rest of `--seconds`, against its own plain steps.

From 1 and 2 follows the share in runs of any length: the schedule is computed with the measured times.
Between 2 and 3 the operations of one sampled step are counted: on a GPU each that is no view is a launch.
What is measured is printed and written at once, so a killed run keeps it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import loka
from loka.core.device import fingerprint
from loka.core.storage.codec import encode
from loka.core.storage.files import write_atomic
from loka.core.table import format_table
from loka.probe.sampling_schedule import Auto
from loka.train.steps.graphed import graphed
from loka.train.steps.step_time import compiled
from loka.zoo import build

OVERHEAD = 0.01
NEVER = 1 << 40
FEWEST = 7  # pairs of segments
LEAST = 0.2  # of the time that every="auto" gets, whatever was left of it
LENGTHS = (1_000, 10_000, 100_000, 1_000_000)


@dataclass
class Training:
    """`plain` takes a step as training does, `eager` one that calls the model; both on the next batch."""

    model: nn.Module
    plain: Callable[[], object]
    eager: Callable[[], object]
    device: torch.device

    def timed(self, step: Callable[[], object]) -> float:
        self.wait()
        begin = time.perf_counter()
        step()
        self.wait()
        return time.perf_counter() - begin

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="wukong:small", help="name:size of loka.zoo")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--how", choices=("eager", "compile", "graph"), default="compile")
    parser.add_argument("--features", type=int, default=26, help="sparse ones")
    parser.add_argument("--table", type=int, default=1000, help="rows of each table")
    parser.add_argument("--rounds", type=int, default=41, help="pairs of segments")
    parser.add_argument("--segment", type=int, default=5, help="steps in one")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0, help="for all of it, once compiled")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    begin = time.perf_counter()

    def note(what: str, value: object, line: str) -> None:
        """Prints and keeps what was measured, and when."""
        found[what] = value
        print(f"[{time.perf_counter() - begin:.0f} s] {line}", flush=True)
        if arguments.out:
            write_atomic(arguments.out, json.dumps(found, indent=1).encode() + b"\n")

    training = prepare(arguments)
    found: dict[str, Any] = {
        "machine": encode(fingerprint(training.device)),
        "threads": torch.get_num_threads(),
        "settings": {name: str(value) for name, value in vars(arguments).items() if name != "out"},
    }
    for _ in range(8):  # compiles, and records the graph
        training.plain()
    training.wait()
    note("first_steps_s", time.perf_counter() - begin, "the first steps were taken: compiled, and recorded")
    end = time.perf_counter() + arguments.seconds
    plain = attached(training, arguments.rounds, arguments.segment, until=end - 0.7 * arguments.seconds)
    note("attached", plain, attached_line(plain))
    times = sampled(training, arguments.samples)
    note("sampled", times, sampled_lines(times))
    shares = {steps: schedule(times["plain_s"], times["cost_s"], steps) for steps in LENGTHS}
    note("schedule", shares, schedule_table(shares))
    counts = operations(training)
    note("operations", counts, operations_line(counts))
    held = auto(training, until=max(end, time.perf_counter() + LEAST * arguments.seconds))
    note("auto", held, auto_line(held))


def prepare(arguments: argparse.Namespace) -> Training:
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    name, _, size = arguments.model.partition(":")
    sizes = [arguments.table] * arguments.features
    with device:
        model = build(name, dense_features=13, vocab_sizes=sizes, size=size or "small")
        dense = torch.randn(4, arguments.batch, 13)
        sparse = torch.randint(arguments.table, (4, arguments.batch, arguments.features))
        label = (torch.rand(4, arguments.batch) < 0.25).float()
    loka.mods.apply(model, [loka.mods.NoBias(), loka.mods.BlockNorm(256)])
    model.to(device).train()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.weight.requires_grad_(False)
            module.register_forward_hook(wants_gradient)
    if arguments.how != "eager":
        compiled(model)
    on_gpu = device.type == "cuda"
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, 1e-4, capturable=on_gpu)

    def step(dense: torch.Tensor, sparse: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            logits = model(dense, sparse)
        loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), label)
        loss.backward()
        optimizer.step()
        return loss

    at = 0

    def batch() -> tuple[torch.Tensor, ...]:
        nonlocal at
        at += 1
        return dense[at % 4], sparse[at % 4], label[at % 4]

    if arguments.how != "graph":
        return Training(model, lambda: step(*batch()), lambda: step(*batch()), device)
    whole = graphed(step, *batch(), model=model, optimizers=optimizer)

    def eager() -> object:
        # On the graph's stream, as its own eager steps: autograd remembers where it saw a parameter.
        return whole.eager(*batch())

    return Training(model, lambda: whole(*batch()), eager, device)


def wants_gradient(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    """Tables get no update: what that costs depends on their size, and would make a share smaller."""
    return output.detach().requires_grad_()


def attached(training: Training, rounds: int, segment: int, *, until: float) -> dict[str, Any]:
    probe = loka.Probe(training.model, every=NEVER)
    with probe:
        run_probed(training, probe)  # the first step is sampled
    ratios, plain = [], []

    def without() -> None:
        for _ in range(segment):
            training.plain()

    def watched() -> None:
        with probe:
            for _ in range(segment):
                run_probed(training, probe)

    for at in range(rounds):
        if at >= FEWEST and time.perf_counter() > until:
            break
        first, second = (without, watched) if at % 2 else (watched, without)
        took = {first: training.timed(first), second: training.timed(second)}
        ratios.append(took[watched] / took[without])
        plain.append(took[without] / segment)
    ratios.sort()
    rounds = len(ratios)
    low = max(rounds // 2 - math.ceil(0.98 * math.sqrt(rounds)), 0)
    return {
        "plain_s": median(plain),
        "ratio": median(ratios),
        "low": ratios[low],
        "high": ratios[rounds - 1 - low],
        "rounds": rounds,
        "steps": segment,
    }


def run_probed(training: Training, probe: loka.Probe) -> None:
    """One step of a probed training."""
    (training.eager if probe.next_step() else training.plain)()


def sampled(training: Training, samples: int) -> dict[str, Any]:
    """Every seventh step; the first sample and what is timed before it are left out."""
    probe, apart = loka.Probe(training.model, every=7), 7
    plain: list[float] = []
    costs: list[tuple[float, float]] = []
    plain_peak = sampled_peak = 0
    with probe:
        for at in range(apart * (samples + 1)):
            due = probe.next_step()
            with Peak(training.device) as peak:
                took = training.timed(training.eager if due else training.plain)
            if at < apart:
                continue
            if due:
                costs.append((took, 0.0))
                sampled_peak = max(sampled_peak, peak.bytes)
            elif at % apart == 1:  # it may pay for what the sample left behind
                costs[-1] = (costs[-1][0], took)
            else:
                plain.append(took)
                plain_peak = max(plain_peak, peak.bytes)
    usual = median(plain)
    extra = [took + after - 2 * usual for took, after in costs]
    return {
        "plain_s": usual,
        "cost_s": median(extra),
        "costs_s": extra,
        "kept_bytes": probe.memory(),
        "plain_peak_bytes": plain_peak,
        "sampled_peak_bytes": sampled_peak,
        "sites": len(probe.stats().layers),
    }


def schedule(plain: float, cost: float, steps: int) -> dict[str, float]:
    """Of a run of `steps` whose times are always these."""
    cadence, after = Auto(overhead=OVERHEAD), -2
    taken = 0
    for step in range(steps):
        due = cadence.due(step)
        cadence.costs.took(step, plain + cost if due else plain)
        taken += due
        after = step if due else after
    return {"samples": taken, "last": after, "share": taken * cost / (steps * plain)}


def auto(training: Training, *, until: float) -> dict[str, Any]:
    """Marks of time at each step's begin, which costs no wait."""
    probe, steps = loka.Probe(training.model, every="auto", overhead=OVERHEAD), 0
    training.wait()
    begin, first = time.perf_counter(), 0.0
    with probe:
        while time.perf_counter() < until:
            run_probed(training, probe)
            steps += 1
            if steps % 16 == 0 or steps == 1:
                training.wait()  # or the CPU runs far ahead of what `until` means
            if steps == 1:
                first = time.perf_counter() - begin
        training.wait()
    took = time.perf_counter() - begin
    stats = probe.stats()
    return {
        "steps": steps,
        "seconds": took,
        "first_step_s": first,
        "samples": stats.sampled_steps,
        "own_share": probe.overhead,
    }


class Operations(TorchDispatchMode):
    """Counts what is dispatched, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def operations(training: Training) -> dict[str, int]:
    """Of an eager step, and of a sampled one that is not its probe's first."""
    found = {}
    probe = loka.Probe(training.model, every=1)
    with torch.compiler.set_stance("force_eager"):
        for name, watching in (("eager", contextlib.nullcontext()), ("sampled", probe)):
            with watching:
                for counted in (False, True):
                    if name == "sampled":
                        probe.next_step()
                    with Operations() as seen:
                        training.eager()
                    if counted:
                        found[name] = seen.count
    return found


class Peak:
    """The most memory between its begin and end, above what was there: of the GPU, or of the process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes = 0

    def __enter__(self) -> Peak:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
            self._before = resident("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self.bytes = torch.cuda.max_memory_allocated(self._device) - self._before
        else:
            self.bytes = resident("VmHWM") - self._before


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def attached_line(found: dict[str, Any]) -> str:
    change = [100 * (found[name] - 1) for name in ("ratio", "low", "high")]
    return (
        f"plain step {1e3 * found['plain_s']:.2f} ms; a step that is not sampled costs "
        f"{change[0]:+.2f} % ({change[1]:+.2f} to {change[2]:+.2f}) more with a probe attached"
    )


def sampled_lines(found: dict[str, Any]) -> str:
    kept = sum(found["kept_bytes"].values())
    extra = found["sampled_peak_bytes"] - found["plain_peak_bytes"]
    return (
        f"a sampled step costs {1e3 * found['cost_s']:.0f} ms more, {found['cost_s'] / found['plain_s']:.0f} "
        f"plain steps, for {found['sites']} layers\n"
        f"kept: {kept / 2**20:.1f} MiB; peak of a sampled step above a plain one's: {extra / 2**20:.1f} MiB"
    )


def operations_line(found: dict[str, int]) -> str:
    return f"operations of an eager step: {found['eager']:,}; of a sampled one: {found['sampled']:,}"


def schedule_table(found: dict[int, dict[str, float]]) -> str:
    rows = [(f"{n:,}", str(int(s["samples"])), f"{100 * s['share']:.2f} %") for n, s in found.items()]
    return 'every="auto" would give, with these times:\n' + format_table(
        ("steps of a run", "samples", "share"), rows
    )


def auto_line(found: dict[str, Any]) -> str:
    share = "unknown" if found["own_share"] is None else f"{100 * found['own_share']:.2f} %"
    return (
        f'every="auto": {found["samples"]} samples in {found["steps"]} steps, {found["seconds"]:.0f} s; '
        f"by its own clock {share}; the first step took {found['first_step_s']:.1f} s"
    )


if __name__ == "__main__":
    main()
