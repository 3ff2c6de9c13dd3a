"""Full models through Probe, measure, plan and convert: training steps and inference against compiled bf16.

    python benchmarks/fused/models.py --out benchmarks/fused/models.json

The dense part of a model: features in, looked-up rows of the embedding tables [B, F, dim] given. Training
is forward, backward (the rows get a gradient) and fused Adam, in bf16 autocast over float32 weights;
inference is in bf16 weights. All under CUDA graphs, all arms compiled alike block by block, random data,
one race for each batch size. LoKA's arm runs what its planner decides,
with another recipe of a chain admitted beside the safe one where it is named ("loka e4m3_tensor"); "loka by
plan" runs a plan made before, such as that of `loka train --auto`; torchao's recipes run on every layer they
can.
"""

from __future__ import annotations

import argparse
import functools
import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import loka
from loka.core.chain_recipe import ADMITTED, SAFE
from loka.core.device import fingerprint
from loka.core.error import Estimate
from loka.core.files import write_record
from loka.core.fusion import forced_fusion
from loka.core.table import format_table
from loka.core.timing import time_interleaved
from loka.nn.chain import form_chains
from loka.nn.dataflow import find_chains
from loka.nn.linears import is_prediction
from loka.nn.turned import turn_linear
from loka.probe.settings import COARSE
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
BF16, PLAIN, LOKA, BY_PLAN = "bf16 compiled", "bf16 compiled, without mods", "loka", "loka by plan"
# The baseline with the one thing in LoKA's arm that is not FP8: layers over tokens in their other form.
TURNED = "bf16 compiled, tokens turned"
TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
# What stands for the errors of chains, and the fastest kernels that need no library besides torch.
CANDIDATES = ("torch_fast:tensorwise_e4m3", "torch:tensorwise_e4m3", "torch_fast:rowwise_e4m3")
MODS = [loka.mods.NoBias(), loka.mods.BlockNorm(256), loka.mods.HardSwish()]

Step = Callable[[], object]
Build = Callable[[], nn.Module]
StepOf = Callable[[nn.Module, str, int], Step]


@forced_fusion()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--model", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--arm", nargs="*", default=[PLAIN, TURNED, LOKA, *(f"torchao {n}" for n in TORCHAO)])
    parser.add_argument("--serve-arm", nargs="*", default=[TURNED, LOKA], help="none: training alone")
    parser.add_argument("--plan", type=Path, help=f"of the arm {BY_PLAN!r}, in training")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument(
        "--unplanned", action="store_true", help="every chain and stack in FP8, without measuring"
    )
    parser.add_argument("--compile-only", nargs=2, metavar=("MODEL", "ARM"), help="fill the compile caches")
    arguments = parser.parse_args()
    if BY_PLAN in arguments.serve_arm or (BY_PLAN in arguments.arm and arguments.plan is None):
        parser.error(f"{BY_PLAN!r} is an arm of training, and takes --plan")
    if arguments.compile_only:
        _warm(*arguments.compile_only, served=SERVED if arguments.serve_arm else ())
        return
    planned = {BY_PLAN} if arguments.unplanned else {arm for arm in arguments.arm if arm.startswith(LOKA)}
    _compile_ahead(arguments.model, [arm for arm in arguments.arm if arm not in planned], arguments.serve_arm)
    results: dict[str, dict[str, object]] = {}
    machine = fingerprint(torch.device("cuda")).to_json()
    for name in arguments.model:
        results[name] = {}
        for what, found in _model(name, arguments):
            results[name][what] = found
            content = {"machine": machine, "planned": not arguments.unplanned, "results": results}
            write_record(arguments.out, kind="loka-bench-models", version=1, content=content)


def _compile_ahead(models: list[str], arms: list[str], serve_arms: list[str]) -> None:
    """In parallel processes, into the caches that this process reads afterwards."""
    begin = time.monotonic()
    jobs = [(model, arm) for model in models for arm in [BF16, *arms]]
    command = [sys.executable, __file__, "--serve-arm", *serve_arms, "--compile-only"]
    children = [subprocess.Popen([*command, *job]) for job in jobs]
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


def _model(name: str, arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, object]]]:
    """What was raced, and its times: training first, then each batch size of serving."""
    begin, rows, out = time.monotonic(), MODELS[name][2], arguments.out.parent
    stats = None if arguments.unplanned else _probed(name, rows)
    builders: dict[str, tuple[Build, StepOf]] = {}
    for arm in [BF16, *arguments.arm]:
        path = arguments.plan if arm == BY_PLAN else out / f"{name.replace(' ', '_')}.plan.json"
        builders[arm] = (_arm(arm, name, stats, path), _training)
    yield "training", _race(builders, name, rows, arguments.rounds)
    for batch in SERVED if arguments.serve_arm else ():
        served = None if stats is None else stats.for_inference(batch=batch / rows)
        frozen: dict[str, tuple[Build, StepOf]] = {}
        for arm in [BF16, *arguments.serve_arm]:
            path = out / f"{name.replace(' ', '_')}.{batch}.plan.json"
            frozen[arm] = (_arm(arm, name, served, path, prepare=_serve), _serving)
        yield f"inference {batch}", _race(frozen, name, batch, arguments.rounds)
    print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)


