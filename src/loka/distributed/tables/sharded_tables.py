"""Tables sharded by TorchRec's DistributedModelParallel, trained in backward by fbgemm's row-wise AdaGrad.

    tables        table- or row-wise over the ranks, as TorchRec's planner places them
    dense part    a copy on each rank, gradients averaged by DistributedDataParallel inside of DMP

Rows learn by the equation of `loka.train.RowwiseAdagrad`, in the backward of their lookup. So there are no
column-wise shards, each of which would take the mean of squares over its own columns. What the ranks hold is
read from TorchRec's modules as ShardedTensors, which torch's distributed checkpoint cuts for other ranks.
"""

import math
import warnings
from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn

from loka.core.exceptions import LokaError, UnknownName, first_line, truncated
from loka.core.exchange import gather, ranks_of
from loka.core.signature import child_path
from loka.distributed.replicas import require_alike
from loka.distributed.tables.embedding_bags import quiet, torchrec, with_embedding_bags
from loka.nn.unwrap import named_modules, unwrap

Exchange = Literal["fp32", "fp16", "bf16", "fp8"]  # no int8: TorchRec would add its bytes up row-wise
EXCHANGES: tuple[str, ...] = get_args(Exchange)
_SHARDED = "ShardedEmbeddingBagCollection"  # its class is TorchRec's, which nothing here imports early


def shard_tables(
    model: nn.Module,
    *,
    device: str | torch.device,
    batch_size: int,
    lr: float,
    eps: float = 1e-8,
    exchange: Exchange = "fp32",
    placement: Any = None,
) -> nn.Module:
    """`model` in DistributedModelParallel over all ranks, its tables sharded with the values they have.

    A collective. The model is changed in place: the zoo's table becomes an EmbeddingBagCollection.

    Args:
        model: with the same weights on every rank, on the CPU or the device; each rank reads its shards out
            of whole tables, so the host has to hold these once for each rank at the start.
        batch_size: rows of a rank in a step, which the planner estimates with.
        lr: of row-wise AdaGrad; `FusedTables` changes it.
        exchange: how embeddings and their gradients travel between ranks.
        placement: a ShardingPlan of TorchRec's for `with_embedding_bags(model)`, the same on every rank; by
            default its planner's, which on CPUs knows table-wise sharding only.

    Raises:
        LokaError: no process group, tables that cannot be sharded, ranks with other weights, or an exchange
            that TorchRec does not have on this device; tables with an optimizer in their backward; each with the
            way out.
        MissingLibrary: TorchRec or fbgemm cannot be imported.
    """
    if not dist.is_initialized():
        raise LokaError("TorchRec needs a process group, of one rank too", way_out="start it by torchrun")
    # torch says it of every look at one, and TorchRec's state dicts hold nothing else.
    warnings.filterwarnings("ignore", ".*deprecating ShardedTensor", FutureWarning)
    device = torch.device(device)
    with_embedding_bags(model)
    _require_trained(model)
    codecs = _codecs(exchange, device, [table.embedding_dim for table in _tables_in(model)])
    if ranks_of() > 1:
        require_alike(model)
    embedding_bag = torchrec("torchrec.distributed.embeddingbag")
    optimizers = torchrec("fbgemm_gpu.split_embedding_configs").EmbOptimType
    fused = {"optimizer": optimizers.EXACT_ROWWISE_ADAGRAD, "learning_rate": lr, "eps": eps}
    sharder = embedding_bag.EmbeddingBagCollectionSharder(fused_params=fused, qcomm_codecs_registry=codecs)
    whole = {name: weight.detach() for name, weight in model.named_parameters()}
    with quiet():
        if placement is None:
            placement = _placed(model, sharder, device, batch_size)
        _require_rows(placement)
        wrapped: nn.Module = torchrec("torchrec.distributed").DistributedModelParallel(
            model, device=device, plan=placement, sharders=[sharder]
        )
    with torch.no_grad():
        for name, table in sharded_weights(wrapped).items():  # sharding draws tables anew
            for shard in table.local_shards():
                if whole[name].is_meta:  # a collection of the user's whose tables nobody made yet
                    continue
                begin, size = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                part = tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))
                shard.tensor.copy_(whole[name][part])
    return wrapped


_BY_ROWS = ("table_wise", "row_wise", "table_row_wise")  # each row whole on one rank
_KERNEL = "fused"


def _placed(model: nn.Module, sharder: Any, device: torch.device, batch_size: int) -> Any:
    """Where TorchRec's planner has tables lie. Each rank plans: where one cannot, none waits for it."""
    planner, types = torchrec("torchrec.distributed.planner"), torchrec("torchrec.distributed.planner.types")
    allowed = types.ParameterConstraints(sharding_types=list(_BY_ROWS), compute_kernels=[_KERNEL])
    memory: dict[str, int] = {}
    if device.type == "cuda":
        memory["hbm_cap"] = torch.cuda.get_device_properties(device).total_memory
    made = planner.EmbeddingShardingPlanner(
        topology=planner.Topology(world_size=ranks_of(), compute_device=device.type, **memory),
        batch_size=batch_size,
        constraints={table.name: allowed for table in _tables_in(model)},
    )
    try:
        found, reason = made.plan(model, [sharder]), ""
    except (types.PlannerError, RuntimeError) as error:
        found, reason = None, str(error)
    told = gather((reason or str(found)).encode(), None)
    if reason or len(set(told)) > 1:
        lines = [line.strip() for line in reason.splitlines() if line.strip()]
        raise LokaError(
            "TorchRec's planner finds no place for the tables, or not the same one on all ranks",
            why=truncated(lines, 8) or ["the ranks have other GPUs, or one of them found no place"],
            way_out="train on more ranks of one kind, or with smaller vocabularies (loka data convert)",
        )
    return found


