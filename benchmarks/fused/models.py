"""Full models through Probe, measure, plan and convert: training steps and inference against compiled bf16.

    python benchmarks/fused/models.py --out benchmarks/fused/models.json

The dense part of a model: features in, looked-up rows of the embedding tables [B, F, dim] given. Training
is forward, backward (the rows get a gradient) and fused Adam, in bf16 autocast over float32 weights;
inference is in bf16 weights. All under CUDA graphs, all arms compiled alike block by block, random data,
one race for each batch size. LoKA's arm runs what its planner decides; torchao's recipes run on every
layer they can.
"""

from __future__ import annotations

import argparse
import functools
import gc
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

import loka
from loka.core.device import fingerprint
from loka.core.error import Estimate
from loka.core.files import write_record
from loka.core.table import format_table
from loka.core.timing import time_interleaved
from loka.nn.linears import is_prediction
from loka.probe.settings import Settings
from loka.train.step_time import compiled
from loka.zoo import build, dense_part

FIELDS, DENSE = 26, 13
MODELS: dict[str, tuple[str, str, int]] = {
    "DLRM-DCNv2 dense part": ("dcnv2", "mlperf", 8192),
    "Wukong 0.5 GF": ("wukong", "0.5gf", 6144),
    "Wukong 2 GF": ("wukong", "2gf", 6144),
    "Wukong 6 GF": ("wukong", "6gf", 6144),
}
SERVED = (512, 2048, 8192)
BF16, PLAIN, LOKA = "bf16 compiled", "bf16 compiled, without mods", "loka"
TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
# What stands for the errors of chains, and the fastest kernels that need no library besides torch.
CANDIDATES = (
    "torch_fast:tensorwise_e4m3",
    "torch:tensorwise_e4m3",
    "torch_fast:rowwise_e4m3",
    "torch:rowwise_e4m3",
)
MODS = [loka.mods.NoBias(), loka.mods.BlockNorm(256), loka.mods.HardSwish()]

Step = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--model", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--arm", nargs="*", default=[LOKA, *(f"torchao {name}" for name in TORCHAO)])
    parser.add_argument("--serve-arm", nargs="*", default=[LOKA])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--compile-only", nargs=2, metavar=("MODEL", "ARM"), help="fill the compile caches")
    arguments = parser.parse_args()
    if arguments.compile_only:
        _warm(*arguments.compile_only)
        return
    _compile_ahead(arguments.model, arguments.arm)
    results: dict[str, object] = {}
    for name in arguments.model:
        results[name] = _model(
            name, arguments.arm, arguments.serve_arm, arguments.rounds, arguments.out.parent
        )
        content = {"machine": fingerprint(torch.device("cuda")).to_json(), "results": results}
        write_record(arguments.out, kind="loka-bench-models", version=1, content=content)


def _compile_ahead(models: list[str], arms: list[str]) -> None:
    """In parallel processes, into the caches that this process reads afterwards; LoKA's plan is not known."""
    begin = time.monotonic()
    jobs = [(model, arm) for model in models for arm in [BF16, PLAIN, *arms] if arm != LOKA]
    children = [subprocess.Popen([sys.executable, __file__, "--compile-only", *job]) for job in jobs]
    for child in children:
        child.wait()
    print(f"compiled ahead in {time.monotonic() - begin:.0f} s", flush=True)


def _fresh(name: str, *, mods: bool = True) -> nn.Module:
    kind, size, _ = MODELS[name]
    torch.manual_seed(0)
    model = dense_part(build(kind, dense_features=DENSE, vocab_sizes=(1,) * FIELDS, size=size))
    if mods:
        loka.mods.apply(model, MODS)
    for path, parameter in model.named_parameters():
        if "embeddings" in path:  # the table of one row a field that nobody looks up
            parameter.requires_grad_(False)
    return model.to("cuda")


def _batch(name: str, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dim = {"dcnv2": 128, "wukong": 160}[MODELS[name][0]]
    generator = torch.Generator("cuda").manual_seed(1)
    dense = torch.randn(rows, DENSE, device="cuda", generator=generator).to(dtype)
    tokens = torch.randn(rows, FIELDS, dim, device="cuda", generator=generator).to(dtype)
    return dense, tokens, (torch.rand(rows, device="cuda", generator=generator) < 0.2).float()


def _training(model: nn.Module, name: str, rows: int) -> Step:
    dense, tokens, label = _batch(name, rows, torch.bfloat16)
    tokens.requires_grad_()
    leaves = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(leaves, lr=1e-4, fused=True, capturable=True)

    def step() -> None:
        tokens.grad = None
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(dense, tokens)
        nn.functional.binary_cross_entropy_with_logits(logits.float(), label).backward()
        optimizer.step()

    return step


def _serving(model: nn.Module, name: str, rows: int) -> Step:
    dense, tokens, _ = _batch(name, rows, torch.bfloat16)

    def step() -> torch.Tensor:
        with torch.no_grad():
            return model(dense, tokens)

    return step


def _model(name: str, arms: list[str], serve_arms: list[str], rounds: int, out: Path) -> dict[str, object]:
    begin = time.monotonic()
    rows = MODELS[name][2]
    stats = _probed(name, rows)
    found: dict[str, object] = {}
    plan = _plan(stats, out / f"{name.replace(' ', '_')}.training.plan.json")
    print(f"\n{name}: planned in {time.monotonic() - begin:.0f} s. {plan.summary()}", flush=True)
    print("\n".join(str(plan).splitlines()[-4 - len(plan.chains) : -1]), flush=True)
    builders = {BF16: lambda: compiled(_fresh(name)), PLAIN: lambda: compiled(_fresh(name, mods=False))}
    for arm in arms:
        builders[arm] = (
            (lambda: compiled(loka.convert(_fresh(name), plan)))
            if arm == LOKA
            else functools.partial(_torchao, name, arm.removeprefix("torchao "))
        )
    found["training"] = _race({a: (b, _training) for a, b in builders.items()}, name, rows, rounds)
    for batch in SERVED:
        served = _plan(
            stats.for_inference(batch=batch / rows),
            out / f"{name.replace(' ', '_')}.{batch}.plan.json",
        )
        frozen: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, str, int], Step]]] = {
            BF16: (lambda: compiled(_fresh(name).bfloat16().eval()), _serving)
        }
        for arm in serve_arms:
            frozen[arm] = (
                (lambda served=served: compiled(loka.convert(_fresh(name).bfloat16().eval(), served)))
                if arm == LOKA
                else functools.partial(_torchao, name, arm.removeprefix("torchao "), serve=True),
                _serving,
            )
        found[f"inference {batch}"] = _race(frozen, name, batch, rounds)
        print(f"  {len(served.chains)} chains in FP8: {served.summary()}", flush=True)
    print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    return found


