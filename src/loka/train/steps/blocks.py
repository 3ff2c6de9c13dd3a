"""Which parts of a model are compiled, in place.

    blocks    each block of a container, each other child with layers in it; none with a table in it
    whole     where blocks hold less than half of the dense weights, as of a model whose layers are its own
              children, and no table has sparse gradients, which Inductor takes none of; and where TorchRec holds
              the zoo's tables

Blocks that repeat compile once, so a deep model compiles in the time of a shallow one, and single layers beside
them stay as they are. TorchRec's host is what a step waits for, and each part costs it some.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from loka.core.compiling import (
    allow_programs,
    compile_forward,
    compile_in_place,
    new_frame,
    run_as_written,
    runs_compiled,
)
from loka.distributed.dense_sharding import is_sharded
from loka.distributed.tables.embedding_bags import embedding_bags_in
from loka.distributed.tables.lookups import TABLES
from loka.distributed.tables.sharded_tables import sharded_modules

_PROGRAMS = 64  # blocks of one class with other candidates are other programs


def compiled(model: nn.Module, *, replayed: bool = False) -> nn.Module:
    """Compiles the parts of `model` in place; `replayed`, as `compile_in_place` has it."""
    allow_programs(_PROGRAMS)
    # Gradients of a part travel while the next one goes backward. DDPOptimizer would cut each part, and the
    # regions in it, where DistributedDataParallel's buckets end.
    torch._dynamo.config.optimize_ddp = False
    frame = new_frame()
    for part in compiled_parts(model):
        if part is model and not embedding_bags_in(model):  # a Probe's hook is on it, or somebody else's
            compile_forward(part, replayed=replayed)
        else:
            compile_in_place(part, frame, replayed=replayed)
    return model


def uncompiled(model: nn.Module) -> nn.Module:
    for part in list(filter(runs_compiled, model.modules())):
        run_as_written(part)
    return model


def compiled_parts(model: nn.Module) -> list[nn.Module]:
    """What `compiled` compiles."""
    whole = embedding_bags_in(model) or (_few_in_blocks(model) and not _apart(model))
    return [model] if whole else list(blocks_of(model))


def left_as_written(model: nn.Module) -> str | None:
    """Why most of the dense weights are not compiled, or None."""
    why = None if embedding_bags_in(model) or not _few_in_blocks(model) else _apart(model)
    return why and f"most of its layers run as written, as they are in no block and {why}: put them into a module"


def _few_in_blocks(model: nn.Module) -> bool:
    tables = {id(weight) for table in _tables(model) for weight in table.parameters(recurse=False)}
    dense = _count(weight for weight in model.parameters() if id(weight) not in tables)
    return 2 * _count(weight for block in blocks_of(model) for weight in block.parameters()) < dense


def _apart(model: nn.Module) -> str | None:
    """Why it cannot be compiled as one, or None."""
    if is_sharded(model):
        return "FSDP2 shards it"
    if sharded_modules(model):
        return "TorchRec shards its tables"
    return (
        "beside them are tables with sparse gradients"
        if any(t.sparse and t.weight.requires_grad for t in _tables(model))
        else None
    )


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """Each block of a container of blocks, each other child that has layers in it; none with a table."""
    for child in model.children():
        blocks = list(child.children()) if isinstance(child, nn.Sequential | nn.ModuleList) else []
        repeated = any(next(block.children(), None) is not None for block in blocks)
        for part in blocks if repeated else [child]:
            tables = sharded_modules(part) or next(_tables(part), None) is not None
            if not tables and next(part.children(), None) is not None:
                yield part


def _tables(module: nn.Module) -> Iterator[nn.Embedding | nn.EmbeddingBag]:
    return (part for part in module.modules() if isinstance(part, TABLES))


def _count(weights: Iterable[torch.Tensor]) -> int:
    return sum({id(weight): weight.numel() for weight in weights}.values())
