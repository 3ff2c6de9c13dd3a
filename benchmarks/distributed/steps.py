"""Training steps on several GPUs: compiled bf16 against LoKA's plan, by DDP and FSDP2, gathers bf16 and FP8.

    torchrun --nproc-per-node 2 benchmarks/distributed/steps.py --model wukong:2gf --out runs/steps.jsonl
    torchrun --nproc-per-node 2 benchmarks/distributed/steps.py --model wukong:small --batch-size 64 \\
        --steps 3 --device cpu --step eager --candidates emulated:rowwise_e4m3_pow2 --out runs/tiny.jsonl

A step is that of `loka train`, optimizers and metrics included, on one synthetic batch of each rank. Rank 0
probes, measures and plans before, by recipes whose weights FP8 gathers take; a file at --plan (beside
--out) is read instead. Arms run in turn and write a line of JSON; the same command does what is missing.
`step_us` is the median over steps of the slowest rank's time, and quartiles, behind 8 steps of warm-up;
`comm_us` rank 0's time in kernels of NCCL (operations of gloo) a step, hidden or not, by torch.profiler.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1] / "regions"))
from arms import BUDGET, How, probed
from records import append, read
from running import tell

import loka
from loka import mods
from loka.cli.commands.demo import MODS
from loka.cli.inputs import model_builder
from loka.cli.torchrun import over_ranks, process_group
from loka.compiler.joint_sites import IN_REGIONS
from loka.core.exchange import gather, ranks_of
from loka.data import SyntheticClicks
from loka.data.batch import Batch
from loka.measurement.settings import COARSE
from loka.train import TrainConfig
from loka.train.ranks import by_the_first
from loka.train.run import Run

ARMS = {  # engine, whether by the plan, and how FSDP2 gathers
    "ddp_bf16": ("ddp", False, "hp"),
    "ddp_loka": ("ddp", True, "hp"),
    "fsdp2_bf16": ("fsdp2", False, "hp"),
    "fsdp2_loka": ("fsdp2", True, "hp"),
    "fsdp2_loka_fp8": ("fsdp2", True, "fp8"),
    "fsdp2_loka_auto": ("fsdp2", True, "auto"),
}
WARM_UPS, PROFILED = 8, 3


class Trained:
    """The model and batch of this rank, as benchmarks/regions asks for a cell."""

    trained, loss = True, "bce"

    def __init__(self, told: argparse.Namespace) -> None:
        self.name, self.size = told.model, told.batch_size
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.rows = SyntheticClicks(rows=self.size * ranks, seed=0, shard=rank, shards=ranks)

    def model(self, device: torch.device, *, tiny: bool = False) -> torch.nn.Module:
        torch.manual_seed(0)
        with device:
            built = model_builder(self.name)(self.rows)
        mods.apply(built, MODS)
        return built.to(device)

    def batch(self, device: torch.device, *, tiny: bool = False) -> tuple[list[torch.Tensor], torch.Tensor]:
        batch = next(iter(self.rows.batches(self.size))).to(device)
        return [batch.dense, batch.sparse], batch.label


def planned(cell: Trained, told: argparse.Namespace, device: torch.device) -> loka.Plan:
    """Rank 0's, for which the others wait without a collective."""

    def make(alive: Any) -> str:
        if not told.plan.exists():
            stats, seconds = probed(cell, How(device=device))  # type: ignore[arg-type]
            tell(f"probed in {seconds:.0f} s")
            report = loka.measure(
                stats,
                device=device,
                candidates=told.candidates,
                settings=COARSE,
                errors_only=device.type != "cuda",
                time_limit=60,
                track=lambda items, *_: (item for item in items if alive() or True),
            )
            told.plan.parent.mkdir(parents=True, exist_ok=True)
            loka.plan(report, BUDGET).save(told.plan)
        return json.dumps(loka.Plan.load(told.plan).to_json())

    return loka.agree(loka.Plan.from_json(json.loads(by_the_first(make, idle=lambda: None))))


def measured(name: str, cell: Trained, plan: loka.Plan | None, told: argparse.Namespace) -> dict[str, Any]:
    engine, _, how = ARMS[name]
    device = torch.device(told.device)
    config = TrainConfig(batch_size=cell.size, device=told.device, step=told.step, gather=how)
    model = over_ranks(cell.model(device), config, engine="torch", dense=engine, exchange="fp32")
    run, ((dense, sparse), label) = Run(model, config, steps=10_000, say=tell), cell.batch(device)
    batch = Batch(dense=dense, sparse=sparse, label=label)
    run.adopt(plan)
    for _ in range(WARM_UPS):
        run.learn(batch)
    times = [_microseconds(run, batch, device) for _ in range(told.steps)]
    each = [json.loads(text) for text in gather(json.dumps(times).encode(), None)]
    slowest = [max(step) for step in zip(*each, strict=True)]
    low, median, high = statistics.quantiles(slowest, n=4)
    sent = _profiled(run, batch, device)
    found = {
        "step_us": [round(us, 1) for us in (median, low, high)],
        "rows_per_second": round(cell.size * ranks_of() / median * 1e6),
        "comm_us": round(sent, 1),
        "comm_share": round(sent / median, 4),
        "step": run.step_reason or told.step,
    }
    run.adopt(None)  # gives compiled code back
    return found


def _microseconds(run: Run, batch: Any, device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    run.learn(batch)
    wait()
    return (time.perf_counter() - began) * 1e6


def _profiled(run: Run, batch: Any, device: torch.device) -> float:
    """Microseconds a step."""
    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        for _ in range(PROFILED):
            _microseconds(run, batch, device)
    kinds = [event for event in seen.key_averages() if re.match(r"nccl\w*Kernel|gloo", event.key)]
    assert kinds, "no kernel of communication is known by name"
    return sum(e.self_device_time_total if cuda else e.cpu_time_total for e in kinds) / PROFILED


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="wukong:2gf")
    parser.add_argument("--batch-size", type=int, default=6144)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--step", default="compile", choices=["compile", "eager"])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--candidates", nargs="+", default=list(dict.fromkeys(IN_REGIONS)))
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    told = parser.parse_args()
    told.plan = told.plan or told.out.with_suffix(f".{told.model.replace(':', '_')}.plan.json")
    with process_group(told.device) as told.device:
        device, cell = torch.device(told.device), Trained(told)
        where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, gloo"
        key = f"{told.model} {told.batch_size} x {ranks_of()} {told.step} {where}"
        done = by_the_first(lambda alive: "\n".join(read(told.out)), idle=lambda: None).splitlines()
        missing = [name for name in told.arms if f"{key} {name}" not in done]
        tell(f"{key}: {', '.join(missing) or 'nothing'} to do")
        plan = planned(cell, told, device) if any(ARMS[name][1] for name in missing) else None
        if plan:
            tell(plan.summary())
        for name in missing:
            began = time.monotonic()
            torch._dynamo.reset()
            found = measured(name, cell, plan if ARMS[name][1] else None, told)
            found |= {"cell": f"{key} {name}", "torch": torch.__version__}
            found["seconds"] = round(time.monotonic() - began, 1)
            tell(json.dumps(found))
            if dist.get_rank() == 0:
                append(told.out, found)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
