"""A request's latency on a GPU: a server of LoKA against compiled bf16 behind the same graphs, and torchao.

    python benchmarks/serve/latency.py --models dcnv2_raw,wukong_2gf --out latency.jsonl
    python benchmarks/serve/latency.py --device cpu --tiny        # everything but the times

Dense parts of benchmarks/regions, random normal requests that lie on the GPU, bf16 weights. Each arm answers
by a CUDA graph of its bucket through `loka.serve.graphs.Replays`: rows copied in, replayed, copied out. All
arms of a bucket take turns; `replay` is the graph alone by events, `request` the whole call by the host's
clock, until the GPU is done. A line of JSON a bucket is written when it is done, and the same command goes on
with those that are missing.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "regions"))
from arms import BLOCK, CANDIDATES, LOKA, ON_CPU, TORCHAO, WHOLE, How, build, missing, plan_of
from cells import CELLS, Cell
from race import ratio
from records import append, read

import loka
from loka.core.device import fingerprint
from loka.core.recording import record
from loka.core.timing import first_line
from loka.serve import Server, freeze, load
from loka.serve.graphs import Graph, Replays
from loka.serve.rows import Form, form_of, leaves

BUCKETS = (512, 2048, 8192, 128, 64, 16, 1)  # in the order in which they are wanted
Answer = Callable[[Sequence[torch.Tensor]], Any]


def main() -> None:
    arguments = _arguments()
    device = torch.device(arguments.device)
    how = How(
        device=device,
        tiny=arguments.tiny,
        mode="bf16",
        candidates=ON_CPU if device.type == "cpu" else CANDIDATES,
        plans=arguments.plans,
    )
    for model in arguments.models:
        cell = CELLS[f"serve_{model}_2048"]
        plan, spent = plan_of(cell, how)
        print(f"{model}: planned in {sum(spent.values()):.0f} s", flush=True)
        if arguments.warm:
            _warm(cell, how, plan, arguments.warm, arguments.buckets[0])
            continue
        if arguments.compile_ahead:
            _compile_ahead(model, arguments)
        _measure(cell, how, plan, arguments, model)


def _measure(cell: Cell, how: How, plan: loka.Plan, arguments: argparse.Namespace, model: str) -> None:
    began = time.monotonic()
    server = _server(cell, how, plan, sorted(arguments.buckets))
    print(f"{model}: frozen in {time.monotonic() - began:.1f} s, graphs {server.graphs}", flush=True)
    known = read(arguments.out)
    for rows in arguments.buckets:
        name = f"{model}_{rows}"
        if name not in known:
            found = _raced(replace(cell, rows=rows), how, server, rows, arguments.rounds)
            append(arguments.out, {"cell": name, "machine": str(fingerprint(how.device))} | found)
            print(f"{name}: {_told(found)}", flush=True)
    if f"{model}_life" not in known:
        found = _life(cell, how, server)
        append(arguments.out, {"cell": f"{model}_life"} | found)
        print(f"{model}: {found}", flush=True)


def _server(cell: Cell, how: How, plan: loka.Plan, buckets: Sequence[int]) -> Server:
    model = cell.model(how.device, tiny=how.tiny).bfloat16().eval()
    requests, _ = replace(cell, rows=512).batch(how.device, tiny=how.tiny)
    return freeze(model, plan, calibration=[requests], buckets=buckets)


def _raced(cell: Cell, how: How, server: Server, rows: int, rounds: int) -> dict[str, Any]:
    """Microseconds of each arm, and speed-ups over the best bf16, with 95 % intervals of paired ratios."""
    request = _request(cell, how, rows)
    arms: dict[str, Answer] = {LOKA: lambda tensors: server(tensors).output}
    replays: dict[str, Callable[[], object]] = {LOKA: lambda: server._run(server.current.module, request)}
    if server.current.replays is not None:
        replays[LOKA] = server.current.replays._graphs[rows].recording.replay
    failures = {}
    for name in (WHOLE, BLOCK, *TORCHAO):
        if absent := missing(name):
            failures[name] = absent
            continue
        try:
            torch._dynamo.reset()
            arms[name], replays[name] = _baseline(name, cell, how, request)
        except Exception as error:
            failures[name] = first_line(error)
    found: dict[str, Any] = {"failures": failures}
    for kind, calls in (("request", {n: _asked(a, request) for n, a in arms.items()}), ("replay", replays)):
        samples = _in_turns(calls, rounds, how.device, kind == "replay")
        bf16 = min((WHOLE, BLOCK), key=lambda arm: statistics.median(samples[arm]))
        found[kind] = {
            "us": {arm: statistics.median(times) for arm, times in samples.items()},
            "p99": {arm: sorted(times)[int(0.99 * len(times))] for arm, times in samples.items()},
            "bf16": bf16,
            "over_bf16": {
                arm: vars(ratio(samples[bf16], times)) for arm, times in samples.items() if arm != bf16
            },
        }
    return found


def _asked(arm: Answer, request: Sequence[torch.Tensor]) -> Callable[[], object]:
    return lambda: arm(request)


def _request(cell: Cell, how: How, rows: int) -> list[torch.Tensor]:
    generator = torch.Generator(how.device).manual_seed(7)
    tensors, _ = replace(cell, rows=1).batch(how.device, tiny=how.tiny)
    return [
        torch.randn(rows, *t.shape[1:], device=how.device, generator=generator).to(t.dtype) for t in tensors
    ]


def _baseline(
    name: str, cell: Cell, how: How, request: Sequence[torch.Tensor]
) -> tuple[Answer, Callable[[], object]]:
    arm = build(name, cell, how, None)
    if how.device.type == "cpu":
        return lambda tensors: arm.step(), arm.step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            arm.step()
    torch.cuda.synchronize()
    recording, output = record(arm.step, how.device, stream)
    form: Form = form_of(list(request))
    rows = request[0].shape[0]
    replays = Replays({rows: Graph(rows, arm.inputs, output, recording)}, stream, form)
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


def _life(cell: Cell, how: How, server: Server) -> dict[str, Any]:
    """Refresh, load, bytes, what a look of the alarm costs, what compiled answers and buckets change."""
    model = cell.model(how.device, tiny=how.tiny).bfloat16().eval()
    state, cuda = model.state_dict(), how.device.type == "cuda"
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        server.refresh(state)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    found["refresh_s"] = seconds
    low, high = server.card.dense_bytes
    found["bytes_of_bf16"] = low / high
    looks = server.current.looks
    if looks is not None:
        found["look_us"] = {
            rows: statistics.median(_in_turns({"": graph.recording.replay}, 30, how.device, True)[""])
            for rows, graph in looks._graphs.items()
        }
    request = _request(cell, how, min(16, server.card.buckets[0]))
    answers = []
    for bucket in server.card.buckets:
        by = server.current.replays
        y = (
            by(request, bucket)
            if by is not None
            else server._run(server.current.module, server.card.form.check_rows(how.device, bucket))
        )
        answers.append(leaves(y)[0][: len(request[0])].double())
    found["buckets_apart"] = max(float((a - b).abs().max()) for a in answers for b in answers)
    found["rms"] = float(answers[0].square().mean().sqrt())
    found["fp8_mean_abs"] = server.card.answers.mean_abs
    with tempfile.TemporaryDirectory() as folder:
        server.save(folder)
        began = time.perf_counter()
        loaded = load(folder, model)
        found["load_s"] = time.perf_counter() - began
        for rows in server.card.buckets:
            request = _request(cell, how, rows)
            assert torch.equal(leaves(loaded(request).output)[0], leaves(server(request).output)[0]), rows
    if cuda:
        converted = torch.compile(loka.convert(model, server.plan).eval(), dynamic=False)
        with torch.no_grad():
            for rows in server.card.buckets[-2:]:
                request = _request(cell, how, rows)
                same = leaves(converted(*request))[0] == leaves(server(request).output)[0]
                found[f"equal_to_converted_{rows}"] = float(same.double().mean())
    return found


def _told(found: dict[str, Any]) -> str:
    parts = []
    for kind in ("request", "replay"):
        one = found[kind]
        times = ", ".join(f"{arm} {us:.1f}" for arm, us in one["us"].items())
        gain = one["over_bf16"].get(LOKA, {"value": 0, "low": 0, "high": 0})
        parts.append(f"{kind} us: {times}; LoKA {gain['value']:.3f}x [{gain['low']:.3f}, {gain['high']:.3f}]")
    return "; ".join(parts) + (f"; {found['failures']}" if found["failures"] else "")


def _warm(cell: Cell, how: How, plan: loka.Plan, name: str, rows: int) -> None:
    """Fills the compile caches for one arm and one bucket."""
    try:
        if name == LOKA:
            _server(cell, how, plan, [rows])
        elif not missing(name):
            build(name, replace(cell, rows=rows), how, None).step()
    except Exception as error:
        print(f"{cell.name}, {name}, {rows}: {first_line(error)}", flush=True)


def _compile_ahead(model: str, arguments: argparse.Namespace) -> None:
    began = time.monotonic()
    script = [sys.executable, __file__, "--models", model, "--plans", str(arguments.plans)]
    waiting = [
        [*script, "--warm", name, "--buckets", str(rows)]
        for rows in arguments.buckets
        for name in (LOKA, WHOLE, BLOCK, *TORCHAO)
        if not missing(name)
    ]
    running: list[subprocess.Popen[bytes]] = []
    while waiting or running:
        running = [child for child in running if child.poll() is None]
        while waiting and len(running) < arguments.compile_ahead:
            running.append(subprocess.Popen(waiting.pop(0)))
        time.sleep(0.2)
    print(f"compiled ahead in {time.monotonic() - began:.0f} s", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", type=lambda text: text.split(","), default=["dcnv2_raw", "wukong_2gf"], help="with commas"
    )
    parser.add_argument(
        "--buckets",
        type=lambda text: [int(rows) for rows in text.split(",")],
        default=list(BUCKETS),
        help="rows, with commas",
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small numbers in place of the real ones")
    parser.add_argument("--plans", type=Path, help="folder of plans: those there are used, others written")
    parser.add_argument("--out", type=Path, default=Path("latency.jsonl"))
    parser.add_argument("--compile-ahead", type=int, default=0, metavar="N", help="in N processes at a time")
    parser.add_argument("--warm", help="fill the caches for this arm and stop")
    arguments = parser.parse_args()
    if arguments.compile_ahead and arguments.plans is None:
        parser.error("--compile-ahead needs --plans, so that all processes have one plan")
    return arguments


if __name__ == "__main__":
    main()
