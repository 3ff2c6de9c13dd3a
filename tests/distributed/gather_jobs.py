import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from towers import LR, STEPS, loss_of, rows, width


def shard(model, units="layer", group=0, **options):
    """`group`: ranks over which HSDP shards."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    if group:
        mesh = init_device_mesh("cpu", (ranks // group, group), mesh_dim_names=("replicate", "shard"))
    if units == "layer":
        for layer in list(model.modules()):
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, **options)
    elif units == "group":  # one unit for all layers, beside the root's
        fully_shard([m for m in model.modules() if isinstance(m, nn.Linear)], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def trained(model, rank, steps=STEPS, first=0):
    optimizer = torch.optim.Adam(model.parameters(), LR)
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(model, *rows(step, rank, width(model)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


NAMES = {"0.weight", "2.weight", "4.weight", "6.weight"}
