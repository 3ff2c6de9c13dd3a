"""Runs rows through a module tree: with the autocast that was frozen, and without gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loka.serve.card import Card
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


def runner_of(card: Card) -> Runner:
    """Runs rows as the model of `card` was frozen to."""
    return Runner(form=card.form, autocast=None if card.autocast is None else getattr(torch, card.autocast))
