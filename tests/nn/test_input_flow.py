"""Which linear layers read one tensor, and whose output has to be contiguous."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import loka
from loka.core.shared_input import Branch, SharedInput
from loka.nn.dataflow import find_chains

Call = Callable[["Net", torch.Tensor], torch.Tensor]


class Net(nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(16, 32, bias=False)
        self.c, self.head = nn.Linear(16, 12), nn.Linear(16, 2)
        self.act = nn.ReLU()
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self, x)


def names(call: Call) -> list[str]:
    return [group.name for group in find_chains(Net(call), torch.randn(5, 16)).shared]


def test_layers_that_read_one_tensor() -> None:
    def gated(net: Net, x: torch.Tensor) -> torch.Tensor:
        hidden = net.act(net.a(x)) * net.b(x)
        return hidden.sum() + net.head(x).sum() + net.c(x * 1).sum()

    model = Net(gated)
    (group,) = find_chains(model, torch.randn(5, 16)).shared
    branches = Branch(path="a", out_features=32, bias=True), Branch(path="b", out_features=32, bias=False)
    assert group == SharedInput(in_features=16, branches=branches)  # a prediction layer is in none


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda n, x: n.a(x).sum() + n.b(x).sum() + n.c(x).sum(), ["a+b+c"]),
        (lambda n, x: n.a(x).sum() + n.b(x + 0).sum() + n.c(x).sum(), ["a+c"]),
        (lambda n, x: n.a(x).sum() + n.b(x.add_(1)).sum() + n.c(x).sum(), ["b+c"]),
        (lambda n, x: n.a(x).sum() + n.b(x).sum() + n.a(x).sum(), []),
        (lambda n, x: n.a(x).sum() + n.b(x[:]).sum(), []),
        (lambda n, x: n.a(input=x).sum() + n.b(x).sum(), ["a+b"]),
    ],
)
def test_the_same_object_unchanged_and_once(call: Call, expected: list[str]) -> None:
    assert names(call) == expected


def test_under_one_state_and_in_one_dtype() -> None:
    def cast(net: Net, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            first = net.a(x).sum()
        return first + net.b(x).sum() + net.c(x).sum()

    assert names(cast) == ["b+c"]
    model = Net(lambda n, x: n.a(x).sum() + n.b(x).sum())
    model.b.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert not find_chains(model, torch.randn(5, 16)).shared


@pytest.mark.parametrize(
    ("look", "dense"),
    [
        (lambda y: y.view(3, 2, 4, 8), False),
        (lambda y: y.view(6, 32).unflatten(1, (4, 8)).transpose(1, 2), False),
        (lambda y: y.flatten(0, 1), False),
        (lambda y: y.transpose(0, 1).reshape(2, 3, 2, 16), False),
        (lambda y: y.view(-1), True),
        (lambda y: y.view(3, -1), True),
        (lambda y: y.flatten(), True),
        (lambda y: torch.reshape(y, (12, 16)), True),
        (lambda y: y.view(6, 4, 8).view(24, 8), True),
        (lambda y: y[1].view(64), True),
        (lambda y: (y + 1).view(-1), False),
    ],
)
def test_views_that_columns_allow(look: Callable[[torch.Tensor], torch.Tensor], dense: bool) -> None:
    model = Net(lambda n, x: n.a(x).sum() + look(n.b(x)).sum())
    (group,) = find_chains(model, torch.randn(3, 2, 16)).shared
    assert [branch.dense for branch in group.branches] == [False, dense]
    columns = torch.randn(3, 2, 40)[..., 4:36]
    try:  # where view raises, reshape and flatten copy
        alias = look(columns).untyped_storage().data_ptr() == columns.untyped_storage().data_ptr()
    except RuntimeError:
        alias = False
    assert not (dense and alias)


def test_the_probe_records_them_and_statistics_keep_them(tmp_path: Path) -> None:
    model = Net(lambda n, x: n.a(x).sum() + n.b(x).sum() + n.c(x).sum())
    with loka.Probe(model, every=1) as probe:
        model(torch.randn(8, 16)).backward()
    stats = probe.stats()
    assert [group.name for group in stats.shared] == ["a+b+c"]
    stats.save(tmp_path)
    assert loka.Stats.load(tmp_path).shared == stats.shared
    assert stats.for_inference().shared == stats.shared
    with loka.Probe(model, every=1, resume=stats) as again:
        pass
    assert again.stats().shared == stats.shared
