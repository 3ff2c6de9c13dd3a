"""Operators that take functions, which torch compiles by itself."""

import pytest
import torch
from torch import nn

import loka
from loka.core.exceptions import LokaError


def test_what_torch_compiles_by_itself_is_refused():
    """Where something looks on torch runs both branches as they are, and their parameters get no gradient."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return torch.cond(x.sum() > 0, self.one, self.other, (x,))

    model = nn.Sequential(nn.Linear(16, 16), Branches())
    x = torch.ones(32, 16)
    with loka.Probe(model, every=1), pytest.raises(LokaError, match="cannot look into `cond`, which 1 calls"):
        model(x)
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
