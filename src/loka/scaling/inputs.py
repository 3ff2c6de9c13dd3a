"""A model and a batch without their numbers: of the right shapes, in no memory.

Everything is made of fake tensors, which know shape, dtype and device. A model built under torch's fake mode
never had numbers; one that exists is copied with fake parameters and left as it is.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map


def fake_mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def mode_of(model: nn.Module) -> FakeTensorMode | None:
    """The mode under which the model was built, or None for one with numbers."""
    return next((tensor.fake_mode for tensor in _tensors(model) if isinstance(tensor, FakeTensor)), None)


def fake_model(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy that shares nothing with `model` and holds no numbers. Raises what copying the model raises."""
    memo: dict[int, Any] = {}
    for tensor in _tensors(model):
        memo[id(tensor)] = tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)
    return copy.deepcopy(model, memo)


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        yield from (held for held in module._parameters.values() if held is not None)
        yield from (held for held in module._buffers.values() if held is not None)
        yield from (held for held in tree_leaves(vars(module)) if isinstance(held, torch.Tensor))


def fake_batch(batch: Any, mode: FakeTensorMode, *, rows: int) -> Any:
    """The batch in fake tensors, what was as high as its first tensor being `rows` high."""
    found = tree_map(lambda leaf: _fake(leaf, mode), batch)
    given = rows_of(found)
    if given is None or rows == given:
        return found
    with mode:
        return tree_map(lambda leaf: _resized(leaf, given, rows), found)


def _fake(leaf: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
        return leaf
    return mode.from_tensor(leaf)


def _resized(leaf: Any, given: int, rows: int) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or leaf.shape[0] != given:
        return leaf
    made = torch.empty((rows, *leaf.shape[1:]), dtype=leaf.dtype, device=leaf.device)
    return made.requires_grad_(leaf.requires_grad)


def repeated(batch: Any, rows: int) -> Any:
    """`rows` rows of a real batch, from its own in turn, below 0 from the last."""
    given = rows_of(batch)

    def taken(leaf: Any) -> Any:
        if given is None or not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or leaf.shape[0] != given:
            return leaf
        steps = torch.arange(rows) if rows > 0 else torch.arange(-1, rows - 1, -1)
        picked = leaf.detach()[steps.to(leaf.device) % given]
        return picked.requires_grad_(leaf.requires_grad)

    return tree_map(taken, batch)


def heights_of(batch: Any) -> Iterator[int]:
    """The first side of each tensor that has one, in their order."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            yield int(leaf.shape[0])


def rows_of(batch: Any) -> int | None:
    """The first side of the first tensor that has one; None where there is none to be seen."""
    return next(heights_of(batch), None)


def arguments(batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Positional and named arguments of a call: a tuple or list, a dict, or one argument."""
    if isinstance(batch, Mapping):
        return (), batch
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})
