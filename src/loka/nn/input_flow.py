"""Finding linear layers that read one tensor (core/shared_input.py), in the pass that nn/dataflow.py watches.

    a and b share their input  <=>  both were called, once, with the same tensor object, unchanged in between,
                                    under the same state; their weights have one dtype and device

As one, their outputs are columns of one matrix: strided, where nn.Linear's are contiguous. `Columns` finds
of whose output the model takes a view that columns do not allow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from loka.core.shared_input import Branch, SharedInput
from loka.nn.watched import Call

_VIEWS = {
    torch.Tensor.view, torch.Tensor.view_as, torch.Tensor.reshape, torch.Tensor.reshape_as, torch.reshape,
    torch.Tensor.flatten, torch.flatten, torch.Tensor.ravel, torch.ravel,
}  # fmt: skip


def note_input(call: Call, given: torch.Tensor) -> None:
    """Notes what a linear layer's call reads, and keeps it alive while the pass is watched."""
    if not given.is_inference():  # whose changes nobody counts
        call.given, call.changes = given, given._version


def find_shared(calls: Sequence[Call], dense: set[int]) -> tuple[SharedInput, ...]:
    """The groups of two layers and more in the order of the pass. `dense`: of `Columns.dense`."""
    counts = Counter(call.path for call in calls)
    groups: dict[tuple[Any, ...], list[Call]] = {}
    for call in calls:
        if call.given is None or call.broken or counts[call.path] > 1:
            continue
        weight = _linear(call).weight
        key = (id(call.given), call.changes, call.state, weight.dtype, weight.device)
        groups.setdefault(key, []).append(call)
    return tuple(
        SharedInput(
            in_features=_linear(group[0]).in_features,
            branches=tuple(_branch(call, id(call) in dense) for call in group),
        )
        for group in groups.values()
        if len(group) > 1
    )


def _linear(call: Call) -> nn.Linear:
    assert isinstance(call.module, nn.Linear)
    return call.module


def _branch(call: Call, dense: bool) -> Branch:
    linear = _linear(call)
    return Branch(path=call.path, out_features=linear.out_features, bias=linear.bias is not None, dense=dense)


class Columns:
    """Whose output, [.., N] and contiguous, is seen in another shape than N columns of a wider matrix can be.

    `dense` has the ids of such calls.
    """

    def __init__(self) -> None:
        self.dense: set[int] = set()
        self._calls: dict[int, tuple[Call, int]] = {}  # by the address of the output's memory

    def note_output(self, call: Call, output: torch.Tensor) -> None:
        if call.given is not None and not call.broken and output.numel() and output.is_contiguous():
            self._calls[output.untyped_storage().data_ptr()] = call, output.shape[-1]

    def note_view(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """`func` was called and gave `result`."""
        if func not in _VIEWS or not args or not _plain(args[0]) or not _plain(result):
            return
        call, width = self._calls.get(args[0].untyped_storage().data_ptr(), (None, 0))
        if call is not None and not _allowed(args[0], result, width):
            self.dense.add(id(call))


def _plain(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout is torch.strided and not value.is_nested


def _allowed(viewed: torch.Tensor, result: torch.Tensor, width: int) -> bool:
    """Whether `viewed`, a view of a contiguous [.., width], could become `result` as a view of columns."""
    if viewed.dtype != result.dtype:
        return False
    # A step of a row becomes one of a matrix twice as wide.
    strides = [stride + stride // width * width for stride in viewed.stride()]
    columns = torch.empty_strided(viewed.shape, strides, dtype=viewed.dtype, device="meta")
    try:
        columns.view(result.shape)
    except RuntimeError:
        return False
    return True
