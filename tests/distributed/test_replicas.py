import torch
from ranks import on_ranks
from torch import nn

from loka.core.exceptions import LokaError
from loka.distributed.dense_sharding import _unfit
from loka.distributed.replicas import require_alike, sum_of_bits


def told_of(kind, rank):
    torch.manual_seed(rank if kind == "weights" else 0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Embedding(4, 2, device="meta"))
    model.register_buffer("mask", torch.tensor([True, kind != "buffer" or rank == 0]))
    model.register_buffer("turns", torch.tensor([1j, 2j if kind == "complex" and rank else 1j]))
    try:
        require_alike(model)
    except LokaError as error:
        return error.why
    return ()


def on_rank(rank, folder):
    return {kind: told_of(kind, rank) for kind in ("alike", "weights", "buffer", "complex")}


def test_ranks_that_hold_others_are_named(tmp_path):
    """FSDP2 leaves each rank its own buffers; of a table on "meta", which TorchRec makes, there is nothing to tell."""
    for found in on_ranks(on_rank, 2, tmp_path):
        assert found["alike"] == ()
        assert found["weights"] == ("rank 1: 0.bias", "rank 1: 0.weight")
        assert found["buffer"] == ("rank 1: mask",)
        assert found["complex"] == ("rank 1: turns",)


def test_the_sum_of_bits_tells_values_and_their_places():
    """Also those of several pieces of a million."""
    held = torch.zeros(5, (1 << 20) + 2, dtype=torch.uint8)
    for row, place in enumerate((0, 1, 1 << 20, (1 << 20) + 1)):
        held[row, place] = 1
    assert len({sum_of_bits(row) for row in held}) == 5


def test_which_weights_units_share():
    block, other, model = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Module()
    model.blocks = nn.ModuleList([block, other, block])  # one module, one unit
    assert not _unfit(model, [block, other])
    assert not _unfit(model, [block, other, other[0]])
    other[0].weight = block.weight
    assert _unfit(model, [block, other]) == ["blocks.0.weight and blocks.1.0.weight are one weight"]
    assert not _unfit(model, [])
    model.temperature = nn.Parameter(torch.tensor(1.0))
    assert _unfit(model, []) == ["temperature is a scalar"]
