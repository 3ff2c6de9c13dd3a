"""The fused GEMM against cuBLASLt, and against cuBLASLt with the cheapest kernel that can follow it.

    python benchmarks/loka_gemms/gemm.py [--exact] [--block 256] [--served]

CUDA graphs, cold L2, interleaved (core/timing.py); random normal operands in e4m3, BlockNorm,
hard swish, result in e4m3. Every configuration is checked before it is timed: Z, as kept in eight bits,
against the exact product on the first and last rows, the result against the twin's of Z on all. Writes
gemm.json to the folder $OUT, or beside this file.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton
import triton.language as tl

from loka.core.device import fingerprint
from loka.core.numerics.reference import Quantized, accumulation_bound, quantize
from loka.core.recipe import Cast, Format, Granularity
from loka.core.storage.codec import encode
from loka.core.storage.files import write_record
from loka.core.timing import first_line, still_usable, time_interleaved
from loka.kernels.gemm.epilogue import Activation, Epilogue, Normed, apply_epilogue, restored
from loka.kernels.gemm.triton.gemm import CONFIGS, EXACT, EXACT_WIDE, Config, gemm_normed_fused

CASES = [  # M, K, N
    (2048, 512, 512),
    (65536, 512, 512),
    (4096, 1024, 1024),
    (8192, 1024, 1024),
    (2048, 2048, 2048),
    (6144, 2048, 2048),
    (6144, 4096, 4096),
]
SERVED = [  # the deep part of DLRM-DCNv2 at small batches: few tiles, and one layer with a long K
    (512, 3456, 1024),
    (2048, 3456, 1024),
    (8192, 3456, 1024),
    (512, 1024, 1024),
    (2048, 1024, 1024),
    (512, 1024, 512),
    (2048, 1024, 512),
    (2048, 512, 256),
]
# Beyond what the package offers: what a stage is worth, a tile written whole, and one pipeline for two
# programs. The first three are too large with Z.
TRIED = {
    "four stages": Config(stages=4, parts=2),
    "whole": Config(stages=3),
    "whole, four stages": Config(stages=4),
    "two, one pipeline": Config(block_m=64, stages=2, warps=4, per_sm=2, parts=2),
}
ROTATION = 8  # as many inputs as calls in a graph, so that each call finds its own out of the cache
E4M3 = Cast(Format.E4M3, Granularity.TENSOR)


@triton.jit
def _epilogue(z_ptr, out_ptr, rows, columns, eps, inverse, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """hard swish of the block norm of z, in e4m3: a program per ROWS rows of a block."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offsets = r.to(tl.int64)[:, None] * columns + c[None, :]
    inside = (r < rows)[:, None]
    z = tl.load(z_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    y = z * tl.rsqrt(tl.sum(z * z, axis=1, keep_dims=True) / BLOCK + eps)
    value = y * tl.minimum(tl.maximum(y + 3.0, 0.0), 6.0) * (inverse / 6.0)
    tl.store(out_ptr + offsets, value.to(tl.float8e4nv), mask=inside)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exact", action="store_true", help="sums move to float32 after every 128 of K")
    parser.add_argument("--block", type=int, default=256)
    parser.add_argument("--served", action="store_true", help="the shapes of small batches; gemm_served.json")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    configs = {"exact": EXACT, "exact, wide": EXACT_WIDE} if arguments.exact else {**CONFIGS, **TRIED}
    name = "gemm_served.json" if arguments.served else "gemm.json"
    path = Path(os.environ.get("OUT") or Path(__file__).parent) / name
    sizes = f"{'M':>6} {'K':>5} {'N':>5}"
    print(f"{sizes}  {'what':24} {'us':>8} {'TFLOP/s':>8} {'of gemm':>8} {'of gemm + kernel':>17}")
    results = []
    for case in SERVED if arguments.served else CASES:
        results += _case(*case, arguments.block, configs, device, fast=not arguments.exact)
        content = {"machine": encode(fingerprint(device)), "results": results, "fast": not arguments.exact}
        write_record(path, kind="loka-bench-fused-gemm", version=1, content=content)


def _case(
    rows: int,
    inner: int,
    width: int,
    block: int,
    configs: dict[str, Config],
    device: torch.device,
    *,
    fast: bool,
) -> list[dict[str, object]]:
    began = time.monotonic()
    inputs = [
        quantize(torch.randn(rows, inner, device=device), E4M3, scale=torch.tensor([2.0**-5], device=device))
        for _ in range(ROTATION)
    ]
    w = torch.randn(width, inner, device=device) / inner**0.5
    weight = quantize(w, E4M3, scale=torch.tensor([2.0**-10], device=device))
    of = Epilogue(block=block, eps=1e-6, activation=Activation.HARD_SWISH)

    def gemm(a: Quantized) -> torch.Tensor:
        return torch._scaled_mm(
            a.data,
            weight.data.t(),
            scale_a=a.scale.view(()),
            scale_b=weight.scale.view(()),
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )

    def fused(a: Quantized, config: Config, *, keep: bool) -> Normed:
        options = {"keep": keep, "fast": fast, "config": config}
        return gemm_normed_fused(a.data, weight.data, a.scale, weight.scale, of, **options)

    functions: dict[str, Callable[[], object]] = {
        "gemm": _rotate(inputs, gemm),
        "gemm + kernel": _rotate(inputs, lambda a: separate(gemm(a), of)),
    }
    kept: Normed | None = None
    failed = {}
    # Those that keep Z come first: all configurations add in the same order.
    for keep, (name, config) in itertools.product((True, False), configs.items()):
        label = f"{name} + Z" if keep else name
        try:
            made = fused(inputs[0], config, keep=keep)
            kept = made if keep else kept
            _check(made.data, kept, inputs[0], weight, of, fast=fast)
        except Exception as error:
            if not still_usable():
                raise
            failed[label] = first_line(error)
            print(f"{rows:6} {inner:5} {width:5}  {label:24} {failed[label][:90]}", flush=True)
            continue
        functions[label] = _rotate(inputs, lambda a, config=config, keep=keep: fused(a, config, keep=keep))
    race = time_interleaved(functions, baseline="gemm", device=device, keep=list(functions), max_rounds=24)
    both = race.timings["gemm + kernel"].microseconds.value
    results: list[dict[str, object]] = [
        {"rows": rows, "inner": inner, "width": width, "what": label, "failed": why}
        for label, why in {**failed, **race.failures}.items()
    ]
    for name, timing in race.timings.items():
        us = timing.microseconds.value
        speed = 2 * rows * inner * width / us / 1e6
        numbers = f"{us:8.1f} {speed:8.0f} {1 / timing.speedup.value:8.2f} {us / both:17.2f}"
        print(f"{rows:6} {inner:5} {width:5}  {name:24} {numbers}", flush=True)
        interval = [timing.microseconds.low, timing.microseconds.high]
        results.append(
            {"rows": rows, "inner": inner, "width": width, "what": name, "us": us, "interval": interval}
        )
    print(f"{rows:6} {inner:5} {width:5}  took {time.monotonic() - began:.1f} s", flush=True)
    return results


def separate(z: torch.Tensor, of: Epilogue) -> torch.Tensor:
    """What a kernel after the GEMM does: reads Z in bfloat16, writes e4m3."""
    out = torch.empty(z.shape, dtype=torch.float8_e4m3fn, device=z.device)
    grid = (triton.cdiv(z.shape[0], 16), z.shape[1] // of.block)
    _epilogue[grid](z, out, *z.shape, of.eps, 1 / of.scale, BLOCK=of.block, ROWS=16, num_warps=4)
    return out


def _check(
    out: torch.Tensor, kept: Normed | None, a: Quantized, w: Quantized, of: Epilogue, *, fast: bool
) -> None:
    """Raises ValueError for wrong numbers; bounds as in tests/kernels/gemm/test_triton_gemm.py."""
    if kept is None or kept.z is None:
        raise ValueError("no configuration kept Z to compare with")
    z, steps = restored(kept.z, of), kept.z.steps.repeat_interleave(of.block, dim=1) * (0.5 + 2**-9)
    for some in (slice(0, 256), slice(-256, None)):
        part = Quantized(a.data[some], a.scale, a.cast)
        exact = (part.data.double() * a.scale) @ (w.data.double() * w.scale).t()
        bound = accumulation_bound(part, w, fast=fast, dtype=torch.float32) + steps[some]
        wrong = ~((z[some].double() - exact).abs() <= bound)
        if wrong.any():
            raise ValueError(f"{int(wrong.sum())} of {wrong.numel()} elements of Z are out of bounds")
    expected = apply_epilogue(z, of)
    inverse = kept.inverse_rms.repeat_interleave(of.block, dim=1)
    half = (expected.abs() * 2.0**-3).clamp_min(2.0**-9 * of.scale)
    wrong = ~((out.float() * of.scale - expected).abs() <= half + 4 * steps * inverse)
    if wrong.any():
        raise ValueError(f"{int(wrong.sum())} of {wrong.numel()} results are not the twin's")


def _rotate(inputs: list[Quantized], call: Callable[[Quantized], object]) -> Callable[[], object]:
    turn = itertools.cycle(inputs)
    return lambda: call(next(turn))


if __name__ == "__main__":
    main()
