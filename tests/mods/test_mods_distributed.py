"""Mods come before DistributedDataParallel and FSDP, which keep lists of parameters."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from loka import mods
from loka.core.exceptions import LokaError
from loka.nn.unwrap import unwrap

ALL = [mods.NoBias(), mods.BlockNorm(16), mods.HardSwish()]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def plain():
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.SiLU(), nn.Linear(32, 1))


def sharded(model, *units):
    mesh = init_device_mesh("cpu", (1,))
    for unit in units:
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def part_of(model):
    return sharded(nn.Sequential(model, nn.Linear(1, 1)))[0]


@pytest.mark.parametrize(
    ("distribute", "said"),
    [
        (DistributedDataParallel, "the model: DistributedDataParallel"),
        (lambda model: nn.Sequential(DistributedDataParallel(model)), "0: DistributedDataParallel"),
        (sharded, "the model: fully_shard"),
        (lambda model: nn.Sequential(sharded(model)), "0: fully_shard"),
        (lambda model: sharded(model, model[0], model[1]), "\n  1: fully_shard"),
        (part_of, "1.bias: a shard"),
        pytest.param(
            lambda model: FullyShardedDataParallel(model, device_id=CPU),
            "the model: FullyShardedDataParallel",
            marks=pytest.mark.filterwarnings("ignore"),  # of one rank: NO_SHARD, which is deprecated
        ),
    ],
    ids=["ddp", "ddp inside", "fsdp2", "fsdp2 inside", "fsdp2 units", "part of fsdp2", "fsdp1"],
)
def test_a_distributed_model_is_refused(distribute, said):
    """NoBias took parameters away that the engine waited for in the first or second backward."""
    model = distribute(plain())
    before = [name for name, _ in model.named_parameters()]
    with pytest.raises(LokaError, match="apply mods on every rank first") as refused:
        mods.apply(model, ALL)
    assert said in str(refused.value)
    assert [name for name, _ in model.named_parameters()] == before


@pytest.mark.parametrize("distribute", [DistributedDataParallel, sharded])
def test_mods_before_are_trained(distribute):
    """The way out that the error names."""
    model = plain()
    assert len(mods.apply(model, ALL).changed) == 4
    model = distribute(model)
    for _ in range(2):
        model(torch.randn(4, 8)).sum().backward()
    assert unwrap(model)[0].bias is None
    assert all(parameter.grad is not None for parameter in model.parameters())
