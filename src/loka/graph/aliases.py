"""Whether one tensor is the transpose of another, asked while torch.compile traces.

Dynamo calls function modes for functions and methods, not for the properties `.T` and `.mT`, and offers
traced code no way to compare addresses. What runs at trace time can: it compares the fake tensors, and the
answer is a constant of the graph, since a view of a parameter is one in every call.
"""

from typing import Any

import torch

_answers: list[bool] = []  # one question at a time: dynamo holds its lock while it traces


def is_transposed(tensor: torch.Tensor, known: torch.Tensor) -> bool:
    """Whether `tensor` is `known.mT`; only to be called in traced code."""
    from torch._dynamo.comptime import comptime

    comptime(_compare)
    return _answer()


def _compare(context: Any) -> None:
    tensor, known = (context.get_local(name).as_fake() for name in ("tensor", "known"))
    wanted = known.mT
    same_memory = tensor.untyped_storage()._cdata == known.untyped_storage()._cdata
    _answers.append(same_memory and _geometry(tensor) == _geometry(wanted))


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride()


def _answer() -> bool:
    return _answers.pop()


# torch.compiler.assume_constant_result does this, and imports dynamo (2 s) to do it.
_answer._dynamo_marked_constant = True  # type: ignore[attr-defined]
