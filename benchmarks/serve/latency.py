"""A request's latency on a GPU: a server of LoKA against compiled bf16 behind the same graphs, and torchao.

    python benchmarks/serve/latency.py --models dcnv2_raw,wukong_2gf --out latency.jsonl
    python benchmarks/serve/latency.py --device cpu --tiny        # everything but the times

Dense parts of benchmarks/regions, random normal requests that lie on the GPU, bf16 weights. Each arm answers
by a CUDA graph of its bucket through `loka.serve.graphs.Replays`: rows copied in, replayed, copied out. All
arms of a bucket take turns; `replay` is the graph alone by events, `request` the whole call by the host's
clock, until the GPU is done. A line of JSON a bucket is written when it is done, and the same command goes on
with those that are missing.
"""

import argparse
import functools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "regions"))
from arms import BF16, LOKA, ON_CPU, TORCHAO, How, build, missing
from cells import Cell
from living import launched, load_here, load_times, refreshed, request_of, under_load
from prepared import Plans, before_plans, by_plans, cell_of, compile_ahead, plans_of, server_of, warm
from race import ratio
from records import append, read

from loka.compiler.joint_sites import IN_REGIONS
from loka.core.device import fingerprint
from loka.core.recording import record
from loka.core.timing import first_line, warm_up
from loka.serve import Server
from loka.serve.by_rows import in_fp8
from loka.serve.graphs import Graph, Replays
from loka.serve.rows import Form, form_of

LOOKED_AT = "loka, shown to the alarm"
BUCKETS = (512, 2048, 8192, 128, 64, 16, 1)  # in the order in which they are wanted
Answer = Callable[[Sequence[torch.Tensor]], Any]


def main() -> None:
    arguments = _arguments()
    torch._dynamo.config.recompile_limit = 256  # each bucket of an arm is another model to dynamo
    torch._dynamo.config.accumulated_recompile_limit = 4096
    device = torch.device(arguments.device)
    how = How(
        device=device,
        tiny=arguments.tiny,
        mode="bf16",
        kept_weights=True,
        candidates=ON_CPU[-1:] if device.type == "cpu" else IN_REGIONS[:1],
        plans=arguments.plans,
    )
    for model in arguments.models:
        cell = cell_of(model, 2048)
        command = [sys.executable, __file__, "--models", model, "--device", arguments.device]
        command += ["--plans", str(arguments.plans), "--plan-rows", ",".join(map(str, arguments.plan_rows))]
        command += ["--tiny"] * arguments.tiny
        if arguments.load_from:
            print(json.dumps(load_here(cell, how, arguments.load_from)))
            continue
        if arguments.warm:
            warm(model, how, arguments)
            continue
        if "arms" in arguments.stages and arguments.compile_ahead:
            compile_ahead(before_plans(arguments), command, arguments.compile_ahead)
        if arguments.stages == ["arms"]:
            continue
        began = time.monotonic()
        plans = plans_of(model, how, arguments)
        print(f"{model}: planned in {time.monotonic() - began:.0f} s", flush=True)
        if LOKA in arguments.stages and arguments.compile_ahead:
            compile_ahead(by_plans(plans), command, arguments.compile_ahead)
        if "race" in arguments.stages:
            _measure(cell, how, plans, arguments, model, command)


def _measure(cell: Cell, how: How, plans: Plans, arguments: argparse.Namespace, model: str, command: list[str]) -> None:
    known = read(arguments.out)
    server, told = _fastest(cell, how, plans, model, race=arguments.race)
    for rows in arguments.buckets:
        name = f"{model}_{rows}"
        if name not in known:
            found = told[rows] | _raced(replace(cell, rows=rows), how, server, rows, arguments)
            append(arguments.out, {"cell": name, "machine": str(fingerprint(how.device))} | found)
            print(f"{name}: {found['fp8_sites']} sites in FP8; {_told(found)}", flush=True)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        f"load_{rows}": functools.partial(under_load, cell, how, server, rows, arguments.seconds)
        for rows in arguments.load
    }
    if arguments.load:
        parts |= {"refresh": lambda: refreshed(cell, how, server), "load_time": lambda: load_times(command, server)}
    for part, call in parts.items():
        if f"{model}_{part}" not in known:
            try:
                found = call()
            except Exception as error:  # the others count
                found = {"failed": first_line(error)}
            append(arguments.out, {"cell": f"{model}_{part}"} | found)
            print(f"{model} {part}: {found}", flush=True)


def _fastest(cell: Cell, how: How, plans: Plans, model: str, *, race: bool) -> tuple[Server, dict[int, dict[str, Any]]]:
    """A server with the plan of each bucket whose graph took the least time; and what all took."""
    buckets = list(plans[min(plans)])
    took: dict[int, dict[float, float]] = {rows: {} for rows in buckets}
    for least, by_rows in plans.items():
        if not any(map(in_fp8, by_rows.values())):  # a server has some site in FP8
            by_rows[buckets[-1]] = plans[min(plans)][buckets[-1]]
        began = time.monotonic()
        server = server_of(cell, how, by_rows, race=race)
        replays = server.current.replays
        for rows, times in took.items():
            times[least] = 0.0 if replays is None else replays._graphs[rows].microseconds
        print(f"{model}: frozen in {time.monotonic() - began:.1f} s, {took}", flush=True)
    chosen = {rows: min(times, key=times.__getitem__) for rows, times in took.items()}
    best = {rows: plans[least][rows] for rows, least in chosen.items()}
    if len(plans) > 1:
        server = server_of(cell, how, best, race=race)
    sites = dict(zip(server.card.buckets, server.card.in_hp, strict=True))
    return server, {
        rows: {
            "by_margin_us": took[rows],
            "margin": chosen[rows],
            "fp8_sites": len(server.card.sites) - len(sites[rows]),
        }
        for rows in buckets
    }


