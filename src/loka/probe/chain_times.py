"""Timing a chain as a whole, under a CUDA graph, as it will run: forward, and backward where probed.

The chain is built anew from its description, with random normal data of the probed shapes and dtypes:
"hp" under torch.compile, and recipes of the fused path. One race for all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from loka.core.chain import Activation, Chain, Epilogue, Norm
from loka.core.compiling import compile_in_place
from loka.core.cross_record import Whole
from loka.core.problem import DTYPES
from loka.core.recipe import Gemm
from loka.core.report import HP, Measurement, site_name
from loka.core.stats import LinearStats
from loka.core.timing import first_line, time_interleaved
from loka.nn.block_norm import BlockNorm
from loka.nn.chain import form_chains, objection, pointless
from loka.nn.chain_parts import ACTIVATIONS
from loka.probe.settings import Settings

_MODULES = {activation: module for module, activation in ACTIVATIONS.items()}


def chain_key(
    chain: Chain, layers: Mapping[str, LinearStats], kernels: Mapping[str, Mapping[str, str]]
) -> str:
    """Equal for chains that take equally long."""
    shape = [(link.in_features, link.out_features, link.bias, link.epilogue) for link in chain.links]
    return repr((chain.prologue, shape, how_it_runs(chain, layers, kernels)))


def how_it_runs(
    whole: Whole, layers: Mapping[str, LinearStats], kernels: Mapping[str, Mapping[str, str]]
) -> tuple[object, ...]:
    """What else than its shape decides how long it takes: rows, dtypes, gradients, GEMM kernels."""
    places = {path: str(place) for place, path in enumerate(whole.linears)}
    first = layers[whole.linears[0]]
    inside = [
        sorted((places[site.rpartition("/")[0]], site.rpartition("/")[2], name) for site, name in own.items())
        for own in kernels.values()
    ]
    gradients = first.needs_input_grad, first.needs_weight_grad
    return first.rows, first.dtype, first.weight_dtype, gradients, inside


def time_chain(
    chain: Chain,
    layers: Mapping[str, LinearStats],
    kernels: Mapping[str, Mapping[str, str]],
    *,
    device: torch.device,
    settings: Settings,
    deadline: float | None = None,
) -> dict[str, Measurement]:
    """Times of "hp" and of the fused path under the recipes of `settings`, by candidate; a reason where one
    cannot run.

    Args:
        layers: statistics by module path, of all linear layers of the chain.
        kernels: by candidate ("fused:e4m3_row"), the GEMM kernels to run inside, by site.
    """
    reason = objection(chain)
    if reason is not None:
        return {recipe.candidate: Measurement(unsupported=reason) for recipe in settings.timed_recipes()}
    first = layers[chain.links[0].path]
    found: dict[str, Measurement] = {}
    model, renamed, sites = build_chain(chain, device, DTYPES[first.weight_dtype])
    base = compile_in_place(copy.deepcopy(model))
    arms = {HP: base}
    for recipe in settings.timed_recipes():
        reason = pointless(chain, recipe)
        if reason is not None:
            found[recipe.candidate] = Measurement(unsupported=reason)
            continue
        own = copy.deepcopy(model)
        inside = {sites[site]: name for site, name in kernels.get(recipe.candidate, {}).items()}
        try:
            form_chains(own, [(renamed, recipe.name, inside)])
        except Exception as error:
            found[recipe.candidate] = Measurement(unsupported=first_line(error))
        else:
            arms[recipe.candidate] = own
    sides = chain.links[0].in_features, chain.links[-1].out_features
    timed = race(arms, sides, first, device=device, settings=settings, deadline=deadline)
    return {**found, **timed}


def race(
    arms: Mapping[str, nn.Module],
    sides: tuple[int, ...],
    first: LinearStats,
    *,
    device: torch.device,
    settings: Settings,
    inputs: int = 1,
    deadline: float | None = None,
) -> dict[str, Measurement]:
    """Times of the same computation by several modules, "hp" among them, against each other.

    Args:
        arms: by candidate; each maps `inputs` tensors [rows, sides[0]] to one of each further side,
            [rows, sides[1]], in a tuple where there are several.
        first: statistics of the first linear layer: rows, dtypes, which gradients are wanted.
    """
    steps: dict[str, Callable[[], object]] = {}
    found: dict[str, Measurement] = {}
    for name, arm in arms.items():
        try:
            step = _step(arm, sides, first, device, inputs)
            step()
            step()
            steps[name] = step
        except torch.AcceleratorError:
            raise  # CUDA is unusable after it
        except Exception as error:
            found[name] = Measurement(unsupported=f"cannot be timed: {first_line(error)}")
    if HP not in steps:
        return found
    times = time_interleaved(
        steps,
        baseline=HP,
        device=device,
        keep=list(steps),
        max_rounds=settings.sharing_rounds,
        deadline=deadline,
    )
    for name, timing in times.timings.items():
        found[name] = Measurement(
            microseconds=timing.microseconds, speedup=timing.speedup, rounds=timing.rounds
        )
    for name, why in times.failures.items():
        found[name] = Measurement(unsupported=f"cannot be timed: {why}")
    return found


def build_chain(
    chain: Chain, device: torch.device, dtype: torch.dtype
) -> tuple[nn.Module, Chain, dict[str, str]]:
    """A chain of its own as an nn.Sequential, its description, and its sites by those of `chain`."""
    modules: list[nn.Module] = []

    def add(epilogue: Epilogue, features: int) -> tuple[str, ...]:
        begin = len(modules)
        modules.extend(_epilogue_modules(epilogue, features))
        return tuple(str(place) for place in range(begin, len(modules)))

    members = add(chain.prologue, chain.links[0].in_features)
    links = []
    for link in chain.links:
        path = str(len(modules))
        modules.append(nn.Linear(link.in_features, link.out_features, bias=link.bias))
        links.append(replace(link, path=path, members=add(link.epilogue, link.out_features)))
    renamed = Chain(links=tuple(links), prologue=chain.prologue, members=members)
    sites = {
        site_name(old.path, gemm): site_name(new.path, gemm)
        for old, new in zip(chain.links, links, strict=True)
        for gemm in Gemm
    }
    return nn.Sequential(*modules).to(device, dtype), renamed, sites


def _epilogue_modules(epilogue: Epilogue, features: int) -> Sequence[nn.Module]:
    found: list[nn.Module] = []
    if epilogue.norm is Norm.BLOCK:
        found.append(BlockNorm(features, epilogue.block, eps=epilogue.eps))
    elif epilogue.norm is Norm.LAYER:
        affine = epilogue.gamma or epilogue.beta
        found.append(nn.LayerNorm(features, eps=epilogue.eps, elementwise_affine=affine, bias=epilogue.beta))
    elif epilogue.norm is Norm.RMS:
        found.append(nn.RMSNorm(features, eps=epilogue.eps, elementwise_affine=epilogue.gamma))
    if epilogue.activation is not Activation.NONE:
        found.append(_MODULES[epilogue.activation]())
    return found


def _step(
    model: nn.Module, sides: tuple[int, ...], first: LinearStats, device: torch.device, inputs: int
) -> Callable[[], object]:
    generator = torch.Generator(device).manual_seed(0)
    compute = DTYPES[first.dtype]
    xs = [torch.randn(first.rows, sides[0], generator=generator, device=device) for _ in range(inputs)]
    xs = [x.to(compute).requires_grad_(first.needs_input_grad) for x in xs]
    grads = [torch.randn(first.rows, side, generator=generator, device=device) for side in sides[1:]]
    grads = [(grad / max(first.rows, 1)).to(compute) for grad in grads]
    leaves = [*xs, *model.parameters()]
    training = first.needs_input_grad or first.needs_weight_grad
    autocast = compute != DTYPES[first.weight_dtype]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        with (
            torch.set_grad_enabled(training),
            torch.autocast(device.type, compute if autocast else torch.bfloat16, enabled=autocast),
        ):
            out = model(*xs)
        if training:
            torch.autograd.backward(out, grads)

    return step
