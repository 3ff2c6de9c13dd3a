"""How one tensor is a view of another, asked while torch.compile traces.

Dynamo calls function modes for functions and methods, but not for `.T`, `.mT` and iteration, and traced code cannot
compare addresses. Code that runs at trace time can: it compares the fake tensors. The answer is a constant of the
graph, because a view of a parameter is one in every call.
"""

from typing import Any

import torch

from loka.graph.views import TRANSPOSED

_answers: list[str | None] = []  # one question at a time: dynamo holds its lock while it traces


def seen_as(tensor: torch.Tensor, known: torch.Tensor) -> str | None:
    """What to append to the key of `known` to get the key of `tensor`: items, items of items, and `.mT`. None where
    `tensor` is no such view.

    "" is the whole tensor, as of `.data`, or of `.mT` of `.mT`. May only be called in traced code.
    """
    from torch._dynamo.comptime import comptime

    comptime(_compare)
    return _answer()


def _compare(context: Any) -> None:
    tensor, known = (context.get_local(name).as_fake() for name in ("tensor", "known"))
    _answers.append(_added(tensor, known))


def _added(tensor: Any, known: Any, so_far: str = "") -> str | None:
    if _geometry(tensor) == _geometry(known):
        return so_far
    if _geometry(tensor) == _geometry(known.mT):
        return so_far + TRANSPOSED
    place = (tensor.storage_offset() - known.storage_offset()) // max(known.stride(0), 1)
    if known.dim() < 3 or not 0 <= place < len(known):
        return None
    return _added(tensor, known[place], f"{so_far}.unbind(0)[{place}]")


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


def _answer() -> str | None:
    return _answers.pop()


# torch.compiler.assume_constant_result does this, and imports dynamo (2 s) to do it.
_answer._dynamo_marked_constant = True  # type: ignore[attr-defined]
