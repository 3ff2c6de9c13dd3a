"""Many steps with FP8 sites on several ranks: does memory grow, does anything hang, do replicas part?

    torchrun --nproc-per-node 2 benchmarks/distributed/soak.py --engine ddp --out runs/soak.jsonl
    torchrun --nproc-per-node 2 benchmarks/distributed/soak.py --engine fsdp2 --steps 60 --width 64 \\
        --narrowest 16 --batch-size 32 --device cpu --step eager --out runs/soak.jsonl

A tower of three layers, new rows on each rank at each step; FSDP2 gathers in FP8. Megabytes of device and
host at step 100 and at the end; bits of whole weights, and of the output for rows that all ranks share.
"""

import hashlib
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent))
from shared import Tower, append, options, planned, ran, replicated, tell, trained, within

import loka
from loka.cli.torchrun import process_group
from loka.core.exchange import gather
from loka.distributed import fp8_all_gather, shard_dense
from loka.distributed.replicas import sum_of_bits
from loka.nn.linears import signature

EVERY = 50


def bits(model: nn.Module, call: nn.Module, width: int, device: torch.device) -> bytes:
    # Weights first: behind a forward without backward FSDP2's root stays gathered.
    whole = [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]
    x = torch.randn(64, width, generator=torch.Generator().manual_seed(1)).to(device)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        y = call(x).float().contiguous()
    return json.dumps([sum_of_bits(tensor) for tensor in (*whole, y)]).encode()


def memory(device: torch.device) -> dict[str, float]:
    found = {"host": int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0]) / 1024}
    if device.type == "cuda":
        found["allocated"] = torch.cuda.memory_allocated() / 2**20
        found["reserved"] = torch.cuda.memory_reserved() / 2**20
    return found


def main() -> None:
    parser = options()
    parser.add_argument("--engine", choices=["ddp", "fsdp2"], required=True)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--at-most", type=float, default=60, help="seconds; then fewer steps are told")
    told = parser.parse_args()
    with process_group(told.device) as told.device:
        device = torch.device(told.device)
        torch.manual_seed(0)
        model: nn.Module = Tower(told.width, 3).to(device)
        plan = planned(signature(model), told, device)
        loka.convert(model, plan)
        if told.step != "eager":
            model.compile()
        if told.engine == "ddp":
            call: nn.Module = replicated(model, told)
        else:
            call = shard_dense(model, [], device=device, gather_in=torch.bfloat16)
            print(fp8_all_gather(model, plan))
        generator = torch.Generator(device).manual_seed(dist.get_rank())
        x = torch.empty(told.batch_size, told.width, device=device)
        step = trained(model, call, x, graph=told.step == "graph")
        began, done = time.monotonic(), 0
        while done < told.steps:
            if done % EVERY == 0:
                within(told.seconds)
                late = torch.tensor(float(time.monotonic() - began > told.at_most), device=device)
                dist.all_reduce(late)
                if late.item():
                    break
            if done == min(100, told.steps // 2):
                early = memory(device)
            x.normal_(generator=generator)
            loss, done = step(), done + 1
        seconds, late_mb = time.monotonic() - began, memory(device)
        within(told.seconds)
        every = set(gather(bits(model, call, told.width, device), None))
        found = {
            "cell": f"soak {told.engine} {told.step} {device.type}",
            "ran": ran(step, told),
            "steps": done,
            "seconds": round(seconds, 1),
            "loss": float(loss),
            "applied": len(loka.regions(model).applied),
            "replicas": "bit-equal" if len(every) == 1 else "NOT EQUAL",
            "bits": hashlib.sha256(min(every)).hexdigest()[:16],  # the same by --step compile and graph
            "mb_early": early,
            "mb_grown": {kind: late_mb[kind] - early[kind] for kind in early},
        }
        tell(json.dumps(found))
        if dist.get_rank() == 0:
            append(told.out, found)


if __name__ == "__main__":
    main()
