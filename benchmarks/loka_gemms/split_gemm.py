"""The split GEMM against cuBLASLt in FP8 and bfloat16, on weight gradients of narrow layers.

    python benchmarks/loka_gemms/split_gemm.py [--seconds 50] [--only 512,512,65536]

CUDA graphs, cold L2 (each call of a graph has operands of its own), interleaved (core/timing.py);
normal operands. Each way is checked against the exact product before it is timed, within the
bound of core/numerics/reference.py. One that fails is printed and left out. Writes split_gemm.json to the
folder $OUT, or beside this file, after every problem.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from loka.core.device import fingerprint
from loka.core.numerics.reference import Quantized, accumulation_bound, quantize
from loka.core.recipe import Cast, Format, Granularity
from loka.core.storage.codec import encode
from loka.core.storage.files import write_record
from loka.core.timing import first_line, still_usable, time_interleaved
from loka.kernels.gemm.triton.split_gemm import EXACT, FAST, Config, choose, split_gemm

CASES = [  # M, N, K: out features, in features, batch
    (512, 512, 65536),
    (512, 512, 8192),
    (1024, 1024, 8192),
    (1024, 1024, 4096),
    (512, 512, 2048),
    (2048, 2048, 6144),
    (3456, 512, 8192),
    (512, 3456, 8192),
    (2048, 2048, 2048),
    (1024, 3456, 8192),
]
E4M3 = Cast(Format.E4M3, Granularity.TENSOR)
COLD = 96 << 20  # bytes of operands that calls go through before one comes back: twice the L2 cache
CHECKED = 128  # rows of the result, at either end

Way = Callable[["Operands"], torch.Tensor]


class Operands:
    """A and B in FP8, the same values in bfloat16, K-major, and as a linear layer has them."""

    def __init__(self, m: int, n: int, k: int, device: torch.device) -> None:
        self.a, self.b = (quantize(torch.randn(side, k, device=device), E4M3) for side in (m, n))
        self.bf16_a, self.bf16_b = self.a.data.bfloat16(), self.b.data.bfloat16()  # scales left out
        self.gradient, self.x = self.bf16_a.t().contiguous(), self.bf16_b.t().contiguous()

    def scaled_mm(self, *, fast: bool) -> torch.Tensor:
        return torch._scaled_mm(
            self.a.data,
            self.b.data.t(),
            scale_a=self.a.scale.view(()),
            scale_b=self.b.scale.view(()),
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )

    def split(self, config: Config, *, fast: bool) -> torch.Tensor:
        a, b = self.a, self.b
        return split_gemm(a.data, b.data, a.scale, b.scale, torch.bfloat16, fast=fast, config=config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=50, help="no problem begins after these")
    parser.add_argument("--only", help="one problem: M,N,K")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    path = Path(os.environ.get("OUT") or Path(__file__).parent) / "split_gemm.json"
    cases = [tuple(map(int, arguments.only.split(",")))] if arguments.only else CASES
    began = time.monotonic()
    results: list[dict[str, object]] = []
    print(f"{'M':>5} {'N':>5} {'K':>6}  {'what':34} {'us':>8} {'TFLOP/s':>8} {'of bf16':>8} {'error':>9}")
    for m, n, k in cases:
        if time.monotonic() - began > arguments.seconds:
            print(f"{m:5} {n:5} {k:6}  left out: {arguments.seconds:g} seconds are over", flush=True)
            continue
        try:
            results += _case(m, n, k, device)
        except Exception as error:
            if not still_usable():
                raise
            print(f"{m:5} {n:5} {k:6}  failed: {first_line(error)}", flush=True)
        content = {"machine": encode(fingerprint(device)), "results": results}
        write_record(path, kind="loka-bench-split-gemm", version=1, content=content)
    print(f"took {time.monotonic() - began:.1f} s", flush=True)


def _tried(m: int, n: int, k: int) -> dict[str, tuple[Config, bool]]:
    """What is raced: every configuration of the package, and other cuts and stages of its default."""
    tried: dict[str, tuple[Config, bool]] = {}
    for fast, count in ((True, len(FAST)), (False, len(EXACT))):
        mode = "fast" if fast else "exact"
        for algorithm in range(count):
            tried[f"{mode} @{algorithm}"] = choose(m, n, fast=fast, algorithm=algorithm), fast
        first = choose(m, n, fast=fast)
        tried[f"{mode}, even"] = replace(first, splits=0), fast
        if m * n >= 1024 * 1024:
            tried[f"{mode}, not cut"] = replace(first, splits=1), fast
    first = choose(m, n, fast=True)
    if m * n <= 1024 * 1024:
        tried["fast, four stages"] = replace(first, stages=4), True
    if k >= 32768:
        tried["fast, 128 x 128, five stages"] = replace(first, block_m=128, block_n=128, stages=5), True
        tried["fast, steps of 256"] = replace(first, block_k=256, stages=2), True
        tried["exact, 16 warps"] = replace(first, warps=16), False
    return tried


def _case(m: int, n: int, k: int, device: torch.device) -> list[dict[str, object]]:
    began = time.monotonic()
    torch.manual_seed(0)
    copies = max(2, min(8, -(-COLD // ((m + n) * k))))
    sets = [Operands(m, n, k, device) for _ in range(copies)]
    ways: dict[str, tuple[Way, bool | None]] = {  # and whether it is fast; None: bfloat16, unscaled
        "torch fast": (lambda o: o.scaled_mm(fast=True), True),
        "torch exact": (lambda o: o.scaled_mm(fast=False), False),
        "bf16, K-major": (lambda o: o.bf16_a @ o.bf16_b.t(), None),
        "bf16, as it lies": (lambda o: o.gradient.t() @ o.x, None),
    }
    for label, (config, fast) in _tried(m, n, k).items():
        ways[f"split {label}"] = _bind(config, fast), fast
    results: list[dict[str, object]] = []
    functions: dict[str, Callable[[], object]] = {}
    errors: dict[str, float] = {}
    bounds = {fast: _expected(sets[0], fast) for fast in (True, False, None)}
    for label, (way, fast) in ways.items():
        try:
            errors[label] = _check(way(sets[0]), *bounds[fast])
        except Exception as error:
            if not still_usable():
                raise
            print(f"{m:5} {n:5} {k:6}  {label:34} {first_line(error)[:90]}", flush=True)
            results.append({"m": m, "n": n, "k": k, "what": label, "failed": first_line(error)})
            continue
        functions[label] = _rotate(sets, way)
    baseline = "bf16, as it lies"
    race = time_interleaved(functions, baseline=baseline, device=device, keep=list(functions), max_rounds=16)
    for label, why in race.failures.items():
        print(f"{m:5} {n:5} {k:6}  {label:34} {why[:90]}", flush=True)
        results.append({"m": m, "n": n, "k": k, "what": label, "failed": why})
    for label, timing in race.timings.items():
        us = timing.microseconds
        speed = 2 * m * n * k / us.value / 1e6
        numbers = f"{us.value:8.1f} {speed:8.0f} {timing.speedup.value:8.2f} {errors[label]:9.1e}"
        print(f"{m:5} {n:5} {k:6}  {label:34} {numbers}", flush=True)
        row = {"m": m, "n": n, "k": k, "what": label, "us": us.value, "interval": [us.low, us.high]}
        results.append({**row, "error": errors[label]})
    print(f"{m:5} {n:5} {k:6}  took {time.monotonic() - began:.1f} s", flush=True)
    return results


def _expected(operands: Operands, fast: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact product's first and last rows, and how far a result may be from them."""
    rows = torch.cat([operands.a.data.view(torch.uint8)[part] for part in _ends()])
    part = Quantized(rows.view(Format.E4M3.dtype), operands.a.scale, E4M3)
    if fast is not None:
        exact = (part.data.double() * part.scale) @ (operands.b.data.double() * operands.b.scale).t()
        return exact, accumulation_bound(part, operands.b, fast=fast, dtype=torch.bfloat16)
    left, right = part.data.double(), operands.b.data.double()
    exact = left @ right.t()
    # cuBLAS may add a few pieces of K in bfloat16; a piece is about as large as a random sum's deviation.
    return exact, 2.0**-6 * (exact.abs() + (left.square() @ right.square().t()).sqrt())


def _ends() -> tuple[slice, slice]:
    return slice(0, CHECKED), slice(-CHECKED, None)


def _check(out: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> float:
    """The error's norm as a share of the result's. Raises ValueError for wrong numbers.

    A bound for all operands is wide for fast accumulation over a long K. The share is not: a step of 128
    left out of 512 is 4e-2, and bfloat16's rounding alone 2e-3.
    """
    got = torch.cat([out[part] for part in _ends()]).double()
    wrong = ~((got - exact).abs() <= bound)
    if wrong.any():
        raise ValueError(f"{int(wrong.sum())} of {wrong.numel()} elements are out of bounds")
    return float((got - exact).norm() / exact.norm())


def _bind(config: Config, fast: bool) -> Way:
    return lambda operands: operands.split(config, fast=fast)


def _rotate(sets: list[Operands], way: Way) -> Callable[[], object]:
    turn = itertools.cycle(sets)
    return lambda: way(next(turn))


if __name__ == "__main__":
    main()
