"""Time of a training step's computation, one way of running the model against another.

What is timed is forward, loss and backward of a real batch, under bf16 autocast over float32
weights, in a CUDA graph, each arm raced against the baseline in the same run. Embedding tables
are looked up but get no gradient, and there is no optimizer and no communication: what remains
is what FP8 can change ("compute-only" in the paper).
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from loka.core.device import has_graphs
from loka.core.error import Estimate
from loka.core.exceptions import LokaError, first_line
from loka.core.timing import time_interleaved
from loka.data.batch import Batch
from loka.train.steps.blocks import compiled, compiled_parts

Build = Callable[[], nn.Module]


ROUNDS = 21  # of a race between two ways of taking a step, where nobody says


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One arm: microseconds a step and speed-up over the baseline, or why it failed."""

    name: str
    microseconds: Estimate | None = None
    speedup: Estimate | None = None
    low_precision: int = 0  # linear layers with at least one FP8 GEMM
    failure: str | None = None


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A way to run the model: builds it on the device, ready to compile; counts its FP8 layers."""

    name: str
    build: Build
    count: Callable[[nn.Module], int] = field(default=lambda model: 0)


def time_steps(
    baseline: Arm,
    arms: Mapping[str, Arm],
    batch: Batch,
    *,
    device: torch.device,
    compile_blocks: bool = True,
    rounds: int = ROUNDS,
    on_result: Callable[[StepTime], None] | None = None,
) -> dict[str, StepTime]:
    """Races each arm against `baseline`, one arm in memory at a time; the first result is the baseline's.

    With `compile_blocks` the parts of every model are compiled alike (`compiled`). An arm that
    cannot be built, compiled or captured is a result with a reason, and the others go on.

    Raises ValueError off CUDA.
    """
    if not has_graphs(device):
        raise ValueError(f"steps are timed under CUDA graphs; {device} has none")
    batch = batch.to(device)
    base = _step(_prepare(baseline, batch, compile_blocks), batch)
    found: dict[str, StepTime] = {}
    for name, arm in {baseline.name: baseline, **arms}.items():
        try:
            result = _against(base, baseline.name, arm, batch, device, compile_blocks, rounds)
        except torch.AcceleratorError:
            raise  # CUDA is unusable after it
        except Exception as error:
            result = StepTime(name=name, failure=_reason(error))
        found[name] = result
        gc.collect()  # a compiled part refers to itself, and would keep its arm's memory
        torch.cuda.empty_cache()
        if on_result is not None:
            on_result(result)
    return found


def _reason(error: Exception) -> str:
    way_out = error.way_out if isinstance(error, LokaError) else ""
    return f"{first_line(error)} ({way_out})" if way_out else first_line(error)


def _against(
    base: Callable[[], object],
    base_name: str,
    arm: Arm,
    batch: Batch,
    device: torch.device,
    compile_blocks: bool,
    rounds: int,
) -> StepTime:
    if arm.name == base_name:  # the baseline against itself: what the measurement resolves
        name, model, step = "again", None, base
    else:
        model = _prepare(arm, batch, compile_blocks)
        name, step = arm.name, _step(model, batch)
    functions = {base_name: base, name: step}
    found = time_interleaved(functions, baseline=base_name, device=device, keep=list(functions), max_rounds=rounds)
    if name in found.failures:
        return StepTime(name=arm.name, failure=found.failures[name])
    timing = found.timings[name]
    low = 0 if model is None else arm.count(model)
    return StepTime(name=arm.name, microseconds=timing.microseconds, speedup=timing.speedup, low_precision=low)


def _prepare(arm: Arm, batch: Batch, compile_blocks: bool) -> nn.Module:
    model = arm.build()
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    for table in tables:
        table.weight.requires_grad_(False)
    whole = compile_blocks and compiled_parts(model) == [model]
    for table in tables:
        table.register_forward_hook(_anchored if whole else _wants_gradient)
    if whole:
        with torch.no_grad(), torch.autocast(batch.label.device.type, torch.bfloat16):
            model(batch.dense, batch.sparse)  # which makes what wants gradients in the place of rows
    return compiled(model) if compile_blocks else model


def _wants_gradient(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    """The gradient goes as far as the looked-up rows, as in training; the table's update is not timed."""
    return output.detach().requires_grad_()


def _anchored(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    """The same where a table is in what is compiled: a graph ends where a tensor of its own begins to want a
    gradient, so that zeros want it in its place."""
    name = f"rows_{'_'.join(map(str, output.shape))}"
    if name not in module._parameters:
        module.register_parameter(name, nn.Parameter(torch.zeros_like(output)))
    return output + module.get_parameter(name)


def _step(model: nn.Module, batch: Batch) -> Callable[[], object]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    labels = batch.label.float()

    def step() -> torch.Tensor:
        for parameter in parameters:
            parameter.grad = None
        with torch.autocast(labels.device.type, torch.bfloat16):
            logits = model(batch.dense, batch.sparse)
        loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), labels)
        loss.backward()
        return loss

    return step
