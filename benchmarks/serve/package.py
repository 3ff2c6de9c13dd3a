"""A package against the graphs of the server that it was made of.

    CXX=/usr/bin/g++ python benchmarks/serve/package.py --models dcnv2_raw,wukong_2gf --out package.jsonl
    python benchmarks/serve/package.py --models dcnv2_raw --device cpu --tiny     # all but the times

Dense parts of benchmarks/regions in bf16, a plan by hand (all layers with sides of 256 and more), random normal rows.
"called": by events, from the host; "recorded": in a CUDA graph, as the server's are; in turns with them. Answers are
compared with the server's graphs, of which `largest` logit changes and FP8's own are told. A line of JSON a bucket.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
sys.path.insert(0, str(Path(__file__).parents[1] / "regions"))
from cells import CELLS
from race import ratio
from records import append
from running import require_known
from shared import planned
from torch import nn

import loka
from loka.core.device import fingerprint
from loka.core.recording import record
from loka.core.signature import ModelSignature
from loka.core.timing import warm_up
from loka.serve import Server, freeze
from loka.serve.rows import leaves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="dcnv2_raw,wukong_2gf")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("package.jsonl"))
    told = parser.parse_args()
    require_known(parser, told.device)
    known = [name.removeprefix("serve_").removesuffix("_2048") for name in CELLS if re.fullmatch("serve_.*_2048", name)]
    if unknown := [model for model in told.models.split(",") if model not in known]:
        parser.error(f"argument --models: unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    told.narrowest, told.plan, told.batch_size = 16 if told.tiny else 256, None, 2048
    told.buckets = [16, 32] if told.tiny else [512, 2048, 8192]
    for model in told.models.split(","):
        _raced(model, told, torch.device(told.device))


def _raced(name: str, told: argparse.Namespace, device: torch.device) -> None:
    cell = replace(CELLS[f"serve_{name}_2048"], rows=512, name=name)
    model = cell.model(device, tiny=told.tiny).bfloat16().eval()
    requests, _ = cell.batch(device, tiny=told.tiny)
    plan = planned(_sites_of(model, requests), told, device)
    server = freeze(model, plan, calibration=[requests], buckets=told.buckets)
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        found = server.package(Path(folder) / "model.pt2", batch=(1, told.buckets[-1]))
        made = time.monotonic() - began
        began = time.monotonic()
        loaded = torch._inductor.aoti_load_package(str(found.path), run_single_threaded=True)
        once = {"made_s": made, "load_s": time.monotonic() - began, "bytes": found.path.stat().st_size}
    print(found, once, flush=True)
    for rows in told.buckets:
        line = {"cell": f"{name}_{rows}", "machine": str(fingerprint(device)), "sites": found.joined, **once}
        line |= _bucket(server, loaded, rows, told.rounds, device)
        append(told.out, line)
        print(json.dumps(line), flush=True)


def _sites_of(model: nn.Module, requests: list[torch.Tensor]) -> ModelSignature:
    """Of all products with parameters, those of raw ones too."""
    with loka.Probe(model, every=1, effect_samples=0) as probe:
        model(*requests).float().sum().backward()
    for parameter in model.parameters():
        parameter.grad = None
    return probe.stats().model


@torch.no_grad()
def _bucket(server: Server, loaded: Any, rows: int, rounds: int, device: torch.device) -> dict[str, Any]:
    made = server.card.form.check_rows(device, rows)
    inputs = [torch.randn_like(x) if x.is_floating_point() else x for x in made]
    one, other = leaves(loaded(*inputs)), leaves(server(inputs if len(inputs) > 1 else inputs[0]).output)
    apart = torch.cat([(a.double() - b.double()).abs().flatten() for a, b in zip(one, other, strict=True)])
    answers = server.card.answers[0]
    found = {"equal": float((apart == 0).double().mean()), "mean": float(apart.mean()), "largest": float(apart.max())}
    found |= {"fp8_mean": answers.mean_abs, "fp8_largest": answers.max_abs}
    if device.type != "cuda" or server.current.replays is None:
        return found
    stream = torch.cuda.Stream()
    warm_up(lambda: loaded(*inputs), stream)
    recording, _ = record(lambda: loaded(*inputs), device, stream)
    calls = {"called": lambda: loaded(*inputs), "recorded": recording.replay}
    calls["graph"] = server.current.replays._graphs[rows].recording.replay
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 3):
        for name, call in calls.items():
            spent = _microseconds(call)
            if turn >= 3:
                times[name].append(spent)
    found |= {f"{name}_us": statistics.median(samples) for name, samples in times.items()}
    return found | {"graph_over_recorded": vars(ratio(times["graph"], times["recorded"]))}


def _microseconds(call: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


if __name__ == "__main__":
    main()
