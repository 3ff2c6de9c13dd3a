"""Everything a run needs to continue bit for bit, as plain tensors and numbers.

Model, optimizers, sums for NE, random generators, every buffer, and the counters of FP8
layers: modules may own buffers outside the state dict that the next step depends on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loka.core.exceptions import CheckpointRefused
from loka.nn import fp8_linears
from loka.train.metrics import RunningNE


def capture(
    model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer], running: RunningNE
) -> dict[str, Any]:
    """The state as it is now. Tensors are shared, not copied: save it before the next step."""
    return {
        "model": model.state_dict(),
        "fp8": {path: linear.loka_health for path, linear in fp8_linears(model).items()},
        "buffers": dict(model.named_buffers(remove_duplicate=False)),
        "optimizers": {name: optimizer.state_dict() for name, optimizer in optimizers.items()},
        "running": running.state_dict(),
        "random": {"cpu": torch.get_rng_state(), **_cuda_random(model)},
    }


def restore(
    state: Mapping[str, Any],
    model: nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
    running: RunningNE,
    *,
    path: Path,
) -> None:
    """Puts a captured state back in place; `path` is where it came from, for the message."""
    try:
        model.load_state_dict(state["model"])
        for name, value in state["buffers"].items():
            _restore_buffer(model, name, value)
        for layer, linear in fp8_linears(model).items():
            linear.loka_health.copy_(state["fp8"][layer])
        for name, optimizer in optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        running.load_state_dict(state["running"])
        torch.set_rng_state(state["random"]["cpu"])
        if "cuda" in state["random"]:
            torch.cuda.set_rng_state(state["random"]["cuda"], _device(model))
    except (RuntimeError, AttributeError, KeyError, ValueError) as error:
        raise CheckpointRefused(
            f"the state in {path} does not fit this model",
            why=str(error).splitlines(),
            way_out="build and convert the model as the run did that wrote it",
        ) from error


def layout(model: nn.Module) -> dict[str, Any]:
    """Modules and weights, short enough for a manifest: another or a converted model differs."""
    lines = [f"{name} {type(module).__qualname__}" for name, module in model.named_modules()]
    lines += [f"{name} {tuple(w.shape)} {w.dtype}" for name, w in model.named_parameters()]
    return {
        "class": type(model).__name__,
        "weights": sum(weight.numel() for weight in model.parameters()),
        "layout": hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16],
    }


def _restore_buffer(model: nn.Module, name: str, value: torch.Tensor) -> None:
    owner_name, _, own = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    current = owner._buffers.get(own)
    if current is not None and current.shape == value.shape and current.dtype == value.dtype:
        current.copy_(value)  # in place: compiled code and graphs may hold this very tensor
    elif own in owner._buffers:
        owner._buffers[own] = value.to(_device(model))
    else:  # made on first use; were it persistent, loading the state dict would have failed
        owner.register_buffer(own, value.to(_device(model)), persistent=False)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _cuda_random(model: nn.Module) -> dict[str, torch.Tensor]:
    device = _device(model)
    return {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
