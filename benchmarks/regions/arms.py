"""The ways to run a model: bf16 compiled whole and by block, LoKA by plan, torchao's recipes."""

import gc
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from cells import Cell
from torch import nn

import loka
from loka.cli.commands.step import torchao_takes, with_views
from loka.compiler.joint_sites import ARMS as REGIONS
from loka.core.compiling import mend_compilers
from loka.core.recipe import Gemm
from loka.core.records.report import REGION, REGION_INT8
from loka.measurement.settings import COARSE, Settings
from loka.train.steps.blocks import compiled

WHOLE, BLOCK, LOKA, INT8 = "bf16_whole", "bf16_block", "loka", "loka_int8"
OURS = (LOKA, INT8)
BF16 = (WHOLE, BLOCK)
TORCHAO = ("torchao_tensorwise", "torchao_rowwise")
ARMS = (WHOLE, BLOCK, *OURS, *TORCHAO)
_IN_INT8 = {
    REGIONS[REGION][0]: REGIONS[REGION_INT8][0],
    "emulated:rowwise_e4m3_pow2": "emulated:int8_row",  # on a CPU
}

# Speed alone decides among what keeps the default's error limits (25 dB of SQNR at every site, logit layers
# in hp): nothing about NE, and a gain of any size is worth having.
BUDGET = loka.Budget(ne=None, min_speedup=1.0)
CANDIDATES = ("torch_fast:tensorwise_e4m3", "torch_fast:rowwise_e4m3", "torch:rowwise_e4m3")
ON_CPU = ("torch:tensorwise_e4m3", "emulated:rowwise_e4m3")

Call = Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class How:
    """How all arms of a run are built.

    Attributes:
        mode: "autocast", bf16 over float32 weights; "bf16", bf16 weights, as served models have in any mode;
            "float32", for what the others are compared with.
        candidates: what LoKA measures; None for all there are.
        force: pattern of sites -> candidate, over what the plan would choose.
    """

    device: torch.device
    tiny: bool = False
    mode: str = "autocast"
    candidates: tuple[str, ...] | None = CANDIDATES
    settings: Settings = COARSE
    probe_steps: int = 2
    force: Mapping[str, str] = field(default_factory=dict)
    budget: loka.Budget = BUDGET
    kept_weights: bool = False  # of served models: as loka.serve freezes them
    plans: Path | None = None
    timings: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A model ready to run: `step` is what is timed, and `leaves` get gradients in it."""

    model: nn.Module
    step: Callable[[], torch.Tensor]
    leaves: list[torch.Tensor]
    inputs: list[torch.Tensor]


def missing(name: str) -> str | None:
    """Why there is no such arm on this machine; None where there is."""
    absent = name in TORCHAO and importlib.util.find_spec("torchao") is None
    return "torchao is not installed" if absent else None


def build(name: str, cell: Cell, how: How, plan: loka.Plan | None) -> Arm:
    """Raises whatever the arm's library raises."""
    model = _prepared(cell, how)
    mend_compilers()  # in bf16's arms too, whose outputs are wrong otherwise
    call: Call
    if name == BLOCK:
        call = compiled(model)
    elif name == WHOLE:
        call = torch.compile(model)
    elif name in OURS:
        assert plan is not None
        loka.convert(model, in_int8(plan) if name == INT8 else plan)
        call = torch.compile(model)
    else:
        model = _torchao(model, cell, how, name.removeprefix("torchao_"))
        call = torch.compile(model)
    return arm_of(model, call, cell, how)


def in_int8(plan: loka.Plan) -> loka.Plan:
    """The same, with the `output` GEMMs of its regions in INT8, whatever they take."""
    return replace(
        plan,
        decisions={
            name: replace(decision, candidate=_IN_INT8.get(decision.candidate, decision.candidate))
            if decision.problem.gemm is Gemm.OUTPUT
            else decision
            for name, decision in plan.decisions.items()
        },
    )


def in_float32(cell: Cell, how: How) -> Arm:
    """The model as it is written, eager, in float32 throughout: what all arms approximate."""
    exact = replace(how, mode="float32")
    model = cell.model(how.device, tiny=how.tiny)
    return arm_of(model, model, cell, exact)


def _prepared(cell: Cell, how: How) -> nn.Module:
    model = cell.model(how.device, tiny=how.tiny)
    if not cell.trained:
        return model.bfloat16().eval()
    return model.bfloat16() if how.mode == "bf16" else model


