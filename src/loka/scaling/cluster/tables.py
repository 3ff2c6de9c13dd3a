"""Embedding tables of a step on many GPUs: what is looked up, and what is exchanged.

    forward       ids to the tables, behind compute; lookups; an all-to-all of pooled embeddings, for tables
                  sharded by rows a reduce-scatter
    backward      an all-to-all, an all-gather of their gradients; row-wise AdaGrad on what was looked up
    2D            this in groups of GPUs, each with all tables; every k steps DMPCollection's all-reduces of
                  weights and of AdaGrad's state, over replicas that follow one another, as is its default

A step waits for the GPU that holds the most, which looks up for the rows of all GPUs (placement.py).
"""

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from loka.core.exceptions import LokaError
from loka.core.records.network import Network, Op
from loka.scaling.cluster.collectives import Wire, spread
from loka.scaling.cluster.placement import PLACERS, Placer, by_rows, by_size, by_torchrec

QComm = Literal["fp32", "bf16", "fp8"]
_BYTES: dict[str, float] = {"fp32": 4, "bf16": 2, "fp8": 1}
_ID = 8  # int64


@dataclass(frozen=True, kw_only=True)
class Tables:
    """`shapes`: rows and width of each, in float32; `ids`: that a sample looks up in each, in the mean;
    `qcomm`: how embeddings and their gradients travel, on both sides of a comparison; `by`: who places them;
    `group`: GPUs that share them, 0: all; replicas of groups are made equal `every` so many steps."""

    shapes: tuple[tuple[int, int], ...]
    ids: float = 1.0
    qcomm: QComm = "bf16"
    by: Placer = "size"
    group: int = 0
    every: int = 0

    def __post_init__(self) -> None:
        if not self.shapes or not 0 < self.ids < math.inf or min(min(shape) for shape in self.shapes) < 1:
            raise LokaError(
                f"there are {len(self.shapes)} tables, with {self.ids:g} ids a sample",
                way_out="one table or more, each with rows and width, and ids above 0",
            )
        if self.qcomm not in _BYTES:
            raise LokaError(f"--qcomm {self.qcomm!r} is not known", way_out=f"one of {', '.join(_BYTES)}")
        if self.by not in PLACERS:
            raise LokaError(f"--tables-by {self.by!r} is not known", way_out=f"one of {', '.join(PLACERS)}")
        if (self.group > 0) != (self.every > 0):
            raise LokaError(
                f"--table-group is {self.group} and --sync-every {self.every}: one does nothing without the other",
                way_out="give both: how many GPUs share tables, and the steps between two all-reduces of replicas",
            )


@dataclass(frozen=True)
class Exchange:
    """Of the GPU that holds the most, in a step: bytes of its tables, wires, and bytes of memory. `sync`: of
    replicas, `every` so many steps; `how` tables lie."""

    held: float
    ids: Wire
    pooled: Wire
    summed: Wire
    looked_up: float
    updated: float
    sync: tuple[Wire, ...]
    every: int
    how: str


def exchange(
    tables: Tables, ranks: int, batch_size: int, network: Network | None = None, capacity: float = 0
) -> Exchange:
    """`batch_size`: rows of each GPU. TorchRec's planner wants the network and `capacity`, a GPU's bytes."""
    shard = tables.group if 0 < tables.group < ranks else ranks
    stride = ranks // shard
    if tables.by != "torchrec":
        load = (by_size if tables.by == "size" else by_rows)(tables.shapes, shard)
    else:
        assert network is not None
        local = spread(shard, stride, network.gpus_per_node)[1]
        asked: Any = {"ids": tables.ids, "batch_size": batch_size, "network": network, "capacity": capacity}
        load = by_torchrec(tables.shapes, shard, local, **asked)
    rows = shard * batch_size
    gathered = rows * tables.ids
    size = _BYTES[tables.qcomm]
    out = load.pooled + load.summed

    def sent(op: Op, size: float) -> Wire:
        return Wire(op, size, ranks=shard, stride=stride)

    state = (load.weights, load.momentum) if stride > 1 else ()
    return Exchange(
        held=load.weights + load.momentum,
        ids=sent("all_to_all", gathered * load.lists * _ID),
        pooled=sent("all_to_all", rows * load.pooled * size),
        summed=sent("reduce_scatter", rows * load.summed * size),
        looked_up=gathered * (load.read * 4 + load.lists * _ID) + rows * out * (4 + size),
        # A row's gradient is read; the row and its momentum are read and written.
        updated=rows * out * size + gathered * (8 * load.read + 8 * load.lists),
        sync=tuple(Wire("all_reduce", bytes, ranks=stride) for bytes in state),
        every=tables.every,
        how=load.how,
    )


def parsed(text: str) -> tuple[tuple[int, int], ...]:
    """ "26x1000000x128" as 26 tables of a million rows of 128. Raises LokaError for another text."""
    found = re.fullmatch(r"(\d{1,5})x(\d{1,12})x(\d{1,6})", text)
    if found is None:
        raise LokaError(
            f"--table {text!r} describes no tables", way_out="number x rows x width, such as 26x1000000x128"
        )
    count, rows, width = map(int, found.groups())
    return ((rows, width),) * count
