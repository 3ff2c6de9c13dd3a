"""Taking back what a step did on the host where its capture is not kept.

A capture runs the host's half of a step and none of the device's. Everything the host did for a
graph that is not kept has to be taken back: gradients that point into the graph's memory and were
never computed, state made or counted by an optimizer, random generators, the current stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


@dataclass(frozen=True)
class Undo:
    """What a step can change on the host, as it was before a capture."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    gradients: tuple[tuple[nn.Parameter, torch.Tensor | None, torch.Tensor], ...]  # with .grad and .data
    buffers: tuple[tuple[nn.Module, dict[str, torch.Tensor | None]], ...]
    states: tuple[dict[Any, dict[str, Any]], ...]
    groups: tuple[tuple[dict[str, Any], ...], ...]
    on_host: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    host_random: torch.Tensor

    @classmethod
    def before(
        cls,
        model: nn.Module,
        parameters: tuple[nn.Parameter, ...],
        optimizers: tuple[Optimizer, ...],
        device: torch.device,
    ) -> Undo:
        states = tuple({p: dict(state) for p, state in o.state.items() if isinstance(state, dict)} for o in optimizers)
        tensors = [value for state in states for values in state.values() for value in values.values()]
        tensors += [*model.buffers(), *parameters]
        # Work on tensors elsewhere (on the host) is done at once, captured or not; they are few and small.
        host = [t for t in tensors if isinstance(t, torch.Tensor) and t.device.type != device.type]
        return cls(
            model=model,
            optimizers=optimizers,
            gradients=tuple((p, p.grad, p.data) for p in parameters),
            buffers=tuple((module, dict(module.named_buffers(recurse=False))) for module in model.modules()),
            states=states,
            groups=tuple(
                tuple({k: v for k, v in group.items() if k != "params"} for group in o.param_groups) for o in optimizers
            ),
            on_host=tuple((tensor, tensor.detach().clone()) for tensor in host),
            host_random=torch.get_rng_state(),
        )

    def what_a_graph_misses(self) -> str | None:
        """What the step did on the host, where replays do nothing; to be asked after a capture."""
        if not torch.equal(torch.get_rng_state(), self.host_random):
            return "the step draws random numbers on the host, and a graph would freeze them"
        for optimizer, states, groups in zip(self.optimizers, self.states, self.groups, strict=True):
            name = type(optimizer).__name__
            for key, state in optimizer.state.items():
                if isinstance(state, dict) and (found := _changed(states.get(key, {}), state)):
                    return (
                        f"{name} makes {found!r} of its state anew or counts it on the host, and a graph "
                        "would freeze it; it has to change its state in place, on the device"
                    )
            for at, (old, group) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
                if found := _changed(old, {k: v for k, v in group.items() if k != "params"}):
                    return (
                        f"the step changes {found!r} of group {at} of {name}, and a graph would freeze it; "
                        "do so after the step (a schedule's step() belongs outside)"
                    )
        for module, buffers in self.buffers:
            if found := _changed(buffers, dict(module.named_buffers(recurse=False))):
                return (
                    f"the step replaces the buffer {found!r} of {type(module).__name__}, and a graph would "
                    "go on with the old one; change it in place"
                )
        for weight, _, data in self.gradients:
            if address(weight) != address(data):
                return "the step moves a parameter to other memory, and a graph would go on with the old one"
        for tensor, value in self.on_host:
            if not _equal(tensor, value):
                return "the step changes a tensor on the host, which replays would leave as it is"
        return None

    def everything(self) -> None:
        for weight, gradient, data in self.gradients:
            if address(weight) != address(data):
                weight.data = data
            weight.grad = gradient
        for module, buffers in self.buffers:
            for name, buffer in buffers.items():
                if getattr(module, name) is not buffer:
                    setattr(module, name, buffer)
        for optimizer, states, groups in zip(self.optimizers, self.states, self.groups, strict=True):
            for key, state in list(optimizer.state.items()):
                if key in states:
                    state.clear()
                    state.update(states[key])
                elif isinstance(state, dict):
                    del optimizer.state[key]
            for old, group in zip(groups, optimizer.param_groups, strict=True):
                group.update(old)
        with torch.no_grad():
            for tensor, value in self.on_host:
                tensor.copy_(value)
        torch.set_rng_state(self.host_random)

    def kept(self) -> tuple[object, ...]:
        """Tensors whose memory a graph uses: an optimizer may drop its own, as load_state_dict does."""
        return (
            [value for state in self.states for values in state.values() for value in values.values()],
            [value for groups in self.groups for group in groups for value in group.values()],
            [data for _, _, data in self.gradients],
            [buffers for _, buffers in self.buffers],
        )


def not_capturable(optimizer: Optimizer) -> str | None:
    """Why a graph would freeze what an optimizer reads, or None."""
    name = type(optimizer).__name__
    for at, group in enumerate(optimizer.param_groups):
        if group.get("capturable", True) is False:
            return (
                f"group {at} of {name} has capturable=False: it counts its steps on the host, which a graph "
                f"would freeze; build it as {name}(..., capturable=True)"
            )
        for key, value in group.items():
            if isinstance(value, torch.Tensor) and value.device != group["params"][0].device:
                return (
                    f"{key!r} of group {at} of {name} is a tensor on {value.device}, whose value a graph "
                    "would freeze; move it to the parameters' device"
                )
    return None


def address(tensor: torch.Tensor) -> int:
    """Of a DTensor: that of this rank's shard, as it has no memory of its own. `to_local` takes far longer."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).data_ptr()


def _changed(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    for name, value in new.items():
        before = old.get(name)
        if value is before:
            continue
        if isinstance(value, torch.Tensor) or isinstance(before, torch.Tensor) or value != before:
            return name
    return None


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also where both are NaN."""
    return bool(((a == b) | ((a != a) & (b != b))).all())
