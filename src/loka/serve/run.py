"""How rows run through a module tree: with autocast as frozen, without gradients."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loka.serve.rows import Form


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Calls a module with the tensors of a request, the same from every thread.

    Raises NotImplementedError or RuntimeError where it computes with a weight that is on the meta device."""

    form: Form
    autocast: torch.dtype | None

    @torch.no_grad()
    def __call__(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> Any:
        kind = tensors[0].device.type
        checked = (
            _WithoutMeta() if isinstance(module, nn.Module) else nullcontext()
        )  # the compiler checks what it traces
        with checked, torch.autocast(kind, dtype=self.autocast, enabled=self.autocast is not None):
            return self.form.call(module, tensors)


class _WithoutMeta(TorchDispatchMode):
    """Torch's GEMMs take a weight on the meta device beside rows on any, and answer with whatever memory holds."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(isinstance(value, torch.Tensor) and value.is_meta for value in tree_leaves((args, kwargs or {}))):
            raise NotImplementedError(f"{func} takes a tensor on the meta device")
        return func(*args, **(kwargs or {}))
