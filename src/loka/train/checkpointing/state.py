"""Everything a run needs to continue bit for bit, as plain tensors, numbers and text.

Model, optimizers, sums of the metrics, the mean of the weights, random generators, every buffer, what FP8
sites count (nn/fp8_state_dict.py), and the plan that runs: none but the first is in a `state_dict`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from loka.core.exceptions import CheckpointRefused
from loka.core.records.plan import Plan
from loka.core.signature import MODEL_OPTIONS
from loka.distributed.tables.sharded_tables import sharded_modules
from loka.nn.fp8_state_dict import fp8_state_dict, load_fp8_state_dict
from loka.nn.unwrap import device_of
from loka.train.running import RunningTasks


def capture(
    model: nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
    running: RunningTasks,
    average: AveragedModel | None = None,
    plan: Plan | None = None,
) -> dict[str, Any]:
    """The state as it is now. Tensors are shared, not copied: save it before the next step."""
    return {
        "model": model.state_dict(),
        "fp8": fp8_state_dict(model),
        "plan": plan_text(plan),
        "buffers": _buffers(model),
        "optimizers": {name: optimizer.state_dict() for name, optimizer in optimizers.items()},
        "running": running.state_dict(),
        "average": average.state_dict() if average is not None else None,
        "random": {"cpu": torch.get_rng_state(), **_cuda_random(model)},
    }


def plan_in(state: Mapping[str, Any], which: str = "plan") -> Plan | None:
    """The plan that ran when `state` was captured; or with "given_plan" the one that the run began by.

    Raises FileRefused for one of an earlier version by which layers ran together."""
    return Plan.from_json(json.loads(state[which])) if state[which] else None


def plan_text(plan: Plan | None) -> str | None:
    return json.dumps(plan.to_json(), allow_nan=False) if plan else None


def rate_in(state: Mapping[str, Any]) -> float | None:
    """The dense learning rate that the next step would have, as a share of its peak; None of a record of
    before there were schedules."""
    for optimizer in state["optimizers"].values():
        for group in optimizer["param_groups"]:
            if group.get("initial_lr"):
                return float(group["lr"]) / float(group["initial_lr"])
    return None


def restore(
    state: Mapping[str, Any],
    model: nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
    running: RunningTasks,
    average: AveragedModel | None = None,
    *,
    path: Path,
) -> None:
    """Puts a captured state back in place; `path` is where it came from, for the message.

    The model has to run by the state's plan already.
    """
    try:
        model.load_state_dict(state["model"])
        if average is not None:
            average.load_state_dict(state["average"])
    except _UNFIT as error:
        raise unfit_state(path, str(error).splitlines()) from error
    for name, optimizer in optimizers.items():
        restore_optimizer(optimizer, state["optimizers"].get(name, {}), path=path)
    restore_own(state, model, running, path=path)


def restore_own(state: Mapping[str, Any], model: nn.Module, running: RunningTasks, *, path: Path) -> None:
    """Restores buffers, counts of FP8 sites, metrics and random state: all but weights and optimizers."""
    try:
        _restore_buffers(model, state["buffers"])
        load_fp8_state_dict(model, state["fp8"])
        running.load_state_dict(state["running"])
        torch.set_rng_state(state["random"]["cpu"])
        if "cuda" in state["random"]:
            torch.cuda.set_rng_state(state["random"]["cuda"], device_of(model))
    except _UNFIT as error:
        raise unfit_state(path, str(error).splitlines()) from error


def restore_model(state: Mapping[str, Any], model: nn.Module, *, path: Path) -> None:
    """Restores weights and buffers alone. It does not matter whether `model` runs by a plan."""
    try:
        model.load_state_dict(state["model"])
        _restore_buffers(model, state["buffers"])
    except _UNFIT as error:
        raise unfit_state(path, str(error).splitlines()) from error


_UNFIT = (RuntimeError, AttributeError, KeyError, ValueError, TypeError)


def unfit_state(path: Path, why: Sequence[str]) -> CheckpointRefused:
    """The error of a checkpoint whose tensors are not those of the model."""
    return CheckpointRefused(
        f"the state in {path} does not fit this model",
        why=why,
        way_out=f"build and convert the model as the run did that wrote it; {MODEL_OPTIONS}",
    )


def restore_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], *, path: Path) -> None:
    """Restores an optimizer. A learning rate that is a tensor stays the one on the device: the loaded one lies on the
    CPU.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(dict(state))
    except _UNFIT as error:
        raise unfit_state(path, str(error).splitlines()) from error
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(rate, torch.Tensor):
            group["lr"] = rate


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """All buffers except those of sharded TorchRec collections, which say how features lie in the shards of these
    ranks.
    """
    placed = tuple(f"{path}." for path in sharded_modules(model))
    found = model.named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in found if not name.startswith(placed)}


_OF_SHARDS = "_features_order_tensor"
"""Checkpoints of before 2026-11-28 have this buffer of TorchRec's."""


def _restore_buffers(model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    for name, value in buffers.items():
        if name.rpartition(".")[2] != _OF_SHARDS:
            _restore_buffer(model, name, value)


def _restore_buffer(model: nn.Module, name: str, value: torch.Tensor) -> None:
    owner_name, _, own = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    current = owner._buffers.get(own)
    if current is not None and current.shape == value.shape and current.dtype == value.dtype:
        current.copy_(value)  # in place: compiled code and graphs may hold this very tensor
    elif own in owner._buffers:
        owner._buffers[own] = value.to(device_of(model))
    else:  # made on first use; were it persistent, loading the state dict would have failed
        owner.register_buffer(own, value.to(device_of(model)), persistent=False)


def _cuda_random(model: nn.Module) -> dict[str, torch.Tensor]:
    device = device_of(model)
    return {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
