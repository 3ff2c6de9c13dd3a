"""The extra backward of model_effects/sensitivity.py, and how hooks on gradients tell it from those of training.

By its graph task: a flag would not do, as another thread may train another model meanwhile, and hooks on a GPU run in
threads of autograd's.
"""

from collections.abc import Sequence

import torch
from torch.autograd.graph import GradientEdge

_tasks: set[int] = set()


def in_extra_backward() -> bool:
    """Of a hook on a gradient: whether an extra backward, of any probe, sends that gradient."""
    return torch._C._current_graph_task_id() in _tasks


def extra_backward(
    z: torch.Tensor, edges: Sequence[GradientEdge], weight: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of (z * weight).sum() at `edges`; None where none reaches. Frees nothing of the graph."""
    own: list[int] = []

    def begin(_: torch.Tensor) -> None:
        own.append(torch._C._current_graph_task_id())
        _tasks.update(own)

    with torch.enable_grad():
        root = z.view_as(z)  # a hook on z itself would be called by training's backward too
    root.register_hook(begin)  # runs before all others, as all gradients come from here
    try:
        return torch.autograd.grad(root, edges, weight, retain_graph=True, allow_unused=True)
    finally:
        _tasks.difference_update(own)
