"""Models that hand out their own memory, have two names for a module, or read what was dropped."""

import pytest
import torch
from served import ROW, converted, plan_for
from torch import nn

from loka.core.exceptions import ServeRefused
from loka.serve import freeze, load


class _Towers(nn.Module):
    """x [B, 16] -> [B, 1]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.user = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.head(torch.relu(self.user(x)))


class _Siamese(_Towers):
    def __init__(self):
        super().__init__()
        self.item = self.user

    def forward(self, x):
        return self.head(torch.relu(self.user(x) * self.item(x.flip(1))))


class _Reusing(_Towers):
    def __init__(self):
        super().__init__()
        self.register_buffer("out", torch.zeros(64, 1), persistent=False)

    def forward(self, x):
        y = super().forward(x)
        return y if len(x) > 64 else self.out[: len(x)].copy_(y)


class _Norm(_Towers):
    def forward(self, x):
        y = super().forward(x)
        return y, (self.user[0].weight.norm() if x.abs().max() > 50 else y.new_zeros(())).expand(len(x))


def _rows(count, seed=1):
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))


def _served(model, **options):
    plan = plan_for(model, {"user.0": ROW, "user.2": ROW})
    return plan, freeze(model.eval(), plan, calibration=[_rows(64)], buckets=(16, 64), graphs=False, **options)


def test_a_module_of_two_names_is_loaded(tmp_path):
    model = _Siamese()
    _, server = _served(model)
    assert {"user.0.weight", "item.0.weight"} <= set(server.card.dropped)
    server.save(tmp_path)
    x = _rows(16, 2)
    assert torch.equal(load(tmp_path, _Siamese())(x).output, server(x).output)
    server.refresh(model.state_dict())
    assert torch.equal(load(tmp_path, _Siamese())(x).output, server(x).output)


def test_answers_are_the_callers_own():
    """Out of a buffer that the next request writes over: the answer of before, of both parts, and of a shadow."""
    model = _Reusing()
    plan, server = _served(model, shadow=1.0)
    low = converted(model, plan)
    first, x = server(_rows(16, 2)).output, _rows(128, 3)
    with torch.no_grad():
        assert torch.equal(server(x).output[:64], low(x[:64]).clone())
        assert torch.equal(server(x).output[64:], low(x[64:]).clone())
        assert torch.equal(first, low(_rows(16, 2)))
    assert server.card.answers[0].mean_abs > 0
    assert server.shadow().mean_abs > 0


def test_an_output_out_of_a_dropped_weight_is_refused():
    _, server = _served(_Norm())
    with pytest.raises(ServeRefused, match="no calibration row took"):
        server(100 * _rows(4))
