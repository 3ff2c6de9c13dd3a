"""`loka bench step`: a model's step by each library's recipe and by plan, against compiled bf16.

The arms of the paper's table: torchao as a user applies it, one library's recipe at every site
that it can run, and the plan over all of them.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loka.cli.inputs import Data, effects_by
from loka.cli.models import Show, build_model, show_line, takes_mods
from loka.cli.terminal import say
from loka.core.budget import Budget
from loka.core.device import fingerprint, has_graphs
from loka.core.exceptions import LokaError, MissingLibrary, PlanMismatch, UnknownName, differing
from loka.core.records.plan import Plan
from loka.core.records.report import HP, Report
from loka.core.records.stats import Stats
from loka.core.storage.codec import encode
from loka.core.storage.files import read_record, write_record
from loka.core.table import format_table
from loka.data.batch import Batch, Source
from loka.kernels.gemm.registry import candidate_named
from loka.measurement import measure
from loka.nn import sites_of
from loka.nn.linears import is_prediction
from loka.nn.unwrap import device_of
from loka.planner import convert
from loka.planner import plan as plan_report
from loka.probe import Probe
from loka.report.progress import ProgressBars
from loka.train import TrainConfig, train
from loka.train.steps.step_time import ROUNDS, Arm, StepTime, time_steps

DISPATCH = "dispatch (plan)"
TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
_PROBED, _PROBED_KIND = "probed.json", "loka-bench-step-probed"
EVERYWHERE = ("deep_gemm:blockwise_e4m3", "fbgemm_fast:rowwise_e4m3", "torch_fast:rowwise_e4m3")


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """What to time. `arms` picks by name; all of them by default. `base_rate` None: that of the labels."""

    model: str
    batch_size: int
    out: Path
    command: str
    device: str
    seed: int = 0
    probe_steps: int = 16
    arms: tuple[str, ...] = ()
    candidates: tuple[str, ...] | None = None
    rounds: int = ROUNDS
    compile_blocks: bool = True
    budget: Budget = field(default_factory=Budget)
    cache: Path | None = None
    time_limit: float | None = None
    base_rate: float | None = None


def run_step_bench(config: StepConfig, data: Data) -> dict[str, StepTime]:
    if not has_graphs(torch.device(config.device)):
        raise LokaError(
            f"steps are timed under CUDA graphs, and {config.device} has none",
            way_out="run this on a machine with a GPU",
        )
    batch = next(iter(data.train.batches(config.batch_size)))
    # Each arm builds a model anew, and mods change all alike: said once.
    fresh = functools.partial(_fresh, config, data.train, show=functools.cache(show_line))
    torchao = _torchao_arms(fresh, batch)
    known = [DISPATCH, *map(_everywhere_name, EVERYWHERE), *torchao]
    unknown = [name for name in config.arms if name not in known]
    if unknown:
        raise UnknownName(f"no arm is called {', '.join(unknown)}", way_out=f"one of {', '.join(known)}")
    wanted = config.arms or known
    arms, decided = {}, None
    if by_plan(wanted):
        report = _report(config, data)
        decided = plan_report(report, config.budget)
        decided.save(config.out / "plan.json")
        say(decided.summary())
        arms = _planned_arms(fresh, report, decided)
    arms = {**arms, **torchao}
    found: dict[str, StepTime] = {}

    def keep(result: StepTime) -> None:
        found[result.name] = result
        say(_line(result))
        _write(config, found, decided, batch)

    time_steps(
        Arm(name="bf16", build=fresh),
        {name: arms[name] for name in wanted},
        batch,
        device=torch.device(config.device),
        compile_blocks=config.compile_blocks,
        rounds=config.rounds,
        on_result=keep,
    )
    return found


def by_plan(arms: Collection[str]) -> bool:
    """Whether one of these arms, of all where there are none, takes a plan: libraries by themselves do too."""
    return not arms or any(not name.startswith("torchao ") for name in arms)


def step_table(found: Mapping[str, StepTime]) -> str:
    rows = [
        (
            result.name,
            f"{result.microseconds.value / 1e3:.3f}" if result.microseconds else "-",
            str(result.speedup) if result.speedup else "-",
            str(result.low_precision),
            result.failure or "",
        )
        for result in found.values()
    ]
    return format_table(("arm", "ms a step", "speed-up over bf16", "layers in FP8", "failed"), rows)


def _line(result: StepTime) -> str:
    if result.failure:
        return f"{result.name}: {result.failure}"
    return f"{result.name}: {result.microseconds} us, {result.speedup}x"


def _fresh(config: StepConfig, source: Source, *, show: Show = lambda changes: None) -> nn.Module:
    return build_model(config.model, source, seed=config.seed, show=show).to(config.device).train()


def _report(config: StepConfig, data: Data) -> Report:
    folder, bars = config.out / "stats", ProgressBars(config.model)
    if not _probed_before(config, data):
        model = _fresh(config, data.train)
        rows = min(config.batch_size * config.probe_steps, data.train.rows)
        run = TrainConfig(batch_size=config.batch_size, max_rows=rows, seed=config.seed, device=config.device)
        effects = effects_by(config.base_rate, data.train, config.batch_size)
        with Probe(model, every=max(config.probe_steps // 4, 1), save_to=folder, **effects) as probe:
            train(model, data.train, config=run, track=bars)
        say(f"probe: {probe.stats().sampled_steps} of {probe.stats().steps} steps sampled")
        write_record(config.out / _PROBED, kind=_PROBED_KIND, version=1, content=_identity(config, data))
    return measure(
        Stats.load(folder),
        device=config.device,
        candidates=config.candidates,
        out=config.out / "report.json",
        cache=config.cache,
        time_limit=config.time_limit,
        track=bars,
    )


def _identity(config: StepConfig, data: Data) -> dict[str, Any]:
    """What its statistics are of."""
    return {
        "model": config.model,
        "mods": takes_mods(config.model, None),
        "batch size": config.batch_size,
        "seed": config.seed,
        "steps": config.probe_steps,
        "base rate": encode(config.base_rate),
        "data": data.train.identity,
    }


def _probed_before(config: StepConfig, data: Data) -> bool:
    """Whether the folder has these statistics. Raises PlanMismatch where it has others."""
    path, now = config.out / _PROBED, _identity(config, data)
    if not (path.exists() and (config.out / "stats" / "stats.json").exists()):
        return False
    there = read_record(path, kind=_PROBED_KIND, version=1, way_out="choose another --out", parse=dict)
    there.setdefault("mods", True)  # until 2026-11-28 every model had them
    if differs := differing(there, now):
        raise PlanMismatch(
            f"the statistics in {config.out} are of another run",
            why=differs,
            way_out="choose another --out, or delete that folder",
        )
    return True


def _planned_arms(fresh: Callable[[], nn.Module], report: Report, decided: Plan) -> dict[str, Arm]:
    arms = {DISPATCH: Arm(name=DISPATCH, build=_by_plan(fresh, decided), count=_count)}
    for candidate in EVERYWHERE:
        build, name = _by_plan(fresh, _everywhere(report, candidate)), _everywhere_name(candidate)
        arms[name] = Arm(name=name, build=build, count=_count)
    return arms


def _everywhere_name(candidate: str) -> str:
    return f"{candidate} everywhere"


def _torchao_arms(fresh: Callable[[], nn.Module], batch: Batch) -> dict[str, Arm]:
    arms = {}
    for recipe in TORCHAO:
        for filtered in (False, True) if recipe != "rowwise_with_gw_hp" else (False,):  # it has no filter
            name = f"torchao {recipe}{', its filter' if filtered else ''}"
            build = _torchao(fresh, batch, recipe, filtered=filtered)
            arms[name] = Arm(name=name, build=build, count=_count_torchao)
    return arms


def _count(model: nn.Module) -> int:
    return len(sites_of(model))


def _by_plan(fresh: Callable[[], nn.Module], decided: Plan) -> Callable[[], nn.Module]:
    return lambda: convert(fresh(), decided)


def _everywhere(report: Report, name: str) -> Plan:
    candidate_named(name)
    force = {}
    for site in report.sites.values():
        measured = site.measurements.get(name)
        runs = measured is not None and not measured.unsupported
        prediction = is_prediction(report.model.layers[site.path].out_features)
        force[site.name] = name if runs and not prediction else HP
    return plan_report(report, force=force)


def _torchao(fresh: Callable[[], nn.Module], batch: Batch, recipe: str, *, filtered: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        try:
            from torchao.float8 import Float8LinearConfig, _auto_filter_for_recipe, convert_to_float8_training
        except ImportError as error:
            raise MissingLibrary(
                f"torchao {recipe}", why=[str(error)], way_out="pip install 'loka[torchao]'"
            ) from error
        model = fresh()
        allowed = _auto_filter_for_recipe(recipe, filter_fqns=[]) if filtered else None
        # "aten.clone.default with axiswise scaling is not supported yet" (torchao 0.18): its rowwise
        # recipes refuse inputs that are transposed views, such as those of linears over tokens.
        refused: set[str] = set()
        if recipe.startswith("rowwise"):
            few = batch.to(device_of(model))
            refused = with_views(model, lambda: model(few.dense[:32], few.sparse[:32]))

        def takes(module: nn.Module, path: str) -> bool:
            return torchao_takes(module) and path not in refused and (allowed is None or allowed(module, path))

        config = Float8LinearConfig.from_recipe_name(recipe)
        return convert_to_float8_training(model, config=config, module_filter_fn=takes)

    return build


def torchao_takes(module: nn.Module) -> bool:
    if not isinstance(module, nn.Linear) or is_prediction(module.out_features):
        return False
    return module.in_features % 16 == 0 and module.out_features % 16 == 0


def with_views(model: nn.Module, run: Callable[[], object]) -> set[str]:
    """The linear layers of `model` whose input, when `run` calls it, does not lie in memory in its own order."""
    found: set[str] = set()

    def look(path: str, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if not args[0].is_contiguous():
            found.add(path)

    linears = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    hooks = [module.register_forward_pre_hook(functools.partial(look, path)) for path, module in linears]
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return found


def _count_torchao(model: nn.Module) -> int:
    return sum(type(module).__name__ == "Float8Linear" for module in model.modules())


def _write(config: StepConfig, found: Mapping[str, StepTime], decided: Plan | None, batch: Batch) -> None:
    content = {
        "machine": encode(fingerprint(config.device)),
        "command": config.command,
        "model": config.model,
        "batch": len(batch),
        "compiled": config.compile_blocks,
        "budget": encode(config.budget),
        "plan": decided.summary() if decided else None,
        "arms": {
            name: {
                "microseconds": encode(result.microseconds),
                "speedup": encode(result.speedup),
                "low_precision": result.low_precision,
                "failure": result.failure,
            }
            for name, result in found.items()
        },
    }
    write_record(config.out / "step.json", kind="loka-bench-step", version=1, content=content)