def arm_of(model: nn.Module, call: Call, cell: Cell, how: How) -> Arm:
    """`call` is the model as it runs, `model` whose parameters they are."""
    inputs, labels = cell.batch(how.device, tiny=how.tiny)
    if how.mode == "float32":
        inputs = [x.detach().float().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]
    if not cell.trained:
        return Arm(model=model, step=_serving(call, inputs), leaves=[], inputs=inputs)
    leaves = [p for p in [*inputs, *model.parameters()] if p.requires_grad]
    step = _training(call, inputs, leaves, cell, labels, how)
    return Arm(model=model, step=step, leaves=leaves, inputs=inputs)


def _serving(call: Call, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        with torch.no_grad():
            return call(*inputs)

    return step


def _training(
    call: Call,
    inputs: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    cell: Cell,
    labels: torch.Tensor,
    how: How,
) -> Callable[[], torch.Tensor]:
    given: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def gradient(out: torch.Tensor) -> torch.Tensor:
        key = (out.shape, out.dtype)
        if key not in given:  # in the first call, which is never captured
            generator = torch.Generator(out.device).manual_seed(2)
            drawn = torch.randn(out.shape, device=out.device, generator=generator)
            given[key] = (drawn / len(out)).to(out.dtype)
        return given[key]

    def step() -> torch.Tensor:
        for leaf in leaves:
            leaf.grad = None
        with _autocast(how):
            out = call(*inputs)
        if cell.loss == "bce":
            nn.functional.binary_cross_entropy_with_logits(out.float(), labels).backward()
        else:
            out.backward(gradient(out))
        return out.detach()

    return step


def _autocast(how: How) -> AbstractContextManager[Any]:
    return torch.autocast(how.device.type, torch.bfloat16) if how.mode == "autocast" else nullcontext()


def plan_of(cell: Cell, how: How) -> tuple[loka.Plan, dict[str, float]]:
    """What a user does: probe some steps, measure, plan; and the seconds of each.

    A plan of the cell in `how.plans` is read instead.
    """
    path = None if how.plans is None else how.plans / f"{cell.name}.plan.json"
    if path is not None and path.exists():
        return loka.Plan.load(path), {}
    stats, probing = probed(cell, how)
    began = time.monotonic()
    report = loka.measure(stats, device=how.device, candidates=how.candidates, settings=how.settings, cache=how.timings)
    plan = loka.plan(report, how.budget, force=how.force)
    if path is not None:
        plan.save(path)
    return plan, {"probe": probing, "measure": time.monotonic() - began}


def probed(cell: Cell, how: How) -> tuple[loka.Stats, float]:
    """Of training steps, also for a served model: its rows, and its forward, are those of the plan."""
    began = time.monotonic()
    model = cell.model(how.device, tiny=how.tiny)
    if how.mode == "bf16":
        model = model.bfloat16()
    inputs, labels = cell.batch(how.device, tiny=how.tiny)
    leaves = [p for p in [*inputs, *model.parameters()] if p.requires_grad]
    with loka.Probe(model, every=1) as probe:
        step = _training(model, inputs, leaves, cell, labels, how)
        for _ in range(how.probe_steps):
            step()
    stats = probe.stats()
    for leaf in leaves:
        leaf.grad = None
    del model, leaves, inputs, step, probe
    gc.collect()
    return stats if cell.trained else stats.for_inference(kept_weights=how.kept_weights), time.monotonic() - began


def _torchao(model: nn.Module, cell: Cell, how: How, recipe: str) -> nn.Module:
    """Every linear layer that it can take; served, its dynamic quantization."""
    # The rowwise recipes of training refuse inputs that are transposed views, as of maps over tokens.
    refused: set[str] = set()
    if recipe == "rowwise" and cell.trained:
        inputs, _ = cell.batch(how.device, tiny=how.tiny)
        with _autocast(how):
            refused = with_views(model, lambda: model(*inputs))

    def takes(module: nn.Module, path: str) -> bool:
        return torchao_takes(module) and path not in refused

    if cell.trained:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(recipe)
        return convert_to_float8_training(model, config=config, module_filter_fn=takes)
    from torchao import quantization

    granularity = quantization.PerRow() if recipe == "rowwise" else quantization.PerTensor()
    served = quantization.Float8DynamicActivationFloat8WeightConfig(granularity=granularity)
    quantization.quantize_(model, served, filter_fn=takes)
    return model
