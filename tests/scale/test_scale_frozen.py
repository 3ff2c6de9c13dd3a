"""Weights with requires_grad=False: they are held, gathered and multiplied by, and nothing else."""

from dataclasses import replace

import pytest
import torch
from networks import across, exactly, network, row, tower


def frozen(*names, dtype=torch.float32):
    """A tower of four layers alike, of which `names` are frozen."""
    model = tower(depth=4)
    for name in names:
        model.get_submodule(name).to(dtype).requires_grad_(False)
    return model


@pytest.mark.slow
def test_frozen_weights_need_neither_gradients_nor_an_optimizer():
    """A quarter of the weights is frozen, and kept in float32 or in bf16."""
    one = 2048 * 2048 + 2048
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        found = across(frozen("0", dtype=dtype), gpus=(64,), groups=(8,))
        for engine, shards, buckets in (("ddp", 1, 2), ("fsdp2", 64, 1), ("hsdp/8", 8, 1)):
            memory = found.memory[f"64 {engine}"]
            assert memory["parameters"] == (3 * 4 + size) * one / shards
            assert memory["gradients"] == buckets * 3 * 4 * one / shards
            assert memory["optimizer"] == 2 * 3 * 4 * one / shards
    units = [across(frozen(*names), gpus=(8,)).memory["8 fsdp2"]["units"] for names in (("0", "2"), ("0", "2", "4"))]
    assert units == [2 * 2 * 2 * one, 2 * (2 + 1) * one], "two trained ones, or one and a frozen one in bf16"


def test_adam_moves_no_frozen_weights():
    """28 bytes for each element of three layers of four, at 1 GB/s: all else that computes is in both steps."""
    one = 2048 * 2048 + 2048
    slow = replace(network(inside=(1e-6, 1e9), launch=1e-6, memory=1), elementwise_share=exactly(1e-12))
    found = across(frozen("0"), network=slow, gpus=(8,))
    for engine, gather, shards in (("ddp", "-", 1), ("fsdp2", "bf16", 8)):
        parts = row(found, 8, engine, gather).bf16_parts
        sent = 16 * 3 * one / 1e3 if engine == "ddp" else 0  # bf16_compress_hook's casts
        assert parts.other + parts.exposed == pytest.approx(28 * 3 * one / shards / 1e3 + sent, rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["0.weight", "2.bias", "4"])
def test_gradients_of_frozen_weights_are_not_sent(name):
    """Gathers are as before; a unit that is frozen in part is reduced in part (`check_traced` holds that to be torch's
    own way), and HSDP's replicas send an eighth of that besides."""
    model, sent = tower(depth=4), {"ddp": [], "fsdp2": [], "hsdp/8": []}
    chosen = [p for n, p in model.named_parameters() if n == name or n.startswith(f"{name}.")]
    for needs in (True, False):
        for parameter in chosen:
            parameter.requires_grad_(needs)
        found = across(model, gpus=(64,), groups=(8,))
        for engine, sizes in sent.items():
            sizes.append(row(found, 64, engine, "-" if engine == "ddp" else "bf16").parts.sent)
    less = 2 * sum(p.numel() for p in chosen)
    assert {n: before - after for n, (before, after) in sent.items()} == {
        "ddp": less, "fsdp2": less, "hsdp/8": less * 9 / 8,
    }  # fmt: skip


def test_a_prediction_layer_alone_gains_nothing():
    assert row(across(torch.nn.Linear(2048, 1), gpus=(8,)), 8, "ddp", "-").speedup.high == 1
