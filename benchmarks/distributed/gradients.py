"""Codecs of gradients against the all-reduce that they stand in for: relative L2 error of the mean, and time.

    torchrun --nproc-per-node 2 benchmarks/distributed/gradients.py
    torchrun --nproc-per-node 2 benchmarks/distributed/gradients.py --device cpu --megabytes 1 4

Random normal numbers, as many as are so many megabytes of bf16. All ways take and give float32: a codec as
DDP's hook calls it, "bf16 sum" the all-reduce of bf16 between two casts, "fp32 sum" that of float32, which
DDP does. Rounds in turns, a cold L2, the slowest rank of each round; medians with 95 % intervals.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from loka.cli.torchrun import process_group
from loka.distributed.choice import compared, time_in_turns
from loka.distributed.gradient_codec import CODECS, codec_named, gathered, padded_columns, scattered_sum

BASELINE = "bf16 sum"


def summed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    low = x.to(dtype, copy=True)
    dist.all_reduce(low)
    return low.float() / dist.get_world_size()


def coded(x: torch.Tensor, codec: str) -> torch.Tensor:
    ranks, group = dist.get_world_size(), dist.group.WORLD
    rows = x.view(ranks, -1)
    sums = scattered_sum(rows, x.new_zeros(ranks, 0), codec_named(codec), group)
    return gathered(sums[0] / ranks, sums[1], codec_named(codec), group)[0].flatten()


def measured(megabytes: float, device: torch.device) -> list[str]:
    ranks = dist.get_world_size()
    elements = ranks * padded_columns(int(megabytes * 2**20) // 2, ranks)
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    x = torch.randn(elements, device=device, generator=generator)
    ways: dict[str, Callable[[], torch.Tensor]] = {BASELINE: partial(summed, x, torch.bfloat16)}
    ways["fp32 sum"] = partial(summed, x, torch.float32)
    ways |= {codec: partial(coded, x, codec) for codec in CODECS if codec != "fp32"}
    exact = summed(x, torch.float32).double()
    errors = {name: float((way() - exact).norm() / exact.norm()) for name, way in ways.items()}
    timed = compared(ways, device, time_in_turns, baseline=BASELINE)
    return [
        f"{megabytes:6g}  {name:9} {errors[name]:8.5f}  {timing.microseconds!s:36} {timing.speedup}"
        for name, timing in timed.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 4, 16, 64, 256])
    arguments = parser.parse_args()
    with process_group(arguments.device) as device:  # other ranks than the first print nothing
        where = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU, gloo"
        print(f"{dist.get_world_size()} ranks, {where}, torch {torch.__version__}")
        print(f"{'MB':>6}  {'way':9} {'error':>8}  {'microseconds':36} speedup over {BASELINE}", flush=True)
        for megabytes in arguments.megabytes:
            print("\n".join(measured(megabytes, torch.device(device))), flush=True)


if __name__ == "__main__":
    main()
