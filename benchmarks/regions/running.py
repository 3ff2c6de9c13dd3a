"""One cell: its arms made ready one by one, then raced; the record of all that was found."""

import argparse
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from arms import BF16, LOKA, OURS, WHOLE, How, build, in_float32, missing, plan_of
from cells import Cell
from checks import allocated, errors, memory, of_compilation, of_plan, ran, seen
from race import Arms, Kernel, ratio

import loka
from loka.core.device import fingerprint
from loka.core.exceptions import first_line
from loka.core.storage.codec import encode
from loka.core.timing import Race, median_interval

_TOP = 25  # kernels of an arm that are kept
_WRONG = 0.3  # of the output's norm: untrained FP8 towers are 3 to 11 % off


def measure_cell(cell: Cell, names: Sequence[str], how: How, *, rounds: int, kernels: bool = False) -> dict[str, Any]:
    """The record of a cell. What an arm raises stands in it, with its traceback, and the others go on."""
    began = time.monotonic()
    arms = Arms(how.device, traced=kernels)
    found: dict[str, dict[str, Any]] = {}
    record: dict[str, Any] = {
        "cell": cell.name,
        "rows": cell.rows,
        "kind": "training" if cell.trained else "inference",
        **conditions(how),
        "arms": found,
        "us": {},
        "fatal": False,
    }
    references: dict[str, dict[str, torch.Tensor]] = {}
    try:
        try:
            references["float32"] = seen(in_float32(cell, how))
        except torch.OutOfMemoryError as error:  # the arms need less
            record["float32"] = _failure("float32", error)
        for name in names:
            at = time.monotonic()
            try:
                found[name] = _prepare(name, cell, how, arms, record, references)
            except torch.AcceleratorError:
                raise
            except Exception as error:
                found[name] = _failure(name, error)
            found[name]["seconds"] = round(time.monotonic() - at, 1)
            tell(f"  {name}: {found[name].get('failure', 'ready')} ({found[name]['seconds']} s)")
        if arms.steps:
            _race(arms, record, rounds)
        if kernels:
            for name in arms.steps:
                found[name]["kernels"] = [asdict(kernel) for kernel in _kernels(arms, name)]
            record["kernels"] = True
    except torch.AcceleratorError as error:
        record["fatal"] = True
        last = next((name for name in names if name not in found), names[-1])
        found[last] = _failure(last, error)
    else:
        arms.close()
    record["seconds"] = round(time.monotonic() - began, 1)
    return record


def conditions(how: How) -> dict[str, Any]:
    """What a record is measured under, besides its cell: one of other conditions does not stand for it."""
    return {
        "mode": how.mode,
        "tiny": how.tiny,
        "machine": encode(fingerprint(how.device)),
        "loka": loka.__version__,
        "budget": encode(how.budget),
        "force": dict(how.force),
        "candidates": None if how.candidates is None else list(how.candidates),
        "settings": encode(how.settings),
        "probe_steps": how.probe_steps,
    }


def _prepare(
    name: str, cell: Cell, how: How, arms: Arms, record: dict[str, Any], references: dict[str, dict[str, torch.Tensor]]
) -> dict[str, Any]:
    """Compiles and captures an arm; what is known of it besides its time."""
    if why := missing(name):
        return {"failure": why}
    plan: loka.Plan | None = None
    spent: dict[str, float] = {}
    if name in OURS:
        plan, spent = planned(cell, how)
        record["plan"] = of_plan(plan)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    before = allocated()
    arm = build(name, cell, how, plan)
    arm.step()
    result: dict[str, Any] = {"spent": {what: round(seconds, 1) for what, seconds in spent.items()}}
    tensors = seen(arm)
    result["errors_float32"] = errors(tensors, references.get("float32", {}))
    off = result["errors_float32"]["output"]  # None where float32 did not fit
    if off is not None and not off <= _WRONG:
        return {**result, "failure": f"its output is {off:.0%} away from float32's: a time of it would mean nothing"}
    references.setdefault("bf16", tensors)  # the first arm's
    result["errors"] = errors(tensors, references["bf16"])
    if how.device.type == "cuda":
        result["memory"] = memory(arm.step, arm.leaves, before)
    if name in OURS:
        result["ran_fp8"] = ran(arm.model)
    arms.add(name, arm.step, arm.leaves)
    return {**result, **of_compilation()}


def _race(arms: Arms, record: dict[str, Any], rounds: int) -> None:
    """Times, and LoKA's speed-up over whichever bf16 is faster."""
    ready = list(arms.steps)
    found = arms.race(baseline=WHOLE if WHOLE in ready else ready[0], rounds=rounds)
    for name in ready:
        timed = median_interval(found.samples[name])
        record["us"][name] = timed.value
        record["arms"][name]["microseconds"] = _finite(timed.value, timed.low, timed.high)
    record["rounds"], record["calls"] = found.rounds, arms.calls
    record["samples"] = {name: [round(us, 3) for us in found.samples[name]] for name in ready}
    bf16 = [name for name in BF16 if name in ready]
    if bf16:
        record["best_bf16"] = best = min(bf16, key=lambda name: record["us"][name])
        record["speedups"] = {name: _speedup(found, best, name) for name in ready if name != best}
        record["speedup"] = record["speedups"].get(LOKA)


def _speedup(found: Race, above: str, below: str) -> list[float | None]:
    over = ratio(found.samples[above], found.samples[below])
    return _finite(over.value, over.low, over.high)


def _finite(*values: float) -> list[float | None]:
    """Without infinite ends, which JSON has none of: they come from too few rounds."""
    bounded = math.isfinite(values[-1])
    return [values[0], *(value if bounded else None for value in values[1:])]


def _kernels(arms: Arms, name: str) -> list[Kernel]:
    kernels = arms.kernels(name)
    total = sum(kernel.microseconds for kernel in kernels)
    count = sum(kernel.count for kernel in kernels)
    print(f"\n{name}: {total:.1f} us in {count:g} kernels")
    for kernel in kernels[:_TOP]:
        share = kernel.microseconds / max(total, 1e-9)
        print(f"  {kernel.microseconds:10.1f} us {share:6.1%} {kernel.count:6g}  {kernel.name[:110]}")
    sys.stdout.flush()
    return kernels[:_TOP]


def _failure(name: str, error: BaseException) -> dict[str, Any]:
    text = "".join(traceback.format_exception(error))
    print(f"{name} failed:\n{text}", file=sys.stderr, flush=True)
    return {"failure": first_line(error)[:300], "traceback": text}


def planned(cell: Cell, how: How) -> tuple[loka.Plan, dict[str, float]]:
    plan, spent = plan_of(cell, how)
    tell(f"  plan: {plan.summary()}")
    return plan, spent


def run_ahead(commands: Sequence[Sequence[str]], together: int, environment: Mapping[str, str] | None = None) -> None:
    """`together` processes at a time, which compile into the caches that this one reads afterwards."""
    began, waiting = time.monotonic(), list(commands)
    running: list[subprocess.Popen[bytes]] = []
    while waiting or running:
        running = [child for child in running if child.poll() is None]
        while waiting and len(running) < together:
            running.append(subprocess.Popen(waiting.pop(0), env=environment))
        time.sleep(0.2)
    tell(f"compiled ahead in {time.monotonic() - began:.0f} s")


def require_known(parser: argparse.ArgumentParser, device: str) -> None:
    """Ends with a word of the parser's where there is no such device."""
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = ""
    if kind not in ("cuda", "cpu"):
        parser.error(f"--device {device} is no device that is measured; say cuda or cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {device}: torch sees no GPU here; --device cpu runs all but the times")


def tell(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)
