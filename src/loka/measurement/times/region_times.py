"""The time of a layer as a part of a compiled region, against the same code in high precision.

    a cell:   relu -> the layer -> relu,   three times side by side, forward, and backward where probed
    a chain:  relu -> the layer -> relu -> one the other way round -> relu -> the layer -> relu -> .. -> relu

Inside a region a layer's FP8 copies are written by the kernels between the layers, so that its GEMMs by
themselves do not tell what it takes. A cell has what a layer brings to a region: its GEMMs, the cast of its
input in the kernel before it, that of its gradient in the kernel behind it, and its weight's, unless that is
served and was quantized before. A region's two ends cost more than what lies between layers: what they read was
written long ago, and what they write is bf16. Each of a cell's layers has both, and a chain of four has both once.
So a layer that feeds others, or is fed by them, is timed both ways, and a plan counts the ends that it has
(planner/placing.py). An H200 took 72.3 us in FP8 and in bf16 for 4096 x 1024 in cells, and 55.2 and
62.1 for each of a chain's layers.
What a graph does once, casting all weights and noting what ran, counts a third to each layer of a cell, a fourth in
a chain, which is a guess: most models have more, and seldom one alone.

Both arms are compiled, and run under CUDA graphs, on random normal data of the probed shapes and dtypes.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._functorch import config
from torch.nn.utils import parametrize

from loka.compiler import install
from loka.compiler.joint_sites import ARMS, misfit
from loka.compiler.listing import regions
from loka.core.compiling import compile_in_place
from loka.core.exceptions import first_line
from loka.core.problem import DTYPES, linear_problem, target_of
from loka.core.recipe import Gemm
from loka.core.records.report import CHAINED, HP, REGION, REGION_INT8, Measurement
from loka.core.records.stats import LinearStats
from loka.core.signature import LinearShape
from loka.core.timing import is_broken, time_interleaved
from loka.graph.attach import attach
from loka.kernels.gemm.registry import candidate_named
from loka.kernels.quantize.fp8_weights import fp8_weights
from loka.kernels.quantize.int8_weights import int8_weights
from loka.measurement.settings import Settings
from loka.nn.fp8_weight import dequantized
from loka.nn.linears import signature

LAYERS = 3
"""In a cell."""

FEW_TOKENS = 256
"""On a side of a layer over tokens, which in high precision reads its input as it lies (compiler/layout/tokens.py).
An H200 took 73 us for 256 to 256 tokens of 128 columns; copying inputs, which FP8 has to, takes 66."""


class _Cell(nn.Module):
    def __init__(self, layers: Iterable[nn.Linear]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        relu = nn.functional.relu
        return [relu(layer(relu(z))) for layer, z in zip(self.layers, inputs, strict=True)]


class _Chain(_Cell):
    def forward(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        relu = nn.functional.relu
        z = relu(inputs[0])
        for layer in self.layers:
            z = relu(layer(z))
        return [z]


class _Kept(nn.Module):
    """Stands before a weight [N, K] that was quantized once, as loka.serve keeps it."""

    def __init__(self, weight: torch.Tensor, *, integers: bool) -> None:
        super().__init__()
        if integers:
            self.row, self.scale = int8_weights([weight.detach()])
        else:
            self.row, _, self.scale = fp8_weights([weight.detach()], [False])

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return dequantized(self.row, self.scale, weight.dtype)  # which no joined site reads


def region_key(
    layer: LinearStats, shape: LinearShape, arms: Collection[str] = tuple(ARMS), *, chained: bool = False
) -> dict[str, Any]:
    """Equal for layers that take equally long."""
    return {
        "sides": [layer.rows, shape.in_features, shape.out_features],
        "bias": shape.bias,
        "dtypes": [layer.dtype, layer.weight_dtype],
        "gradients": [layer.needs_input_grad, layer.needs_weight_grad],
        "region": [*(name for arm in arms for name in ARMS[arm]), LAYERS],
        **({"chained": CHAINED} if chained else {}),
        **({"over_tokens": True} if _adds_up_few_tokens(layer, shape) else {}),
    }


def _adds_up_few_tokens(layer: LinearStats, shape: LinearShape) -> bool:
    return layer.over_tokens and max(shape.in_features, shape.out_features) <= FEW_TOKENS


def unfit(layer: LinearStats, shape: LinearShape) -> str | None:
    """Why a layer is timed in no region, or None."""
    if shape.stacked:
        return "it is one of a batched GEMM, of whose time a layer by itself says nothing"
    if _adds_up_few_tokens(layer, shape):
        return "it adds up few tokens: taking its input across for FP8 takes longer than its GEMM"
    return misfit(shape.in_features, shape.out_features)


def time_region(
    layer: LinearStats,
    shape: LinearShape,
    *,
    device: torch.device,
    settings: Settings | None,
    deadline: float | None = None,
    arms: Collection[str] = tuple(ARMS),
    chained: bool = False,
) -> dict[str, Measurement] | None:
    """By "hp", "region" and "region_int8", for one layer of a cell, or of a chain; a reason where it cannot be in
    one; None where the deadline cut it short. Without `settings` nothing is timed: compile caches are filled.

    Raises torch.OutOfMemoryError, which says nothing about the layer.
    """
    reason = unfit(layer, shape)
    if reason is not None:
        return {REGION: Measurement(unsupported=reason)}
    install()
    cells: dict[str, _Cell] = {}
    refused: dict[str, Measurement] = {}
    for name in (HP, *arms):
        if why := _no_kernel(name, layer, shape, device):
            refused[name] = Measurement(unsupported=why)
        else:
            cells[name] = _compiled_cell(name, layer, shape, device, chained=chained)
    found = _race(cells, shape, layer, device=device, settings=settings, deadline=deadline)
    return None if found is None else {**found, **refused}


def _compiled_cell(arm: str, layer: LinearStats, shape: LinearShape, device: torch.device, *, chained: bool) -> _Cell:
    """A cell, or a chain, of layers like this one, joined in regions by `arm` or in high precision."""
    with torch.random.fork_rng(devices=[]):  # measuring leaves the program's random numbers alone
        there = shape.in_features, shape.out_features
        sides = [(there, there[::-1])[at % 2] for at in range(CHAINED)] if chained else [there] * LAYERS
        cell = (_Chain if chained else _Cell)(nn.Linear(*each, bias=shape.bias) for each in sides)
    cell.to(device, DTYPES[layer.weight_dtype])
    if not layer.needs_weight_grad:
        cell.requires_grad_(False)
    if arm != HP:
        layers = signature(cell).layers
        attach(cell, layers, dict.fromkeys(layers, ARMS[arm]), join=True)
        if layer.kept_weight:
            for part in cell.layers:
                kept = _Kept(part.get_parameter("weight"), integers=arm == REGION_INT8)
                parametrize.register_parametrization(part, "weight", kept, unsafe=True)
    return compile_in_place(cell)


def _no_kernel(arm: str, layer: LinearStats, shape: LinearShape, device: torch.device) -> str | None:
    """Why the kernel of `output` cannot run here; FP8's is part of torch, and fails by itself."""
    if arm != REGION_INT8:
        return None
    problem = linear_problem(
        Gemm.OUTPUT,
        rows=layer.rows,
        in_features=shape.in_features,
        out_features=shape.out_features,
        dtype=layer.dtype,
        target=target_of(device),
    )
    return candidate_named(ARMS[arm][0]).unsupported(problem)