def _require_rows(placement: Any) -> None:
    """Raises LokaError for a placement by which AdaGrad would take a mean over a part of a row, or by which
    no backward would train it."""
    others = [
        f"{path}.{name}: {where.sharding_type}, {where.compute_kernel}"
        for path, module in placement.plan.items()
        for name, where in module.items()
        if where.sharding_type not in _BY_ROWS or where.compute_kernel != _KERNEL
    ]
    if others:
        raise LokaError(
            "these tables would not learn by row-wise AdaGrad in their backward",
            why=others,
            way_out=f"place them by {', '.join(_BY_ROWS)}, with the compute kernel {_KERNEL!r}",
        )


def _require_trained(model: nn.Module) -> None:
    """Raises LokaError for frozen tables: fbgemm's backward does not ask; and for those that would be trained by
    an optimizer of their own."""
    kind = torchrec().EmbeddingBagCollection
    taken = [
        f"{path}.{name}: {', '.join(c.__name__ for c in weight._optimizer_classes)}".lstrip(".")
        for path, module in model.named_modules()
        if isinstance(module, kind)
        for name, weight in module.named_parameters()
        if getattr(weight, "_optimizer_classes", None)
    ]
    if taken:
        raise LokaError(
            "these tables have an optimizer in their backward, and would not learn by row-wise AdaGrad",
            why=taken,
            way_out="leave apply_optimizer_in_backward out, or train by a loop of your own",
        )
    frozen = [
        child_path(path, name)
        for path, module in model.named_modules()
        if isinstance(module, kind)
        for name, weight in module.named_parameters()
        if not weight.requires_grad
    ]
    if frozen:
        raise LokaError(
            "these tables are frozen, and TorchRec would train them",
            why=frozen,
            way_out="let them learn, or keep them in nn.EmbeddingBag, outside of the collection",
        )


def _tables_in(model: nn.Module) -> list[Any]:
    """Configurations of all tables that lie in a collection."""
    kind = torchrec().EmbeddingBagCollection
    found = [module for module in model.modules() if isinstance(module, kind)]
    return [table for module in found for table in module.embedding_bag_configs()]


def _codecs(exchange: str, device: torch.device, widths: Iterable[int]) -> Any:
    """What TorchRec encodes by; tried on a row, so that what a device lacks is said before training.

    A scale in FP8 is that of a looked-up row, or of the largest part of one that all tables have.
    """
    if exchange not in EXCHANGES:
        raise UnknownName(f"--qcomm {exchange!r} is not known", way_out=f"one of {', '.join(EXCHANGES)}")
    if exchange == "fp32":
        return None
    library = torchrec("torchrec.distributed.fbgemm_qcomm_codec")
    kind, width = library.CommType(exchange), math.gcd(*widths)
    row = {"fp8_quantize_dim": width, "fp8_quantize_dim_bwd": width} if exchange == "fp8" else {}
    config = library.QCommsConfig(forward_precision=kind, backward_precision=kind, **row)
    try:
        codec = library.get_qcomm_codecs(config).forward
        codec.encode(torch.zeros(2, width, device=device), codec.create_context())
    except (RuntimeError, NotImplementedError) as error:
        raise LokaError(
            f"embeddings cannot be exchanged in {exchange} on {device.type}",
            why=[f"TorchRec: {first_line(error)}"],
            way_out="--qcomm fp16 on CPUs, or leave --qcomm out; --device cuda where there is a GPU",
        ) from error
    return library.get_qcomm_codecs_registry(config, device=device)  # it warns of what it sends in 16 bits


def sharded_modules(model: nn.Module) -> dict[str, Any]:
    """TorchRec's sharded collections by their path in the bare model; none under other engines."""
    return {path: module for path, module in named_modules(model) if type(module).__name__ == _SHARDED}


def sharded_weights(model: nn.Module) -> dict[str, Any]:
    """Each sharded table as a ShardedTensor [V, dim] over all ranks, by the name of its parameter.

    Local shards are the memory that TorchRec trains; a rank without rows of a table has none.
    """
    return {
        child_path(path, name): table
        for path, module in sharded_modules(model).items()
        for name, table in module.state_dict().items()
    }


def sharded_states(model: nn.Module) -> dict[str, Any]:
    """What AdaGrad keeps of the tables that have rows on this rank: ShardedTensors [V], by "name/key"."""
    return {
        f"{path}.{name}/{key.rpartition('.')[2]}".lstrip("."): value
        for path, module in sharded_modules(model).items()
        for name, state in module.fused_optimizer.state_dict()["state"].items()
        for key, value in state.items()
    }


class FusedTables(torch.optim.Optimizer):
    """The rate of tables that learn in their backward, as an optimizer that a schedule can change.

    `zero_grad` hands the rate over, so it holds for the backward behind it. There is nothing to step, and the
    state lies with the tables (`sharded_states`): it begins at zero, as that of any new optimizer.
    """

    def __init__(self, model: nn.Module, *, lr: float) -> None:
        super().__init__([{"params": []}], {"lr": lr})
        self._fused = [module.fused_optimizer for module in sharded_modules(unwrap(model)).values()]
        for state in sharded_states(unwrap(model)).values():
            for shard in state.local_shards():
                shard.tensor.zero_()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self._fused:
            for group in optimizer.param_groups:
                group["lr"] = self.param_groups[0]["lr"]
            optimizer.zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Backward did it."""
