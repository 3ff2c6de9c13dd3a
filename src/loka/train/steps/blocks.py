"""Which parts of a model are compiled, in place.

    blocks    each block of a container, each other child with layers in it; none with a table in it
    whole     where blocks hold less than half of the dense weights, as of a model whose layers are its own
              children, tables included; and where TorchRec holds the zoo's tables

Blocks that repeat compile once, so a deep model compiles in the time of a shallow one, and single layers beside
them stay as they are. TorchRec's host is what a step waits for, and each part costs it some.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from loka.core.compiling import allow_programs, compile_in_place, new_frame, run_as_written
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
        compile_in_place(part, frame, replayed=replayed)
    return model


def uncompiled(model: nn.Module) -> nn.Module:
    for part in compiled_parts(model):
        run_as_written(part)
    return model


def compiled_parts(model: nn.Module) -> list[nn.Module]:
    """What `compiled` compiles. Where FSDP2 shards a model, or TorchRec a stranger's tables, no more than blocks."""
    blocks = list(blocks_of(model))
    tables = {id(weight) for table in _tables(model) for weight in table.parameters(recurse=False)}
    dense = [weight for weight in model.parameters() if id(weight) not in tables]
    few = 2 * _count(weight for block in blocks for weight in block.parameters()) < _count(dense)
    alone = is_sharded(model) or sharded_modules(model)
    return [model] if embedding_bags_in(model) or (few and not alone) else blocks


def sparse_inside(model: nn.Module) -> bool:
    """Whether what is compiled has tables with sparse gradients in it, which no CUDA graph can hold."""
    return any(table.sparse for part in compiled_parts(model) for table in _tables(part))


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
