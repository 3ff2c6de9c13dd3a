"""Embedding tables of a step on many GPUs: where they lie, what is looked up, and what is exchanged.

    placement     table-wise: the largest first, each to the GPU that holds the fewest bytes so far
    forward       ids to the tables, behind compute; lookups; an all-to-all of pooled embeddings
    backward      an all-to-all of their gradients; row-wise AdaGrad on the rows that were looked up

A step waits for the GPU that holds the most, which looks up for the rows of all GPUs. With more GPUs than
tables that share does not fall any more: TorchRec's planner, which is not asked here, may shard rows then.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from loka.core.exceptions import LokaError
from loka.scaling.cluster.collectives import Wire

QComm = Literal["fp32", "bf16", "fp8"]
_BYTES: dict[str, float] = {"fp32": 4, "bf16": 2, "fp8": 1}
_ID = 8  # int64


@dataclass(frozen=True, kw_only=True)
class Tables:
    """`shapes`: rows and width of each, in float32; `ids`: that a sample looks up in each, in the mean;
    `qcomm`: how embeddings and their gradients travel, on both sides of a comparison."""

    shapes: tuple[tuple[int, int], ...]
    ids: float = 1.0
    qcomm: QComm = "bf16"

    def __post_init__(self) -> None:
        if not self.shapes or not self.ids > 0 or min(min(shape) for shape in self.shapes) < 1:
            raise LokaError(
                f"{len(self.shapes)} tables with {self.ids:g} ids a sample",
                way_out="one table or more, each with rows and width, and ids above 0",
            )
        if self.qcomm not in _BYTES:
            raise LokaError(f"--qcomm {self.qcomm!r}", way_out=f"one of {', '.join(_BYTES)}")


@dataclass(frozen=True)
class Exchange:
    """Of the GPU that holds the most, in a step: bytes of its tables, wires, and bytes of memory."""

    held: float
    ids: Wire
    pooled: Wire
    looked_up: float
    updated: float


def exchange(tables: Tables, ranks: int, batch_size: int) -> Exchange:
    """`batch_size`: rows of each GPU."""
    held, widths, count = _most(tables.shapes, ranks)
    rows = ranks * batch_size
    gathered = rows * tables.ids
    size = _BYTES[tables.qcomm]
    return Exchange(
        held=held,
        ids=Wire("all_to_all", gathered * count * _ID),
        pooled=Wire("all_to_all", rows * widths * size),
        looked_up=gathered * (widths * 4 + count * _ID) + rows * widths * (4 + size),
        # A row's gradient is read; the row and its momentum are read and written.
        updated=rows * widths * size + gathered * (8 * widths + 8 * count),
    )


def _most(shapes: Sequence[tuple[int, int]], ranks: int) -> tuple[float, int, int]:
    """Bytes with row-wise momentum, widths and tables, each of the GPU that has the most of it."""
    gpus = [(0, gpu, 0, 0) for gpu in range(min(ranks, len(shapes)))]
    for rows, width in sorted(shapes, key=lambda shape: -shape[0] * (shape[1] + 1)):
        size, gpu, widths, count = heapq.heappop(gpus)
        heapq.heappush(gpus, (size + 4 * rows * (width + 1), gpu, widths + width, count + 1))
    sizes, _, widest, counts = zip(*gpus, strict=True)
    return float(max(sizes)), max(widest), max(counts)


def parsed(text: str) -> tuple[tuple[int, int], ...]:
    """ "26x1000000x128" as 26 tables of a million rows of 128. Raises LokaError for another text."""
    found = re.fullmatch(r"(\d{1,5})x(\d{1,12})x(\d{1,6})", text)
    if found is None:
        raise LokaError(f"--table {text!r}", way_out="number x rows x width, such as 26x1000000x128")
    count, rows, width = map(int, found.groups())
    return ((rows, width),) * count
