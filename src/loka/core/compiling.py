"""torch.compile of a module in its place, whatever its class.

`module.compile()` does nothing for an nn.Sequential: dynamo skips the frames of torch.nn itself, unless a
frame that it compiles calls them, and then compiles what other classes it finds inside one by one (torch 2.11
and 2.13). A baseline made so runs linear layers and activations eagerly, and no norm is fused with what
follows it.

Dynamo keeps and counts what it compiles by code object, and runs a frame as written from the ninth time on
that it would compile it. So each module gets a frame of its own, or shares one with those that are given the
same: blocks that repeat compile once.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch
from torch import nn

Module = TypeVar("Module", bound=nn.Module)


_numbers = itertools.count()


def compile_in_place(module: Module, frame: CodeType | None = None) -> Module:
    """The same module, whose calls run compiled for the shapes they see; `forward` and hooks stay its own.

    `frame`: of `new_frame`, for modules that may share what is compiled; one of its own without.
    """
    module._compiled_call_impl = compiled_call(module, frame)
    return module


def compiled_call(module: nn.Module, frame: CodeType | None = None) -> Callable[..., Any]:
    """What calls the module compiled, for the shapes it sees; the module itself stays as it is."""
    call = _call_of(module)
    keep_reductions_apart()
    own = FunctionType(frame or new_frame(), call.__globals__, closure=call.__closure__)
    return torch.compile(own, dynamic=False)


def keep_reductions_apart() -> None:
    """Before torch 2.13, Inductor is to fuse no reductions of two directions (`triton.mix_order_reduction`).

    It does so where one reads what the other adds up: a model's outputs in bf16 were 42 % off, without a word
    (torch 2.11 on an H200, docs/log.md); torch 2.13 asks. TORCHINDUCTOR_MIX_ORDER_REDUCTION, where set, decides.
    """
    from torch._inductor import config  # here, so that `import loka` loads no compiler

    if torch.__version__ < "2.13" and "TORCHINDUCTOR_MIX_ORDER_REDUCTION" not in os.environ:
        config.triton.mix_order_reduction = False


def new_frame() -> CodeType:
    """The code of a call of a module, which dynamo knows nothing of yet."""
    return _call_of(nn.Identity()).__code__.replace(co_name=f"call_{next(_numbers)}")


def run_as_written(module: Module) -> Module:
    """Undoes `compile_in_place`."""
    module._compiled_call_impl = None
    return module


def _call_of(module: nn.Module) -> FunctionType:
    """A frame of this file, which dynamo does not skip."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    assert isinstance(call, FunctionType)
    return call
