"""Timing a stack of cross layers as a whole, as probe/chain_times.py times a chain.

The stack is built anew from its record, as plain modules of the same formula: "hp" under
torch.compile, and the fused path. Its x_0 is in the dtype of the first GEMM: a model whose x_0 is in
float32 under autocast needs a cast more in the fused path, and passes twice as wide in hp.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from loka.core.compiling import compile_in_place
from loka.core.cross_record import CrossLink, CrossStack
from loka.core.problem import DTYPES
from loka.core.recipe import Gemm
from loka.core.report import HP, Measurement, site_name
from loka.core.stats import LinearStats
from loka.core.timing import first_line
from loka.nn.chain import form_chains
from loka.nn.cross import recipe_objection
from loka.probe.chain_times import how_it_runs, race
from loka.probe.settings import Settings


class PlainCross(nn.Module):
    """x_0 * (U V x + b) + x, or W in the place of U V."""

    def __init__(self, link: CrossLink) -> None:
        super().__init__()
        self.v = None if link.rank is None else nn.Linear(link.features, link.rank, bias=False)
        self.u = nn.Linear(link.rank or link.features, link.features, bias=link.bias)

    def forward(self, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x0 * self.u(x if self.v is None else self.v(x)) + x


class PlainStack(nn.Module):
    """x_0 and the first x, or x_0 alone where that is both, -> the last x."""

    def __init__(self, stack: CrossStack) -> None:
        super().__init__()
        self.cross = nn.ModuleList(PlainCross(link) for link in stack.layers)

    def forward(self, x0: torch.Tensor, x: torch.Tensor | None = None) -> torch.Tensor:
        found = x0 if x is None else x
        for layer in self.cross:
            found = layer(x0, found)
        return found


def stack_key(
    stack: CrossStack, layers: Mapping[str, LinearStats], kernels: Mapping[str, Mapping[str, str]]
) -> str:
    """Equal for stacks that take equally long."""
    shape = [(layer.features, layer.rank, layer.bias) for layer in stack.layers]
    return repr((stack.joint, shape, how_it_runs(stack, layers, kernels)))


def time_stack(
    stack: CrossStack,
    layers: Mapping[str, LinearStats],
    kernels: Mapping[str, Mapping[str, str]],
    *,
    device: torch.device,
    settings: Settings,
    deadline: float | None = None,
) -> dict[str, Measurement]:
    """Times of "hp" and of the fused path under the recipes of `settings`, by candidate; a reason where a
    recipe cannot run.

    Arguments as those of `time_chain`.
    """
    first = layers[stack.linears[0]]
    model, renamed, sites = build_stack(stack, device, DTYPES[first.weight_dtype])
    base = compile_in_place(copy.deepcopy(model))
    arms = {HP: base}
    found: dict[str, Measurement] = {}
    for recipe in settings.timed_recipes():
        reason = recipe_objection(recipe)
        own = copy.deepcopy(model)
        inside = {sites[site]: name for site, name in kernels.get(recipe.candidate, {}).items()}
        if reason is None:
            try:
                form_chains(own, [], [(renamed, recipe.name, inside)])
            except Exception as error:
                reason = first_line(error)
        if reason is None:
            arms[recipe.candidate] = own
        else:
            found[recipe.candidate] = Measurement(unsupported=reason)
    timed = race(
        arms,
        (stack.features, stack.features),
        first,
        device=device,
        settings=settings,
        inputs=1 if stack.joint else 2,
        deadline=deadline,
    )
    return {**found, **timed}


def build_stack(
    stack: CrossStack, device: torch.device, dtype: torch.dtype
) -> tuple[nn.Module, CrossStack, dict[str, str]]:
    """The plain modules of a stack, its record as one of them, and its sites by those of `stack`."""
    layers = tuple(
        replace(
            layer,
            path=f"cross.{place}",
            u=f"cross.{place}.u",
            v=None if layer.v is None else f"cross.{place}.v",
        )
        for place, layer in enumerate(stack.layers)
    )
    renamed = replace(stack, layers=layers)
    sites = {
        site_name(old, gemm): site_name(new, gemm)
        for old, new in zip(stack.linears, renamed.linears, strict=True)
        for gemm in Gemm
    }
    return PlainStack(stack).to(device, dtype), renamed, sites
