"""torch.compile of a module in its place, whatever its class.

`module.compile()` does nothing for an nn.Sequential: dynamo skips the frames of torch.nn itself, unless a
frame that it compiles calls them, and then compiles what other classes it finds inside one by one (torch 2.11
and 2.13). A baseline made so runs linear layers and activations eagerly, and no norm is fused with what
follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def compile_in_place(module: Module) -> Module:
    """The same module, whose calls run compiled for the shapes they see; `forward` and hooks stay its own."""
    module._compiled_call_impl = torch.compile(_call_of(module), dynamic=False)
    return module


def run_as_written(module: Module) -> Module:
    """Undoes `compile_in_place`."""
    module._compiled_call_impl = None
    return module


def _call_of(module: nn.Module) -> Callable[..., Any]:
    """A frame of this file, which dynamo does not skip."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return call
