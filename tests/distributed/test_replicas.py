import torch
from ranks import on_ranks
from torch import nn

from loka.core.exceptions import LokaError
from loka.distributed.replicas import require_alike


def told_of(kind, rank):
    torch.manual_seed(rank if kind == "weights" else 0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Embedding(4, 2, device="meta"))
    model.register_buffer("mask", torch.tensor([True, kind != "buffer" or rank == 0]))
    model.register_buffer("turns", torch.tensor([1j, -1j if kind == "complex" and rank else 1j]))
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
