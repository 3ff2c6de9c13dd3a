"""FSDP2 for the dense part of a model, whose tables stay whole on every rank.

    weights but tables       rows shared out by `fully_shard`, gathered for a unit's forward and backward
    tables, sparse=True      a copy on each rank, updated by the mean of all ranks' sparse gradients

FSDP2 would gather a whole table to look up the rows of one batch, and takes no sparse gradients. So tables
are replicated, as under DistributedDataParallel: each rank needs the memory of all of them, and what goes
over the wire is the rows of a batch. Where that is too much, TorchRec shards tables.
A table with sparse=False is a dense weight, and sharded like one.
"""

from collections.abc import Iterable
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from loka.core.exceptions import LokaError
from loka.core.exchange import has_group
from loka.core.signature import child_path
from loka.distributed.replicas import require_alike
from loka.distributed.tables.lookups import TABLES
from loka.nn.fsdp_units import units_of
from loka.nn.unwrap import named_modules


def shard_dense(
    model: nn.Module, units: Iterable[nn.Module], *, device: str | torch.device, gather_in: torch.dtype | None
) -> nn.Module:
    """Shards `model` in place over all ranks, and moves it to `device`. A collective.

    Args:
        model: with the same weights on every rank: seed alike before building it. It lies on the CPU or the
            device; from the CPU it is moved a unit at a time.
        units: modules to gather one at a time, none with a table in it; what is in none is gathered at once.
        gather_in: what weights travel and compute in, bf16 say; None leaves them in their own dtype.

    Raises:
        LokaError: the ranks hold other weights, there is no process group, a unit has a table in it, modules of
            several units share a weight, or one is a scalar.
    """
    if not dist.is_initialized():
        raise LokaError("FSDP2 needs a process group", way_out="start it by torchrun")
    from torch.distributed.device_mesh import init_device_mesh  # it takes a while to import
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    units = list(units)
    names = {id(module): path for path, module in named_modules(model)}
    if with_tables := [names.get(id(unit), type(unit).__name__) for unit in units if sparse_tables(unit)]:
        raise LokaError(
            "these units hold tables with sparse gradients, which FSDP2 does not take",
            why=with_tables,
            way_out="make units of the modules beside the tables",
        )
    if unfit := _unfit(model, units):
        raise LokaError(
            "FSDP2 does not shard these weights so",
            why=unfit,
            way_out="DistributedDataParallel (--dense ddp) takes them; or make a scalar a parameter of one element, "
            "and one unit of all modules that share a weight",
        )
    require_alike(model)
    device = torch.device(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=gather_in,
        reduce_dtype=torch.float32 if gather_in else None,
        cast_forward_inputs=False,  # autocast casts what is multiplied, and nothing else
    )
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=set(sparse_tables(model)))
    return model.to(device)


def _unfit(model: nn.Module, units: list[nn.Module]) -> list[str]:
    """Scalar parameters, and parameters that modules of several units share; the model itself counts as a unit."""
    unit_of = dict.fromkeys(model.modules(), model)
    for unit in sorted(units, key=lambda unit: -len(list(unit.modules()))):  # an inner one last
        unit_of |= dict.fromkeys(unit.modules(), unit)
    held: dict[nn.Parameter, dict[nn.Module, str]] = {}
    for path, module in named_modules(model):
        for name, weight in module.named_parameters(recurse=False):
            held.setdefault(weight, {}).setdefault(unit_of[module], child_path(path, name))
    tables = set(sparse_tables(model))
    found = [f"{next(iter(by.values()))} is a scalar" for weight, by in held.items() if not weight.dim()]
    shared = [by.values() for weight, by in held.items() if len(by) > 1 and weight not in tables]
    return found + [f"{' and '.join(names)} are one weight" for names in shared]


def sparse_tables(model: nn.Module) -> list[nn.Parameter]:
    """The weights with sparse gradients, each once, in the order of modules."""
    found: dict[nn.Parameter, None] = {}  # a table may be shared
    for module in model.modules():
        if isinstance(module, TABLES) and module.sparse:
            found[cast(nn.Parameter, module.weight)] = None
    return list(found)


def replicated_tables(model: nn.Module) -> list[nn.Parameter]:
    """Tables whose gradients no engine averages: those outside of the units of FSDP2; none under other engines."""
    return sparse_tables(model) if is_sharded(model) else []


def is_sharded(model: nn.Module) -> bool:
    """Whether the model contains a unit of FSDP2."""
    return has_group() and bool(units_of(model))


def average_gradients(tables: list[nn.Parameter]) -> None:
    """Each table's sparse gradient becomes the mean over all ranks. A collective, once for each table.

    All ranks get the rows of all, in the order of ranks, so replicas stay equal bit for bit.
    """
    for table in tables:
        mine = table.grad
        rows, values = _rows_of(table, mine)
        counts = [torch.empty(1, dtype=torch.int64, device=table.device) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, torch.tensor([len(rows)], device=table.device))
        sizes = [int(count) for count in counts]
        if not max(sizes):
            continue
        every_row = _gathered(rows, sizes)
        every_value = _gathered(values / len(sizes), sizes)
        table.grad = torch.sparse_coo_tensor(every_row[None], every_value, table.shape, check_invariants=False)


def _rows_of(table: nn.Parameter, gradient: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices [n] and values [n, width] of a gradient, each row once; empty where there is no gradient."""
    if gradient is None:
        return table.new_empty(0, dtype=torch.int64), table.new_empty(0, table.shape[1])
    gradient = gradient.coalesce()
    return gradient.indices()[0], gradient.values()


def _gathered(mine: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    padded = mine.new_zeros(max(sizes), *mine.shape[1:])
    padded[: len(mine)] = mine
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
