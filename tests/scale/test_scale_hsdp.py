"""HSDP on many GPUs: what goes between nodes, what a GPU holds, and which groups and engines are refused."""

from __future__ import annotations

import pytest
from networks import across, network, row, tower

from loka.core.exceptions import LokaError, UnknownName


def test_hsdp_sends_between_nodes_what_a_card_holds() -> None:
    """Where nodes are far apart: FSDP2 sends weights twice and gradients once over all cards, HSDP shards of
    gradients, twice an eighth of 4 bytes for each parameter: 2 x 7 / 8 over 8 nodes."""
    model = tower()
    far = network(inside=(1e-6, 1e6), between=(1e-6, 0.05), launch=1e-6, memory=1e9)
    found = across(model, network=far, groups=(8, 16))
    assert [(r.gpus, r.engine) for r in found.rows if r.plain] == [
        (8, "ddp"), (8, "fsdp2"), (64, "ddp"), (64, "fsdp2"), (64, "hsdp/8"), (64, "hsdp/16"),
    ]  # fmt: skip
    flat, node, two = (row(found, 64, engine, "bf16") for engine in ("fsdp2", "hsdp/8", "hsdp/16"))
    n = sum(p.numel() for p in model.parameters())
    assert node.bf16_parts.wire == pytest.approx(2 * 2 * n / 8 * 7 / 8 / 50, rel=1e-3)
    assert flat.bf16_parts.wire > 1.2 * node.bf16_parts.wire
    assert node.bf16_parts.sent == pytest.approx(flat.bf16_parts.sent + 2 * n / 8, rel=1e-3)
    assert two.bf16_parts.wire > node.bf16_parts.wire
    assert found.memory["64 hsdp/8"]["parameters"] == pytest.approx(4 * n / 8)
    assert found.memory["64 hsdp/16"]["optimizer"] == pytest.approx(8 * n / 16)
    alone = across(model, engines=("hsdp",), gpus=(16,))
    assert {r.engine for r in alone.rows} == {"hsdp/8"}


def test_engines_that_there_are() -> None:
    with pytest.raises(UnknownName, match="one of ddp, fsdp2, hsdp"):
        across(engines=("fsdp",))
    with pytest.raises(LokaError, match="hsdp shards in groups"):
        across(engines=("ddp",), groups=(8,))
    with pytest.raises(LokaError, match="one of 2, 4, 8, 16, 32"):
        across(groups=(12,))
    with pytest.raises(LokaError, match="--group 8 on 8 GPUs in nodes of 8"):
        across(engines=("hsdp",), gpus=(8,))