def _serve(model: nn.Module) -> nn.Module:
    return model.bfloat16().eval()


def _arm(
    arm: str,
    name: str,
    stats: loka.Stats | None,
    path: Path,
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Build:
    if arm in (BF16, PLAIN):
        return lambda: compiled(prepare(_fresh(name, mods=arm == BF16)))
    if arm == TURNED:
        return lambda: compiled(_turned(prepare(_fresh(name)), name))
    if not arm.startswith(LOKA):
        return functools.partial(_torchao, name, arm.removeprefix("torchao "), prepare)
    recipe = arm.removeprefix(LOKA).strip()
    if stats is None and arm != BY_PLAN:
        return lambda: compiled(_formed(prepare(_fresh(name)), name, recipe or ADMITTED[0]))
    if arm == BY_PLAN:
        plan = loka.Plan.load(path)
    else:
        assert stats is not None
        plan = _plan(stats, path, tuple(dict.fromkeys((recipe, SAFE))) if recipe else ADMITTED)
    print(f"{path.name}: {plan.summary()}", flush=True)
    for decided in (*plan.chains.values(), *plan.crosses.values()):
        print(f"  {decided.recipe} {decided.speedup}x: {decided.reason}", flush=True)
    for layer, speedup in plan.turned.items():
        print(f"  {layer} turned {speedup}x", flush=True)
    return lambda: compiled(loka.convert(prepare(_fresh(name)), plan))


def _formed(model: nn.Module, name: str, recipe: str) -> nn.Module:
    """Every chain with a layer of 256 features or more, and every stack of cross layers, in FP8."""
    dense, tokens, _ = _batch(name, 32, torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16):
        found = find_chains(model, dense, tokens)
    chains = [
        (chain, recipe, {})
        for chain in found.chains
        if not chain.lone and max(link.out_features for link in chain.links) >= 256
    ]
    chains = [entry for entry in chains if not entry[0].name.startswith("front")]
    _turned(model, name)
    form_chains(model, chains, [(stack, SAFE, {}) for stack in found.crosses])
    print(f"{name}: {len(chains)} chains, {len(found.crosses)} stacks of cross layers", flush=True)
    return model


def _turned(model: nn.Module, name: str) -> nn.Module:
    """Layers over tokens read what lies transposed as it lies."""
    for path in sorted(_views(model, name)):
        layer = model.get_submodule(path)
        if type(layer) is nn.Linear:
            turn_linear(layer, path=path)
    return model


def _probed(name: str, rows: int) -> loka.Stats:
    model = _fresh(name)
    step = _training(model, name, rows)
    with loka.Probe(model, every=1) as probe:
        for _ in range(2):
            step()
    return probe.stats()


def _plan(stats: loka.Stats, path: Path, recipes: tuple[str, ...]) -> loka.Plan:
    begin = time.monotonic()
    settings = replace(COARSE, chain_recipes=recipes)
    report = loka.measure(stats, device="cuda", candidates=CANDIDATES, settings=settings)
    plan = loka.plan(report, loka.Budget(min_speedup=1.0, chain_recipes=recipes))
    plan.save(path)
    print(f"{path.name}: measured in {time.monotonic() - begin:.0f} s", flush=True)
    return plan


def _race(
    arms: Mapping[str, tuple[Build, StepOf]],
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


def _torchao(
    name: str, recipe: str, prepare: Callable[[nn.Module], nn.Module] = lambda model: model
) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = prepare(_fresh(name))
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
    dtype = next(model.parameters()).dtype
    dense, tokens, _ = _batch(name, 32, torch.bfloat16)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=dtype != torch.bfloat16):
        model(dense, tokens)
    for hook in hooks:
        hook.remove()
    return found


def _warm(name: str, arm: str, *, served: tuple[int, ...]) -> None:
    """LOKA's arm here is the unplanned one: no plan is known yet."""
    try:
        _training(_arm(arm, name, None, Path())(), name, MODELS[name][2])()
        if arm in (BF16, TURNED) or arm.startswith(LOKA):
            for batch in served:
                torch._dynamo.reset()
                _serving(_arm(arm, name, None, Path(), prepare=_serve)(), name, batch)()
    except Exception as error:
        print(f"{name}, {arm}: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)


if __name__ == "__main__":
    main()
