"""How rows run through a module tree: with autocast as frozen, without gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loka.nn.unwrap import named_modules
from loka.serve.rows import Form


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Calls a module with the tensors of a request, the same from every thread."""

    form: Form
    autocast: torch.dtype | None

    @torch.no_grad()
    def __call__(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> Any:
        kind = tensors[0].device.type
        with torch.autocast(kind, dtype=self.autocast, enabled=self.autocast is not None):
            return self.form.call(module, tensors)


def written_attributes(module: nn.Module, call: Callable[[], Any]) -> list[str]:
    """Attributes and buffers that a call writes to, such as `tower.cache`: threads would share them."""

    def now() -> dict[str, tuple[int, int]]:
        return {
            f"{path}.{name}" if path else name: (id(value), value._version if isinstance(value, torch.Tensor) else 0)
            for path, part in named_modules(module)
            for held in (part.__dict__, part._buffers)
            for name, value in held.items()
        }

    held = [value for _, part in named_modules(module) for value in part.__dict__.values()]
    before = now()
    call()
    after = now()
    del held  # alive until now, so that no new object took over an id
    return sorted(name for name in after if before.get(name) != after[name])
