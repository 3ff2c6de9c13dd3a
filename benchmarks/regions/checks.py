"""What an arm is besides its time: memory, agreement with bf16, what the plan says and what ran of it."""

import gc
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from arms import Arm
from torch import nn

import loka
from loka.core.device import peak_of

Tensors = Mapping[str, torch.Tensor]

_GRADIENTS = 3  # of weights: the first, the middle and the last


def seen(arm: Arm) -> dict[str, torch.Tensor]:
    """The output of a step and some gradients, in float32 on the CPU."""
    found = {"output": arm.step()}
    weights = [(path, p.grad) for path, p in arm.model.named_parameters() if p.dim() >= 2 and p.grad is not None]
    if weights:
        picks = {round(index * (len(weights) - 1) / (_GRADIENTS - 1)) for index in range(_GRADIENTS)}
        found.update({f"grad {weights[index][0]}": weights[index][1] for index in sorted(picks)})
    found.update({f"grad of input {i}": x.grad for i, x in enumerate(arm.inputs) if x.grad is not None})
    return {name: tensor.detach().float().cpu() for name, tensor in found.items()}


def errors(of: Tensors, reference: Tensors) -> dict[str, float | None]:
    """Norm of the difference over that of the reference, by name; None for what only one of them has."""
    return {
        name: _error(of[name], reference[name]) if name in of and name in reference else None
        for name in {**reference, **of}
    }


def _error(of: torch.Tensor, reference: torch.Tensor) -> float:
    norm = reference.norm().item()
    return (of - reference).norm().item() / norm if norm else float("inf")


def allocated() -> int:
    """Bytes on the GPU now, after what nobody refers to is gone; 0 without one."""
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def memory(step: Callable[[], object], leaves: list[torch.Tensor], before_arm: int) -> dict[str, int]:
    """Bytes of the peak of a step that is not captured: beyond what lay there before the arm was built, and
    beyond what lies there before the step, its gradients included; and those gradients."""
    for leaf in leaves:
        leaf.grad = None
    before = allocated()
    peak = peak_of(step, torch.device("cuda"))
    gradients = sum(leaf.grad.numel() * leaf.grad.element_size() for leaf in leaves if leaf.grad is not None)
    return {"arm": before + peak - before_arm, "step": peak, "gradients": gradients}


def of_plan(plan: loka.Plan) -> dict[str, Any]:
    """What it decides, in short."""
    counts = Counter(decision.candidate for decision in plan.decisions.values())
    return {
        "sites": len(plan.decisions),
        "fp8": len(plan.decisions) - counts["hp"],
        "by_candidate": dict(counts),
        "summary": plan.summary(),
        "coverage": plan.coverage_lines(),
        "decisions": {site: decision.candidate for site, decision in plan.decisions.items()},
        "notes": list(plan.notes),
    }


def of_compilation() -> dict[str, int]:
    """Graphs that dynamo made since it was reset, and breaks between them."""
    counters = torch._dynamo.utils.counters
    return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


def ran(model: nn.Module) -> int:
    """Sites that ran in FP8 at least once, as the device counted."""
    return sum(1 for counts in loka.health_of(model).values() if counts["runs"])
