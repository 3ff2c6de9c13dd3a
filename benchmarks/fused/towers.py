"""Towers of Linear - BlockNorm - HardSwish layers, forward and backward: the fused path against bf16.

    python benchmarks/fused/towers.py --out benchmarks/fused/towers.json

Every arm is the same module in bf16, made by LoKA's mods, timed under a CUDA graph, all arms of a shape
in one race: bf16 under torch.compile (the baseline), torchao's three recipes under torch.compile, and
LoKA's fused chains with the safe recipe and with faster ones. Random normal data; the input gets a
gradient.

The floor is what no schedule of this arithmetic can beat here: the best FP8 time of every GEMM, and the
least bytes beside them over the bandwidth of a copy. With all producers inside GEMM epilogues these are
4 bytes an element of every layer's output: A in FP8 written (1), and in backward Z read (2), dZ, dZ^T and
A^T written in FP8 (3), less the dA (2) that need not be written.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import loka
from loka.core.chain import Chain
from loka.core.compiling import compile_in_place
from loka.core.device import fingerprint
from loka.core.files import write_record
from loka.core.recipe import Gemm
from loka.core.report import site_name
from loka.core.table import format_table
from loka.core.timing import time_interleaved
from loka.kernels.launches import launches, reset_launches
from loka.nn.chain import form_chains, running_chains
from loka.nn.dataflow import find_chains

SHAPES: dict[str, tuple[int, tuple[int, ...]]] = {
    "4096x1024": (4096, (1024,) * 7),
    "8192x1024": (8192, (1024,) * 7),
    "2048x2048": (2048, (2048,) * 7),
    "6144x2048": (6144, (2048,) * 7),
    "6144x4096": (6144, (4096,) * 7),
    "6144x(4608,8192,8192,8192)": (6144, (4608, 8192, 8192, 8192)),
    "65536x512": (65536, (512,) * 7),
    "2048x512": (2048, (512,) * 7),
}
BF16 = "bf16 compiled"
TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
# Our own kernel for grad_weight, which cuts a long K: it wins at 65536 rows and is not raced elsewhere.
SPLIT = "fused e4m3_row, loka_split"
SPLIT_Z8 = "fused e4m3_row_z8, loka_split"
SPLITS = (SPLIT, SPLIT_Z8)
FUSED = {
    "fused e4m3_row": ("e4m3_row", False),
    SPLIT: ("e4m3_row", False),
    "fused e4m3_row_z8": ("e4m3_row_z8", False),
    SPLIT_Z8: ("e4m3_row_z8", False),
    "fused e4m3_row_z8, fast": ("e4m3_row_z8", True),
    "fused e4m3_row, fast": ("e4m3_row", True),
    "fused e4m3_tensor": ("e4m3_tensor", False),
    "fused e4m3_tensor, fast": ("e4m3_tensor", True),
    "fused e5m2_tensor, fast": ("e5m2_tensor", True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--shape", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--arm", nargs="*", default=None, help="only these besides bf16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile-only", action="store_true", help="fill the compile caches and stop")
    arguments = parser.parse_args()
    wanted = arguments.arm or [*(f"torchao {name}" for name in TORCHAO), *FUSED]
    if arguments.compile_only:
        for shape in arguments.shape:
            _warm(*SHAPES[shape], wanted)
        return
    _compile_ahead(arguments.shape, wanted)
    results: dict[str, dict[str, object]] = {}
    for shape in arguments.shape:
        results[shape] = _race(*SHAPES[shape], wanted, arguments.rounds)
        print(f"\n{shape}\n{_table(results[shape])}", flush=True)
        content = {"machine": fingerprint(torch.device("cuda")).to_json(), "results": results}
        write_record(arguments.out, kind="loka-bench-towers", version=1, content=content)


def _compile_ahead(shapes: list[str], wanted: list[str]) -> None:
    """In parallel processes, into the caches that this process reads afterwards."""
    begin = time.monotonic()
    command = [sys.executable, __file__, "--compile-only", "--arm", *wanted, "--shape"]
    children = [subprocess.Popen([*command, shape]) for shape in shapes]
    for child in children:
        child.wait()
    print(f"compiled ahead in {time.monotonic() - begin:.0f} s", flush=True)


def _tower(widths: tuple[int, ...]) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.LayerNorm(after), nn.SiLU()]
    model = nn.Sequential(*layers)
    loka.mods.apply(model, [loka.mods.NoBias(), loka.mods.BlockNorm(256), loka.mods.HardSwish()])
    return model.to("cuda", torch.bfloat16)


def _build(arm: str, widths: tuple[int, ...]) -> nn.Module:
    model = _tower(widths)
    if arm in FUSED:
        recipe, fast = FUSED[arm]
        probe = torch.randn(16, widths[0], device="cuda", dtype=torch.bfloat16)
        chains = find_chains(model, probe).chains
        for_chain = _split if arm in SPLITS else _fast if fast else (lambda chain, recipe: {})
        form_chains(model, [(chain, recipe, for_chain(chain, recipe)) for chain in chains])
        return model
    if arm.startswith("torchao "):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(arm.removeprefix("torchao "))
        convert_to_float8_training(model, config=config)
    return compile_in_place(model)


def _split(chain: Chain, recipe: str) -> dict[str, str]:
    return {site_name(link.path, Gemm.GRAD_WEIGHT): "loka_split:tensorwise_e4m3@1" for link in chain.links}


def _fast(chain: Chain, recipe: str) -> dict[str, str]:
    gradient = "tensorwise_e5m2" if recipe.startswith("e5m2") else "tensorwise_e4m3"
    return {
        site_name(link.path, gemm): f"torch_fast:{'tensorwise_e4m3' if gemm is Gemm.OUTPUT else gradient}"
        for link in chain.links
        for gemm in Gemm
    }


def _step(model: nn.Module, rows: int, widths: tuple[int, ...]) -> Callable[..., object]:
    torch.manual_seed(1)
    x = torch.randn(rows, widths[0], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(rows, widths[-1], device="cuda", dtype=torch.bfloat16) / rows
    leaves = [x, *model.parameters()]

    def step(between: Callable[[torch.Tensor], None] = lambda out: None) -> None:
        for leaf in leaves:
            leaf.grad = None
        out = model(x)
        between(out)
        out.backward(gradient)

    return step


def _warm(rows: int, widths: tuple[int, ...], wanted: list[str]) -> None:
    for arm in [BF16, *(arm for arm in wanted if arm not in FUSED)]:
        try:
            step = _step(_build(arm, widths), rows, widths)
            step()
            step()
        except Exception as error:
            print(f"{arm}: {type(error).__name__}: {error}", flush=True)
        torch._dynamo.reset()


def _race(rows: int, widths: tuple[int, ...], wanted: list[str], rounds: int) -> dict[str, object]:
    steps: dict[str, Callable[[], object]] = {}
    arms: dict[str, dict[str, object]] = {}
    for arm in [BF16, *(arm for arm in wanted if arm not in SPLITS or rows >= 32768)]:
        try:
            model = _build(arm, widths)
            step = _step(model, rows, widths)
            for _ in range(3):
                step()
            arms[arm] = _memory(model, step)
            steps[arm] = step
        except Exception as error:
            arms[arm] = {"failure": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
            torch.cuda.synchronize()
        torch._dynamo.reset()
    race = time_interleaved(
        steps, baseline=BF16, device=torch.device("cuda"), keep=list(steps), max_rounds=rounds
    )
    for arm, timing in race.timings.items():
        arms[arm]["microseconds"] = timing.microseconds.value
        speedup = timing.speedup
        arms[arm]["speedup"] = [speedup.value, speedup.low, speedup.high]
    for arm, reason in race.failures.items():
        arms[arm]["failure"] = reason
    floor = _floor(rows, widths)
    base = arms[BF16]["microseconds"]
    del steps
    gc.collect()
    torch.cuda.empty_cache()
    assert isinstance(base, float)
    return {"arms": arms, "floor_us": floor, "floor_speedup": base / sum(floor.values())}


def _memory(model: nn.Module, step: Callable[..., object]) -> dict[str, object]:
    """Bytes that forward keeps for backward, and the peak of a step, both beyond what lies there anyway;
    the output, and at the peak all gradients of weights, are not counted."""
    for parameter in model.parameters():
        parameter.grad = None
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    reset_launches()
    kept: list[int] = []
    step(lambda out: kept.append(torch.cuda.memory_allocated() - before - out.numel() * out.element_size()))
    counted = launches()
    torch.cuda.synchronize()
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in model.parameters() if p.grad is not None)
    copies = sum(
        2 * p.numel() for chain in running_chains(model).values() for p in chain.parameters() if p.dim() == 2
    )
    return {
        "kept_bytes": kept[0],
        "peak_activation_bytes": torch.cuda.max_memory_allocated() - before - gradients,
        "weight_copy_bytes": copies,
        "launches": counted,
    }


def _floor(rows: int, widths: tuple[int, ...]) -> dict[str, float]:
    """Microseconds of the best FP8 GEMMs of all layers, and of the least bytes beside them."""
    device = torch.device("cuda")
    one = torch.ones(1, 1, device=device)
    total, known = 0.0, {}
    moved = 4 * rows * sum(widths[1:])
    for before, after in itertools.pairwise(widths):
        for m, k, n in ((rows, before, after), (rows, after, before), (after, rows, before)):
            if (m, k, n) not in known:
                a = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
                b = torch.randn(n, k, device=device).to(torch.float8_e4m3fn).t()
                run = {
                    f"fast {fast}": lambda a=a, b=b, fast=fast: torch._scaled_mm(
                        a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast
                    )
                    for fast in (True, False)
                }
                race = time_interleaved(
                    run, baseline="fast True", device=device, keep=list(run), max_rounds=9
                )
                known[m, k, n] = min(t.microseconds.value for t in race.timings.values())
            total += known[m, k, n]
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    race = time_interleaved(
        {"copy": lambda: target.copy_(source)}, baseline="copy", device=device, max_rounds=9
    )
    return {"gemms": total, "bytes": race.timings["copy"].microseconds.value}


def _table(result: dict[str, object]) -> str:
    arms = result["arms"]
    assert isinstance(arms, dict)
    base = arms[BF16]
    rows = []
    for arm, found in arms.items():
        if "failure" in found:
            rows.append((arm, "-", "-", "-", "-", "-", "-", str(found["failure"])[:80]))
            continue
        value, low, high = found["speedup"]
        of_floor = value / float(str(result["floor_speedup"]))
        rows.append(
            (
                arm, f"{found['microseconds']:.1f}", f"{value:.3f}x", f"[{low:.3f}, {high:.3f}]",
                f"{of_floor:.0%}",
                *(f"{found[key] / base[key]:.2f}" for key in ("kept_bytes", "peak_activation_bytes")),
                " ".join(f"{n} {what}" for what, n in found["launches"].items()),
            )
        )  # fmt: skip
    table = format_table(("arm", "us", "speed-up", "95 %", "of floor", "kept", "peak", "launches"), rows)
    return f"{table}\nfloor {result['floor_speedup']:.2f}x: {result['floor_us']}"


if __name__ == "__main__":
    main()
