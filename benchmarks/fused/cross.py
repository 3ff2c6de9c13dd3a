"""A stack of DCN-V2 cross layers, served and trained: bf16, the path of training, and GEMMs that do the rest.

    python benchmarks/fused/cross.py [--rows 512 2048 8192] [--no-train] [--no-kernels]

Three layers of rank 512 on 3456 features, MLPerf's, in bf16 with biases, x being x_0 first. CUDA graphs,
cold L2, interleaved (core/timing.py); random normal data. "parts": serving by today's four launches a
layer; "fused": by two, the V GEMM that casts and the U GEMM with the cross formula in its epilogue. Then
both GEMMs of a middle layer by themselves, in every configuration, each checked before it is timed
against the exact product on the first and last rows. "GB/s" is of what U's epilogue must move: x_0, x
and x' in bf16, and x' in FP8 but for the last layer.

Kernels compile in processes of their own, all at once. Writes cross.json to the folder $OUT, or
beside this file.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from loka.core.chain import NOTHING
from loka.core.compiling import compile_in_place
from loka.core.cross_record import CrossLink, CrossStack
from loka.core.device import fingerprint
from loka.core.files import write_record
from loka.core.problem import round_up, target_of
from loka.core.producer import NO_PARAMETERS, cast_given
from loka.core.recipe import Cast, Format, Granularity
from loka.core.reference import Quantized, accumulation_bound, quantize
from loka.core.timing import Race, first_line, still_usable, time_interleaved
from loka.kernels.cross import cross_produce
from loka.kernels.gemm_cross import gemm_cast
from loka.kernels.producer import produce
from loka.kernels.triton.gemm_cross import (
    BEST,
    gemm_cross_fused,
)
from loka.nn.chain import form_chains
from loka.nn.cross import running_crosses
from loka.probe.cross_times import build_stack

FEATURES, RANK, LAYERS = 3456, 512, 3
ROWS = (512, 2048, 8192)
TRAINED = 8192
ROTATION = 8  # as many inputs as calls in a graph, so that each call finds its own out of the cache
ROUNDS = 15
BF16, PARTS, FUSED = "bf16 compiled", "FP8, parts", "FP8, fused"
E4M3 = Cast(Format.E4M3, Granularity.TENSOR)
SCALE = 2.0**-5  # of normal data: 14 is the largest
# Three stages or programs that overlap, wide tiles or narrow ones.
CROSSES = {
    "shipped": BEST,
    "8 warps": replace(BEST, warps=8),
    "wide, two stages": replace(BEST, block_n=128, stages=2),
    "wide, two programs": replace(BEST, block_n=128, stages=1, per_sm=2),
    "three programs": replace(BEST, stages=1, per_sm=3),
    "exact": BEST,
}


def main(given: list[str] | None = None, *, device: str = "cuda") -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--no-train", action="store_true")
    parser.add_argument("--no-kernels", action="store_true")
    parser.add_argument("--warm", help="fill the compile caches for one piece of the work, and stop")
    arguments = parser.parse_args(given)
    begin, place = time.monotonic(), torch.device(device)
    pieces = _pieces(arguments.rows, train=not arguments.no_train, kernels=not arguments.no_kernels)
    if arguments.warm is not None:
        pieces[arguments.warm](place)
        return
    if place.type == "cuda":
        _compile_ahead(sys.argv[1:] if given is None else given, list(pieces))
        print(f"compiled ahead, {time.monotonic() - begin:.0f} s", flush=True)
    path = Path(os.environ.get("OUT") or Path(__file__).parent) / "cross.json"
    results: dict[str, list[dict[str, object]]] = {}
    cases: dict[str, Callable[[], list[dict[str, object]]]] = {}
    for rows in arguments.rows:
        cases[f"serving {rows}"] = lambda rows=rows: _served(rows, place)
    if not arguments.no_train:
        cases[f"training {TRAINED}"] = lambda: _trained(TRAINED, place)
    if not arguments.no_kernels:
        for rows in arguments.rows:
            cases[f"U kernel {rows}"] = lambda rows=rows: _crosses(rows, place)
            cases[f"V kernel {rows}"] = lambda rows=rows: _casts(rows, place)
    for name, case in cases.items():
        results[name] = case()
        for found in results[name]:
            print(_line(name, found), flush=True)
        print(f"{name}: {time.monotonic() - begin:.0f} s in all", flush=True)
        content = {"machine": fingerprint(place).to_json(), "results": results}
        write_record(path, kind="loka-bench-fused-cross", version=1, content=content)
        gc.collect()
        if place.type == "cuda":
            torch.cuda.empty_cache()


def _line(case: str, found: Mapping[str, object]) -> str:
    if "failed" in found:
        return f"{case:16} {found['what']:28} {str(found['failed'])[:120]}"
    numbers = f"{found['us']:9.1f} us {found['speedup']:7.3f}x {found.get('GB/s', 0):7.0f} GB/s"
    return f"{case:16} {found['what']:28} {numbers}"


def _pieces(rows: list[int], *, train: bool, kernels: bool) -> dict[str, Callable[[torch.device], object]]:
    """What compiles by itself, by name."""
    pieces: dict[str, Callable[[torch.device], object]] = {}
    for size in rows:
        pieces[f"bf16 {size}"] = lambda device, size=size: _serve_once(BF16, size, device)
        pieces[f"fused {size}"] = lambda device, size=size: _serve_once(FUSED, size, device)
    if rows:
        pieces["parts"] = lambda device: _serve_once(PARTS, rows[0], device)
    if train:
        for arm in (BF16, PARTS):
            pieces[f"train {arm}"] = lambda device, arm=arm: _training(arm, TRAINED, device)()
    if kernels and rows:
        for group in _groups(list(CROSSES), 3):
            pieces[f"U {group[0]}"] = lambda device, group=group: _warm_layer(_Layer.cross, group, device)
    return pieces


def _groups(names: list[str], size: int) -> list[list[str]]:
    return [names[begin : begin + size] for begin in range(0, len(names), size)]


def _warm_layer(run: Callable[[_Layer, str], object], names: list[str], device: torch.device) -> None:
    layer = _Layer(min(ROWS), device)  # a kernel is the same for all numbers of rows
    for name in names:
        run(layer, name)


def _compile_ahead(given: list[str], pieces: list[str]) -> None:
    """In parallel processes, into the caches that this one reads afterwards. What fails there fails here."""
    command = [sys.executable, __file__, *given, "--warm"]
    children = [subprocess.Popen([*command, piece], stderr=subprocess.DEVNULL) for piece in pieces]
    for child in children:
        child.wait()


def _build(arm: str, device: torch.device) -> nn.Module:
    links = [
        CrossLink(path=f"{place}", u=f"{place}.u", v=f"{place}.v", features=FEATURES, rank=RANK, bias=True)
        for place in range(LAYERS)
    ]
    torch.manual_seed(0)
    model, stack, _ = build_stack(CrossStack(layers=tuple(links), joint=True), device, torch.bfloat16)
    if arm == BF16:
        return compile_in_place(model)
    form_chains(model, [], [(stack, "e4m3_row", {})])
    if arm == PARTS:
        for running in running_crosses(model).values():
            running._served[torch.bfloat16, target_of(device)] = None
    return model


def _inputs(rows: int, device: torch.device, count: int = ROTATION) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(rows, FEATURES, device=device, dtype=torch.bfloat16) for _ in range(count)]


def _serve_once(arm: str, rows: int, device: torch.device) -> None:
    with torch.no_grad():
        _build(arm, device)(*_inputs(rows, device, 1))


def _served(rows: int, device: torch.device) -> list[dict[str, object]]:
    inputs = _inputs(rows, device)
    models = {arm: _build(arm, device) for arm in (BF16, PARTS, FUSED)}
    with torch.no_grad():
        outs = {arm: model(inputs[0]).float() for arm, model in models.items()}
        for arm in (PARTS, FUSED):
            noise = (outs[arm] - outs[BF16]).square().mean() / outs[BF16].square().mean()
            if not noise < 10**-2.0:  # 20 dB: e4m3 leaves 22 (tests/nn/test_cross_stack.py)
                raise ValueError(f"{arm} differs from bf16 by {float(noise):.2g} of its power")
        race = _race(
            {arm: _rotate(inputs, lambda x, model=model: model(x)) for arm, model in models.items()}, device
        )
    return _results(race, LAYERS * rows, last=rows)


def _training(arm: str, rows: int, device: torch.device) -> Callable[[], object]:
    """A step: forward and backward, with a gradient for x_0."""
    model = _build(arm, device)
    inputs = [x.requires_grad_() for x in _inputs(rows, device, 2)]
    gradient = torch.randn(rows, FEATURES, device=device, dtype=torch.bfloat16) / rows
    leaves = [*inputs, *model.parameters()]

    def step(x: torch.Tensor) -> None:
        for leaf in leaves:
            leaf.grad = None
        model(x).backward(gradient)

    return _rotate(inputs, step)


def _trained(rows: int, device: torch.device) -> list[dict[str, object]]:
    return _results(_race({arm: _training(arm, rows, device) for arm in (BF16, PARTS)}, device))


class _Layer:
    """A middle layer's operands, and what may run it. `quantize` pads nothing here."""

    def __init__(self, rows: int, device: torch.device) -> None:
        torch.manual_seed(2)

        def low(high: int, wide: int, scale: float) -> Quantized:
            values = torch.randn(high, wide, device=device) * (scale / SCALE)
            return quantize(values, E4M3, scale=torch.tensor([scale], device=device))

        self.rows, self.scale = rows, torch.tensor([SCALE], device=device)
        # Weights whose products with normal data are about as large as it.
        self.u, self.v = low(FEATURES, RANK, 2.0**-10), low(RANK, FEATURES, 2.0**-11)
        self.bias = torch.randn(FEATURES, device=device, dtype=torch.bfloat16)
        self.inners = [low(rows, RANK, SCALE) for _ in range(ROTATION)]
        self.lows = [low(rows, FEATURES, SCALE) for _ in range(ROTATION)]
        self.x0s, self.xs = _inputs(rows, device), [x.flip(0) for x in _inputs(rows, device)]
        self.folded = self.lows[0].scale.view(1) / self.scale
        self.turn = itertools.cycle(range(ROTATION))

    def cross(self, name: str, turn: int = 0) -> tuple[torch.Tensor, torch.Tensor | None]:
        a = self.inners[turn]
        made = gemm_cross_fused(
            a.data, self.u.data, a.scale.view(1), self.u.scale.view(1), self.bias, self.x0s[turn],
            self.xs[turn], scale_out=self.scale, fast=name != "exact", config=CROSSES[name],
        )  # fmt: skip
        return made.hp, made.row

    def cast(self, turn: int = 0) -> torch.Tensor:
        a = self.lows[turn]
        return gemm_cast(a.data, self.v.data, self.folded, self.v.scale.view(1))

    def multiply(self, a: Quantized, w: Quantized) -> torch.Tensor:
        return torch._scaled_mm(
            a.data,
            w.data.t(),
            scale_a=a.scale.view(()),
            scale_b=w.scale.view(()),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    def cross_apart(self, turn: int = 0) -> object:
        return cross_produce(
            self.multiply(self.inners[turn], self.u), self.bias, self.x0s[turn], self.xs[turn],
            scale=self.scale, sides=(round_up(FEATURES, 16), round_up(self.rows, 16)),
        )  # fmt: skip

    def cast_apart(self, turn: int = 0) -> object:
        made = self.multiply(self.lows[turn], self.v)
        return produce(made, NOTHING, NO_PARAMETERS, scale=self.scale, columns=round_up(RANK, 16))

    def rotate(self, run: Callable[[int], object]) -> Callable[[], object]:
        return lambda: run(next(self.turn))

    def bounds(
        self, a: Quantized, w: Quantized, some: slice, *, fast: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The exact product of some rows in float64, and how far the kernel's may be from it."""
        part = Quantized(a.data[some], a.scale, a.cast)
        exact = (part.data.double() * a.scale) @ (w.data.double() * w.scale).t()
        return exact, accumulation_bound(part, w, fast=fast, dtype=torch.float32).double()

    def check_cross(self, name: str) -> None:
        """Raises ValueError for wrong numbers; bounds as in tests/kernels/test_triton_gemm_cross.py."""
        hp, row = self.cross(name)
        for some in (slice(0, 256), slice(-256, None)):
            u, wrong = self.bounds(self.inners[0], self.u, some, fast=name != "exact")
            x0, x, outer = self.x0s[0][some].double(), self.xs[0][some].double(), u + self.bias.double()
            value = x0 * outer + x
            bound = wrong * x0.abs() + 2.0**-24 * (2 * (x0 * outer).abs() + value.abs())
            _within((hp[some].double() - value).abs() <= bound + 2.0**-8 * (value.abs() + bound), "x'")
            assert row is not None, "a scale was given"
            _check_low(row[some], value, bound, self.scale)

    def check_cast(self) -> None:
        row = self.cast()
        for some in (slice(0, 256), slice(-256, None)):
            _check_low(row[some], *self.bounds(self.lows[0], self.v, some, fast=True), self.scale)


def _check_low(row: torch.Tensor, value: torch.Tensor, bound: torch.Tensor, scale: torch.Tensor) -> None:
    low, high = (cast_given(side.float(), scale).float() for side in (value - bound, value + bound))
    _within((low <= row.float()) & (row.float() <= high), "the FP8 result")


def _within(right: torch.Tensor, what: str) -> None:
    if not right.all():
        raise ValueError(f"{int((~right).sum())} of {right.numel()} elements of {what} are out of bounds")


def _crosses(rows: int, device: torch.device) -> list[dict[str, object]]:
    layer = _Layer(rows, device)
    functions: dict[str, Callable[[], object]] = {
        "torch + cross_produce": layer.rotate(layer.cross_apart),
        "torch alone": layer.rotate(lambda turn: layer.multiply(layer.inners[turn], layer.u)),
    }
    checks = {name: lambda name=name: layer.check_cross(name) for name in CROSSES}
    runs = {name: layer.rotate(lambda turn, name=name: layer.cross(name, turn)) for name in CROSSES}
    failed = _add(functions, runs, checks)
    return failed + _results(_race(functions, device), rows)


def _casts(rows: int, device: torch.device) -> list[dict[str, object]]:
    layer = _Layer(rows, device)
    layer.check_cast()
    functions: dict[str, Callable[[], object]] = {
        "torch + produce": layer.rotate(layer.cast_apart),
        "torch alone": layer.rotate(lambda turn: layer.multiply(layer.lows[turn], layer.v)),
        "torch, casting": layer.rotate(layer.cast),
    }
    return _results(_race(functions, device))


def _add(
    functions: dict[str, Callable[[], object]],
    runs: Mapping[str, Callable[[], object]],
    checks: Mapping[str, Callable[[], None]],
) -> list[dict[str, object]]:
    """Adds what computes the right numbers to `functions`; results of the others."""
    failed: list[dict[str, object]] = []
    for name, run in runs.items():
        try:
            checks[name]()
            functions[name] = run
        except Exception as error:
            if torch.cuda.is_available() and not still_usable():
                raise
            failed.append({"what": name, "failed": first_line(error)})
    return failed


def _race(functions: Mapping[str, Callable[[], object]], device: torch.device) -> Race:
    """The first one is the baseline."""
    return time_interleaved(
        functions, baseline=next(iter(functions)), device=device, keep=list(functions), max_rounds=ROUNDS
    )


def _results(race: Race, rows: int = 0, *, last: int = 0) -> list[dict[str, object]]:
    """`rows` that all layers take together, of which `last` are not written in FP8; 0 for no bandwidth."""
    found: list[dict[str, object]] = [{"what": n, "failed": why} for n, why in race.failures.items()]
    for name, timing in race.timings.items():
        us, speedup = timing.microseconds, timing.speedup
        result = {
            "what": name,
            "us": us.value,
            "interval": [us.low, us.high],
            "speedup": speedup.value,
            "speedup_interval": [speedup.low, speedup.high],
        }
        if rows:
            result["GB/s"] = (7 * rows - last) * FEATURES / us.value / 1e3
        found.append(result)
    return found


def _rotate(inputs: list[torch.Tensor], call: Callable[[torch.Tensor], object]) -> Callable[[], object]:
    turn = itertools.cycle(inputs)
    return lambda: call(next(turn))


if __name__ == "__main__":
    main()