def _probed(name: str, rows: int) -> loka.Stats:
    model = _fresh(name)
    step = _training(model, name, rows)
    with loka.Probe(model, every=1) as probe:
        for _ in range(2):
            step()
    return probe.stats()


def _plan(stats: loka.Stats, path: Path) -> loka.Plan:
    settings = Settings(max_rounds=9, search_rounds=9, sharing_rounds=9, max_draws=4)
    report = loka.measure(stats, device="cuda", candidates=CANDIDATES, settings=settings)
    plan = loka.plan(report, loka.Budget(min_speedup=1.0))
    plan.save(path)
    return plan


def _race(
    arms: Mapping[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, str, int], Step]]],
    name: str,
    rows: int,
    rounds: int,
) -> dict[str, object]:
    steps: dict[str, Step] = {}
    found: dict[str, dict[str, object]] = {}
    for arm, (make, step_of) in arms.items():
        try:
            step = step_of(make(), name, rows)
            for _ in range(3):
                step()
            steps[arm] = step
            found[arm] = {}
        except torch.AcceleratorError:
            raise
        except Exception as error:
            found[arm] = {"failure": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
    device = torch.device("cuda")
    race = time_interleaved(steps, baseline=BF16, device=device, keep=list(steps), max_rounds=rounds)
    for arm, timing in race.timings.items():
        found[arm] = {"microseconds": timing.microseconds.value, "speedup": _listed(timing.speedup)}
    for arm, why in race.failures.items():
        found[arm] = {"failure": why}
    print(f"{name}, batch {rows}\n{_table(found)}", flush=True)
    del steps
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    return found


def _listed(estimate: Estimate) -> list[float]:
    return [estimate.value, estimate.low, estimate.high]


def _table(found: Mapping[str, Mapping[str, object]]) -> str:
    rows = []
    for arm, of in found.items():
        if "failure" in of:
            rows.append((arm, "-", str(of["failure"])))
            continue
        value, low, high = of["speedup"]  # type: ignore[misc]
        rows.append((arm, f"{of['microseconds']:.1f}", f"{value:.3f}x [{low:.3f}, {high:.3f}]"))
    return format_table(("arm", "us", "speed-up"), rows)


def _torchao(name: str, recipe: str, *, serve: bool = False) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = _fresh(name)
    model = model.bfloat16().eval() if serve else model
    # torchao 0.18's rowwise recipes refuse inputs that are transposed views, as of maps over tokens.
    refused = _views(model, name) if recipe.startswith("rowwise") else set()

    def takes(module: nn.Module, path: str) -> bool:
        if not isinstance(module, nn.Linear) or is_prediction(module.out_features) or path in refused:
            return False
        return module.in_features % 16 == 0 and module.out_features % 16 == 0

    config = Float8LinearConfig.from_recipe_name(recipe)
    return compiled(convert_to_float8_training(model, config=config, module_filter_fn=takes))


def _views(model: nn.Module, name: str) -> set[str]:
    """The linear layers whose input does not lie in memory in its own order."""
    found: set[str] = set()

    def look(path: str, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if not args[0].is_contiguous():
            found.add(path)

    hooks = [
        module.register_forward_pre_hook(functools.partial(look, path))
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    dense, tokens, _ = _batch(name, 32, next(model.parameters()).dtype)
    with torch.no_grad():
        model(dense, tokens)
    for hook in hooks:
        hook.remove()
    return found


def _warm(name: str, arm: str) -> None:
    try:
        if arm in (BF16, PLAIN):
            model = compiled(_fresh(name, mods=arm == BF16))
        else:
            model = _torchao(name, arm.removeprefix("torchao "))
        step = _training(model, name, MODELS[name][2])
        step()
        step()
        if arm == BF16:
            for batch in SERVED:
                torch._dynamo.reset()
                _serving(compiled(_fresh(name).bfloat16().eval()), name, batch)()
    except Exception as error:
        print(f"{name}, {arm}: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)


if __name__ == "__main__":
    main()
