"""Which layers feed which, read off a sampled step."""

import dataclasses

import pytest
import torch
from torch import nn

import loka
from loka.core.records.stats import Stats
from loka.probe.merging import merge_stats


def links(model, *inputs, **settings):
    with loka.Probe(model, every=1, effect_samples=0, **settings) as probe:
        model(*inputs).float().square().mean().backward()
    return {path: layer.reads for path, layer in probe.stats().layers.items()}


class Net(nn.Module):
    """Two layers, and `between` their output and their input."""

    def __init__(self, between, *, last=8):
        super().__init__()
        self.first, self.last, self.between = nn.Linear(8, 8), nn.Linear(last, 4), between

    def forward(self, x):
        return self.last(self.between(self.first(x)))


SCALE = nn.Parameter(torch.ones(8))
TAKEN = {
    "nothing": lambda h: h,
    "gelu": nn.functional.gelu,
    "gate": lambda h: h * torch.sigmoid(h),
    "norm": nn.LayerNorm(8),
    "rms": nn.RMSNorm(8),
    "blocks": loka.nn.BlockNorm(8, block=4),
    "where": lambda h: torch.where(h > 0, h, h / 2),
    "sum over a row": lambda h: h / h.abs().sum(1, keepdim=True),
    "in place": lambda h: h.relu_(),
    "a parameter": lambda h: h * SCALE,
    "cast": lambda h: h.half().float(),
}
ENDS = {
    "cat": lambda h: torch.cat([h, h], 1)[:, :8],
    "softmax": lambda h: h.softmax(1),
    "transposed": lambda h: h.t().contiguous().t(),
    "detached": lambda h: h.detach(),
    "other rows": lambda h: h[:2],
    "rows of a half": lambda h: h.view(-1, 4),
    "matmul": lambda h: h @ torch.eye(8),
}


@pytest.mark.parametrize("between", TAKEN)
def test_code_that_a_region_takes_links(between):
    assert links(Net(TAKEN[between]), torch.randn(6, 8)) == {"first": (), "last": ("first",)}


@pytest.mark.parametrize("between", ENDS)
def test_other_code_ends_a_link(between):
    net = Net(ENDS[between], last=4 if "half" in between else 8)
    assert links(net, torch.randn(6, 8)) == {"first": (), "last": ()}


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down, self.out = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 1)

    def forward(self, x):
        x = x + self.down(self.up(x) * torch.sigmoid(self.gate(x)))
        return self.out(x)


def test_several_feed_one_and_one_feeds_several():
    found = links(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Residual()), torch.randn(3, 5, 8))
    assert found == {"0": (), "2.up": ("0",), "2.gate": ("0",), "2.down": ("2.gate", "2.up"), "2.out": ("0", "2.down")}


class Choosing(nn.Module):
    """Another layer feeds the last one in the second call."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.last, self.calls = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2), 0

    def forward(self, x):
        self.calls += 1
        a, b = self.a(x), self.b(x)
        return self.last(a if self.calls == 1 else b) + (a + b).sum() * 0


def test_links_of_steps_add_up_are_resumed_merged_and_saved(tmp_path):
    model, x = Choosing(), torch.randn(6, 8)
    parts = []
    for _ in range(2):
        with loka.Probe(model, every=1, effect_samples=0, resume=parts[0] if parts else None) as probe:
            model(x).sum().backward()
        parts.append(probe.stats())
    assert [part.layers["last"].reads for part in parts] == [("a",), ("a", "b")]
    parts[1].save(tmp_path)
    assert Stats.load(tmp_path).layers["last"].reads == ("a", "b")
    alone = dataclasses.replace(parts[0].layers["last"], reads=("b",))
    other = dataclasses.replace(parts[0], layers={**parts[0].layers, "last": alone})
    assert merge_stats([parts[0], other]).layers["last"].reads == ("a", "b")


def test_what_has_no_gradient_has_no_link():
    model = Net(nn.functional.relu)
    model.first.requires_grad_(False)
    assert links(model, torch.randn(6, 8)) == {"first": (), "last": ()}


def test_a_tower_of_hundreds_of_residuals_ends_somewhere():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            x = self.layers[0](x)
            for _ in range(600):
                x = x + torch.tanh(x)
            return self.layers[2](self.layers[1](x))

    found = links(Deep(), torch.randn(4, 8))
    assert found == {"layers.0": (), "layers.1": (), "layers.2": ("layers.1",)}


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_rows_are_probed_and_link_nothing(layout):
    """They tell no number of rows, and a strided one raises where it is asked for its sides."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    rows = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=layout)
    with loka.Probe(model, every=1, effect_samples=0) as probe:
        torch.cat(list(model(rows).unbind())).sum().backward()
    assert {path: (layer.rows, layer.reads) for path, layer in probe.stats().layers.items()} == {
        "0": (8, ()),
        "2": (8, ()),
    }
