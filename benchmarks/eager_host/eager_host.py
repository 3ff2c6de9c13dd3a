"""Host time of sites in eager mode: by layer, and of a training step with and without DDP.

    python benchmarks/eager_host/eager_host.py                        # one GPU
    torchrun --nproc-per-node 2 benchmarks/eager_host/eager_host.py   # DDP

Six Linear - ReLU layers, batch 6144, float32 weights under bf16 autocast, fused AdamW, random data. The baseline is
the same model with nn.Linear in the same run. The step is timed by the wall clock over a synchronized run of
steps; the layer's host time is what issuing one costs at a size (256) whose kernels take no time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from loka.graph.attach import attach
from loka.nn.linears import signature

HP = "nn.Linear, bf16"
CANDIDATES = (HP, "torch:rowwise_e4m3", "torch:tensorwise_e4m3")


def convert_all(model: nn.Module, candidate: str) -> None:
    layers = signature(model).layers
    attach(model, layers, dict.fromkeys(layers, (candidate,) * 3))


def make(width: int, candidate: str, rank: int, world: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(width, width), nn.ReLU())]
    model: nn.Module = nn.Sequential(*layers).cuda()
    if candidate != HP:
        convert_all(model, candidate)
    return nn.parallel.DistributedDataParallel(model, device_ids=[rank]) if world > 1 else model


def median_ms(run: Callable[[], object], steps: int, repeats: int = 7) -> tuple[float, float, float]:
    """Median, least and most over `repeats` of the wall time of a run in ms."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / steps * 1e3)
    return statistics.median(times), min(times), max(times)


def step_of(model: nn.Module, width: int, batch: int, parts: dict[str, float]) -> Callable[[], None]:
    """A training step; `parts` sums the host's seconds in its parts."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(batch, width, device="cuda")

    def step() -> None:
        at = [time.perf_counter()]
        with torch.autocast("cuda", torch.bfloat16):
            y = model(x)
        loss = y.float().square().mean()
        at.append(time.perf_counter())
        loss.backward()
        at.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        at.append(time.perf_counter())
        for name, begin, end in zip(("forward", "backward", "optimizer"), at, at[1:], strict=False):
            parts[name] = parts.get(name, 0.0) + end - begin

    return step


def steps(widths: list[int], batch: int, rank: int, world: int) -> None:
    for width in widths:
        baseline = None
        for candidate in CANDIDATES:
            parts: dict[str, float] = {}
            step = step_of(make(width, candidate, rank, world), width, batch, parts)
            median_ms(step, 15, 1)
            parts.clear()
            took, least, most = median_ms(step, 12)
            baseline = baseline or took
            if rank == 0:
                told = ", ".join(f"{name} {1e3 * seconds / 84:.2f}" for name, seconds in parts.items())
                print(
                    f"{world} GPU, {batch} x {width}, {candidate}: {took:.2f} ms a step [{least:.2f}, "
                    f"{most:.2f}], {took / baseline:.2f} of bf16's; host ms: {told}",
                    flush=True,
                )


def layer() -> None:
    for candidate in CANDIDATES:
        linear = nn.Linear(256, 256).cuda().bfloat16()
        if candidate != HP:
            convert_all(linear, candidate)
        x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)

        def forward(linear: nn.Module = linear, x: torch.Tensor = x) -> None:
            with torch.no_grad():
                linear(x)

        def both(linear: nn.Module = linear, x: torch.Tensor = x) -> None:
            linear(x).backward(x)

        for run in (forward, both):
            median_ms(run, 20, 1)
        print(
            f"host us of a layer, {candidate}: forward {1e3 * median_ms(forward, 300)[0]:.0f}, "
            f"forward and backward {1e3 * median_ms(both, 300)[0]:.0f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--batch", type=int, default=6144)
    options = parser.parse_args()
    rank, world = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.cuda.set_device(rank)
    if world > 1:
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    if rank == 0:
        print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    steps(options.widths, options.batch, rank, world)
    if world == 1:
        layer()
    else:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
