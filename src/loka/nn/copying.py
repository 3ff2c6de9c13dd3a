"""A copy of a model that shares nothing with it, and what such a copy still reads of the original.

`copy.deepcopy` copies what a module holds, but no functions: a lambda or a hook over `self` goes on reading the
original. And a list or object that holds a view of a weight still holds the old numbers after new weights are
loaded.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loka.core.exceptions import LokaError, first_line
from loka.core.signature import child_path
from loka.nn.unwrap import named_modules


def private_copy(model: nn.Module, *, refused: type[LokaError] = LokaError) -> tuple[nn.Module, list[str]]:
    """A copy, and the tensors that it holds as views of weights, of which no state dict knows.

    Raises `refused` where it cannot be copied.
    """
    memo: dict[int, Any] = {}
    try:
        with _WithoutGraphs():
            copied = copy.deepcopy(model, memo)
    except Exception as error:  # whatever the user's classes raise
        raise refused(
            "this model cannot be copied",
            why=[first_line(error)],
            way_out="keep locks, files and the like outside of it, or give their class a __deepcopy__",
        ) from error
    return copied, _views(model, memo.get(id(memo), []))  # where deepcopy keeps what it has copied


def read_of(original: nn.Module, call: Callable[[], object]) -> list[str]:
    """Names of the tensors of the state dict of `original` that operations of `call` take.

    Compiled functions run as they are written in it: what their kernels read, nobody sees.
    """
    reading = _Reading(original)
    with torch.compiler.set_stance("force_eager"), reading:
        call()
    return sorted(reading.found)


class _Reading(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.found: set[str] = set()
        self._memory = _memory(original)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for value in tree_leaves((args, kwargs or {})):
            if _has_memory(value):
                key = self._memory.get(value.untyped_storage().data_ptr())
                if key is not None:
                    self.found.add(key)
        return func(*args, **(kwargs or {}))


def _memory(model: nn.Module) -> dict[int, str]:
    """Keys of the state dict by the memory that their tensors lie in."""
    held = model.state_dict(keep_vars=True).items()
    return {tensor.untyped_storage().data_ptr(): key for key, tensor in held if _has_memory(tensor)}


def _has_memory(value: Any) -> bool:
    """Not of subclasses, which may keep theirs elsewhere."""
    plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided
    return plain and not value.is_meta and value.numel() > 0


def _views(model: nn.Module, copied: list[Any]) -> list[str]:
    memory, known, names = _memory(model), set[int](), dict[int, str]()
    for path, module in named_modules(model):
        own = dict(module._parameters.items())  # a scripted module's are no mapping
        known |= {id(value) for value in own.values()}
        known |= {id(b) for name, b in module._buffers.items() if name not in module._non_persistent_buffers_set}
        for name, value in [*vars(module).items(), *module._buffers.items()]:
            if f"{name}_orig" in own:
                known.add(id(value))  # torch's old spectral norm makes it anew before each forward
            names[id(value)] = child_path(path, name)
    found = []
    for value in copied:
        if _has_memory(value) and id(value) not in known:
            key = memory.get(value.untyped_storage().data_ptr())
            if key is not None:
                found.append(f"{names.get(id(value), 'a tensor inside of an attribute')} is a view of {key}")
    return found


class _WithoutGraphs(TorchFunctionMode):
    """Copies tensors that have a graph, which torch does not, without it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))
