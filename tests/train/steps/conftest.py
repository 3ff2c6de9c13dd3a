"""A stand-in for CUDA graphs, for tests of what is around them."""

from collections.abc import Callable

import pytest
import torch
from graphed_cases import Fake, module
from torch import nn


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Fake]:
    def install(model: nn.Module, optimizer: torch.optim.Optimizer) -> Fake:
        found = Fake(model, optimizer)
        monkeypatch.setattr(module, "record", found)
        monkeypatch.setattr(module, "_has_graphs", lambda device: True)
        return found

    return install