def _raced(cell: Cell, how: How, server: Server, rows: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of each arm, and speed-ups over the best bf16, with 95 % intervals of paired ratios."""
    request = request_of(cell, how, rows)
    arms: dict[str, Answer] = {LOKA: lambda tensors: server(tensors).output}
    replays: dict[str, Callable[[], object]] = {LOKA: lambda: server._run(server.current.module, request)}
    if server.current.replays is not None:
        graph = server.current.replays._graphs[rows]
        replays[LOKA] = graph.recording.replay
        if graph.looking is not None:  # each 8th request
            replays[LOOKED_AT] = graph.looking[0].replay
    failures = {}
    for name in arguments.arms:
        if absent := missing(name):
            failures[name] = absent
            continue
        try:
            arms[name], replays[name] = _baseline(name, cell, how, request)
        except Exception as error:
            failures[name] = first_line(error)
    found: dict[str, Any] = {"failures": failures}
    assert set(BF16) <= set(arms), failures
    for kind, calls in (("request", {n: _asked(a, request) for n, a in arms.items()}), ("replay", replays)):
        samples = _in_turns(calls, arguments.rounds, how.device, kind == "replay")
        bf16 = min(BF16, key=lambda arm: statistics.median(samples[arm]))
        found[kind] = {
            "us": {arm: statistics.median(times) for arm, times in samples.items()},
            "p99": {arm: sorted(times)[int(0.99 * len(times))] for arm, times in samples.items()},
            "bf16": bf16,
            "over_bf16": {arm: vars(ratio(samples[bf16], times)) for arm, times in samples.items() if arm != bf16},
        }
    if arguments.kernels and how.device.type == "cuda":
        found["kernels"] = {arm: launched(replays[arm]) for arm in (LOKA, found["replay"]["bf16"])}
    return found


def _asked(arm: Answer, request: Sequence[torch.Tensor]) -> Callable[[], object]:
    return lambda: arm(request)


def _baseline(name: str, cell: Cell, how: How, request: Sequence[torch.Tensor]) -> tuple[Answer, Callable[[], object]]:
    arm = build(name, cell, how, None)
    if how.device.type == "cpu":
        return lambda tensors: arm.step(), arm.step
    stream = torch.cuda.Stream()
    warm_up(arm.step, stream)
    recording, output = record(arm.step, how.device, stream)
    form: Form = form_of(list(request))
    rows = request[0].shape[0]
    replays = Replays({rows: Graph(rows, arm.inputs, output, recording, 0.0)}, stream, form)
    replays.arm = arm  # type: ignore[attr-defined]  # keeps alive what the graph reads
    return lambda tensors: replays(tensors, rows), recording.replay


def _in_turns(
    calls: dict[str, Callable[[], object]], rounds: int, device: torch.device, events: bool
) -> dict[str, list[float]]:
    """Microseconds of each call in each round, in random order."""
    draw, samples = random.Random(0), {name: [] for name in calls}
    cuda = device.type == "cuda"
    for turn in range(rounds + 3):
        for name in draw.sample(list(calls), len(calls)):
            if cuda:
                torch.cuda.synchronize()
            if cuda and events:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                calls[name]()
                end.record()
                end.synchronize()
                spent = begin.elapsed_time(end) * 1e3
            else:
                began = time.perf_counter()
                calls[name]()
                if cuda:
                    torch.cuda.synchronize()
                spent = (time.perf_counter() - began) * 1e6
            if turn >= 3:
                samples[name].append(spent)
    return samples


def _told(found: dict[str, Any]) -> str:
    parts = []
    for kind in ("request", "replay"):
        one = found[kind]
        times = ", ".join(f"{arm} {us:.1f}" for arm, us in one["us"].items())
        gain = one["over_bf16"].get(LOKA, {"value": 0, "low": 0, "high": 0})
        parts.append(f"{kind} us: {times}; LoKA {gain['value']:.3f}x [{gain['low']:.3f}, {gain['high']:.3f}]")
    return "; ".join(parts) + (f"; {found['failures']}" if found["failures"] else "")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = {"models": ["dcnv2_raw", "wukong_2gf"], "arms": [*BF16, *TORCHAO]}
    for flag, default in (names | {"stages": ["arms", LOKA, "race"]}).items():
        parser.add_argument(f"--{flag}", type=_several(str), default=default, help="with commas: %(default)s")
    rows = {"buckets": [*BUCKETS], "plan-rows": [64, 512, 2048, 8192], "load": []}
    for flag, numbers in rows.items():
        parser.add_argument(f"--{flag}", type=_several(int), default=numbers, help="rows: %(default)s")
    parser.add_argument("--margins", type=_several(float), default=[1.0], help="the fastest of each bucket")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small numbers in place of the real ones")
    parser.add_argument("--race", action="store_true", help="each bucket by the fastest plan, or in bf16")
    parser.add_argument("--kernels", action="store_true", help="keep what graphs launch")
    parser.add_argument("--plans", type=Path, help="folder of plans: those there are used, others written")
    parser.add_argument("--out", type=Path, default=Path("latency.jsonl"))
    parser.add_argument("--compile-ahead", type=int, default=0, metavar="N", help="in N processes at a time")
    parser.add_argument("--warm", help="fill the caches for this arm and stop")
    parser.add_argument("--load-from", type=Path, help="load this folder, print its times and stop")
    arguments = parser.parse_args()
    if arguments.compile_ahead and arguments.plans is None:
        parser.error("--compile-ahead needs --plans, so that all processes have one plan")
    return arguments


def _several(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(each) for each in text.split(",") if each]


if __name__ == "__main__":
    main()
