"""FLOPs of attention that is no site, of any heads, on any torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import flop_counter

import loka
from loka.graph.flops import flop_formulas

aten = torch.ops.aten


def _operands(heads=(4, 4), sides=(6, 9), widths=(8, 16)):
    query, key = (torch.empty(2, h, s, widths[0], device="meta") for h, s in zip(heads, sides, strict=True))
    value = torch.empty(2, heads[1], sides[1], widths[1], device="meta")
    return query, key, value


def test_as_torch_counts():
    query, key, value = _operands()
    out = torch.empty(2, 4, 6, 16, device="meta")
    for kind in ("flash_attention", "efficient_attention", "cudnn_attention"):
        forward = getattr(aten, f"_scaled_dot_product_{kind}")
        backward = getattr(aten, f"_scaled_dot_product_{kind}_backward")
        for op, given in ((forward, (query, key, value)), (backward, (out, query, key, value))):
            theirs = flop_counter.flop_registry[op](*given, out_val=out)
            assert flop_formulas()[op](*given, out_val=out) == theirs


def test_heads_that_share_keys():
    query, key, value = _operands(heads=(4, 2))
    counted = flop_formulas()[aten._scaled_dot_product_flash_attention](query, key, value, 0.0, True, out_val=None)
    assert counted == 2 * 2 * 4 * 6 * 9 * (8 + 16)


class _Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(32, 32 + 16 + 16)

    def forward(self, x):
        query, key, value = self.project(x).split([32, 16, 16], dim=-1)
        query, key, value = (each.unflatten(-1, (-1, 8)).transpose(1, 2) for each in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True).sum(dim=(1, 2, 3))


def test_a_probe_does_not_ask_torch(monkeypatch):
    """torch 2.11 takes shared keys for an error, in the middle of a step."""

    def refuse(*_, **__):
        pytest.fail("torch was asked")

    for op in list(flop_counter.flop_registry):
        if "_scaled_dot_product" in str(op):
            monkeypatch.setitem(flop_counter.flop_registry, op, refuse)
    model = _Grouped()
    with loka.Probe(model, every=1, effect_samples=0) as probe:
        model(torch.randn(4, 10, 32)).square().mean().backward()
    coverage = probe.stats().coverage
    assert any("attention" in rest.reason for rest in coverage.uncovered)
