"""Timing linear layers that read one tensor, as probe/chain_times.py times a chain.

The layers are built anew with random normal data of the probed rows, dtypes and gradients: "hp" under
torch.compile, the layers one by one in FP8, and as one. All get gradients for all outputs, dense ones, as
most of what follows a linear layer returns. As one, outputs are timed as copies: what reads columns of a
wider matrix, of which the race knows nothing, loses no more than that.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from loka.core.compiling import compile_in_place
from loka.core.problem import DTYPES
from loka.core.recipe import Gemm
from loka.core.report import HP, Measurement, Report, site_name
from loka.core.shared_input import SharedInput
from loka.core.stats import LinearStats, Stats
from loka.core.timing import first_line
from loka.nn.fp8_linear import convert_linear
from loka.nn.shared_input import share_input
from loka.nn.shared_kernels import apart_name, comparable, shared_kernels, shared_name
from loka.probe.chain_times import race
from loka.probe.settings import Settings
from loka.probe.sites import gemms_of


class Branches(nn.Module):
    """x [T, K] -> y_1 .. y_n [T, N_i]."""

    def __init__(self, group: SharedInput) -> None:
        super().__init__()
        self.branch = nn.ModuleList(
            nn.Linear(group.in_features, branch.out_features, bias=branch.bias) for branch in group.branches
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(layer(x) for layer in self.branch)


def timed_groups(stats: Stats) -> list[SharedInput]:
    """The groups to time: each whole, and what of it is in no chain of several modules and in no stack, for a
    plan forms these first. Layers without statistics are left out, and those that run other GEMMs."""
    within = {path for chain in stats.chains if not chain.lone for path in chain.linears}
    within |= {path for stack in stats.crosses for path in stack.linears}
    sites = {site_name(path, g) for path, layer in stats.layers.items() for g in gemms_of(path, layer)[0]}
    found: dict[str, SharedInput] = {}
    for group in stats.shared:
        for left in (set[str](), within):
            part = group.without(left)
            part = part and comparable(part, sites)
            if part is not None:
                found[part.name] = part
    return list(found.values())


def shared_key(group: SharedInput, layers: Mapping[str, LinearStats], report: Report) -> str:
    """Equal for groups that take equally long."""
    several = [layers[path] for path in group.linears]
    shape = [(branch.out_features, branch.bias) for branch in group.branches]
    run = [
        (each.rows, each.dtype, each.weight_dtype, each.needs_input_grad, each.needs_weight_grad)
        for each in several
    ]
    return repr((group.in_features, shape, run, shared_kernels(group, report.sites)))


def time_shared(
    group: SharedInput,
    layers: Mapping[str, LinearStats],
    report: Report,
    *,
    device: torch.device,
    settings: Settings,
    deadline: float | None = None,
) -> dict[str, Measurement]:
    """Times of "hp", of the layers one by one, and as one, by name; a reason where one cannot run."""
    kernels, why = shared_kernels(group, report.sites)
    if why is not None:
        return {HP: Measurement(unsupported=why)}
    first = layers[group.linears[0]]
    model, renamed = build_branches(group, device, DTYPES[first.weight_dtype])
    arms = {HP: compile_in_place(copy.deepcopy(model))}
    found: dict[str, Measurement] = {}
    for name, as_one in ((apart_name(kernels), False), (shared_name(kernels), True)):
        try:
            arms[name] = fp8_branches(model, renamed, kernels, as_one=as_one)
        except Exception as error:
            found[name] = Measurement(unsupported=first_line(error))
    sides = (group.in_features, *group.widths)
    timed = race(arms, sides, first, device=device, settings=settings, deadline=deadline)
    return {**found, **timed}


def fp8_branches(
    model: nn.Module, group: SharedInput, kernels: Mapping[Gemm, str], *, as_one: bool
) -> nn.Module:
    """A copy of `model` whose layers run by `kernels`, one by one or as one."""
    own = copy.deepcopy(model)
    for path in group.linears:
        layer = own.get_submodule(path)
        assert isinstance(layer, nn.Linear)
        candidates = (kernels[Gemm.OUTPUT], kernels[Gemm.GRAD_INPUT], kernels[Gemm.GRAD_WEIGHT])
        convert_linear(layer, path=path, candidates=candidates)
    if as_one:
        share_input(own, group)
    return own


def build_branches(
    group: SharedInput, device: torch.device, dtype: torch.dtype
) -> tuple[nn.Module, SharedInput]:
    """The plain layers of a group, and its record as one of them, all of whose outputs are to be dense."""
    branches = tuple(replace(b, path=f"branch.{place}", dense=True) for place, b in enumerate(group.branches))
    return Branches(group).to(device, dtype), replace(group, branches=branches)