def _race(
    cells: Mapping[str, _Cell],
    shape: LinearShape,
    layer: LinearStats,
    *,
    device: torch.device,
    settings: Settings | None,
    deadline: float | None,
) -> dict[str, Measurement] | None:
    """Compiles the cells of all arms and times them; as `time_region` returns and raises.

    An arm that fails to compile, or whose layers the compiler did not join, says why; the others are timed.
    """
    steps, found = _compiled_steps(cells, shape, layer, device)
    if HP not in steps or REGION not in steps or settings is None:
        return found
    for name in [name for name in ARMS if name in steps]:
        for reason in regions(cells[name]).apart.values():
            found[name] = Measurement(unsupported=f"it was not joined: {reason}")
            steps.pop(name, None)
    if REGION not in steps:
        return found
    try:
        times = time_interleaved(
            steps,
            baseline=HP,
            device=device,
            keep=list(steps),
            max_rounds=settings.quantize_once_rounds,
            deadline=deadline,
        )
    except (torch.AcceleratorError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # hp's step cannot be captured
        return {REGION: _failure(error, device)}
    if any("OutOfMemory" in why for why in times.failures.values()):
        raise torch.OutOfMemoryError("a step did not fit while it was captured")
    if times.ended == "deadline":
        return None
    layers = len(cells[HP].layers)  # a cell takes so many times what a layer of it takes
    for name, timing in times.timings.items():
        found[name] = Measurement(
            microseconds=timing.microseconds.mapped(lambda cell: cell / layers),
            speedup=timing.speedup,
            rounds=timing.rounds,
        )
    for name, why in times.failures.items():
        found[name] = Measurement(unsupported=f"cannot be timed: {why}")
    return found


def _compiled_steps(
    cells: Mapping[str, _Cell], shape: LinearShape, layer: LinearStats, device: torch.device
) -> tuple[dict[str, Callable[[], object]], dict[str, Measurement]]:
    """By arm, a step that has run twice, so that all of it is compiled; and why others could not run."""
    steps: dict[str, Callable[[], object]] = {}
    failures: dict[str, Measurement] = {}
    for name, cell in cells.items():
        try:
            step = _step(cell, shape, layer, device)
            with config.patch(autograd_cache_allow_custom_autograd_functions=True):  # or sites are traced anew
                step()
                step()
            steps[name] = step
        except (torch.AcceleratorError, torch.OutOfMemoryError):
            raise  # CUDA is unusable after the first
        except Exception as error:  # a compiler raises what it likes
            failures[name] = _failure(error, device)
    return steps, failures


def _failure(error: Exception, device: torch.device) -> Measurement:
    """What to say of an arm that raised. Raises `error` again where CUDA is unusable after it."""
    if is_broken(device):
        raise error
    return Measurement(unsupported=f"cannot be timed: {first_line(error)}")


def _step(model: _Cell, shape: LinearShape, layer: LinearStats, device: torch.device) -> Callable[[], object]:
    """Forward, and backward where the layer has gradients, on random inputs [rows, K] that stay the same."""
    generator = torch.Generator(device).manual_seed(0)
    compute = DTYPES[layer.dtype]
    sides = layer.rows, shape.in_features
    chained = isinstance(model, _Chain)
    many, last = (1, shape.in_features) if chained else (LAYERS, shape.out_features)  # four layers end as they began
    inputs = [torch.randn(sides, generator=generator, device=device).to(compute) for _ in range(many)]
    for z in inputs:
        z.requires_grad_(layer.needs_input_grad)
    grad = torch.randn(layer.rows, last, generator=generator, device=device)
    grad = (grad / max(layer.rows, 1)).to(compute)
    leaves = [*inputs, *model.parameters()]
    training = layer.needs_input_grad or layer.needs_weight_grad
    autocast = layer.dtype != layer.weight_dtype

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        with (
            torch.set_grad_enabled(training),
            torch.autocast(device.type, compute if autocast else torch.bfloat16, enabled=autocast),
        ):
            outputs = model(inputs)
        if training:
            torch.autograd.backward(outputs, [grad] * many)

    return step
