"""Encoded rows on their way to batches, with what was replaced or skipped in each row.

Sources produce blocks of whatever length suits their storage; `into_batches` cuts them to the caller's
batch size. Counts travel per row, so an account never depends on how far a reader happened to read ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from loka.data.batch import Batch

MOST_IDS = 2**31
"""Of one column: ids have 32 bits on the way, and no table has more rows."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """`dense` [n, D] float32, `sparse` [n, F] int64, `label` [n] or [n, tasks] float32, `counts`
    [n, reasons] int32.

    With a history also `sequence` [n, L] int64 and `lengths` [n] int64. Ids may be int32 on the way.
    """

    dense: np.ndarray
    sparse: np.ndarray
    label: np.ndarray
    counts: np.ndarray
    sequence: np.ndarray | None = None
    lengths: np.ndarray | None = None

    def __len__(self) -> int:
        return self.label.shape[0]

    def rows(self, first: int, last: int) -> Block:
        """Rows [first, last) as views."""
        return Block(**{name: array[first:last] for name, array in self.arrays().items()})

    def arrays(self) -> dict[str, np.ndarray]:
        """The fields by name, without those that are absent."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: array for name, array in found.items() if array is not None}


def merged(blocks: Sequence[Block]) -> Block:
    """The rows of all blocks, one after the other."""
    if len(blocks) == 1:
        return blocks[0]
    parts = [block.arrays() for block in blocks]
    return Block(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def into_batches(blocks: Iterable[Block], *, batch_size: int, totals: np.ndarray) -> Iterator[Batch]:
    """Cut `blocks` to batches of `batch_size` rows, adding each batch's counts to `totals` [reasons] first.

    The last batch may be short. `totals` covers exactly the rows handed out.
    """
    held: list[Block] = []
    rows = 0
    for block in blocks:
        held.append(block)
        rows += len(block)
        if rows < batch_size:
            continue
        whole = merged(held)
        cut = 0
        while rows - cut >= batch_size:
            yield _hand_out(whole.rows(cut, cut + batch_size), totals)
            cut += batch_size
        held = [whole.rows(cut, rows)] if cut < rows else []
        rows -= cut
    if rows:
        yield _hand_out(merged(held), totals)


def shard_range(rows: int, *, shard: int, shards: int) -> tuple[int, int]:
    """The rows [first, last) of one shard: contiguous, disjoint, sizes differing by at most one."""
    if shards < 1 or not 0 <= shard < shards:
        raise ValueError(f"shard={shard} of shards={shards}: need 0 <= shard < shards")
    return rows * shard // shards, rows * (shard + 1) // shards


def training_rows(rows: int, *, holdout: float) -> int:
    """How many of `rows` rows come before the last share `holdout` of them, which is held out."""
    check_holdout(holdout)
    return rows - round(rows * holdout)


def check_holdout(holdout: float) -> None:
    if not 0.0 < holdout < 1.0:
        raise ValueError(f"holdout={holdout}: the held-out share lies strictly between 0 and 1")


def check_batching(batch_size: int, start: int) -> None:
    """Refuse a batch size below one and a negative start."""
    if batch_size < 1 or start < 0:
        raise ValueError(f"batch_size={batch_size}, start={start}: need batch_size >= 1 and start >= 0")


def _hand_out(block: Block, totals: np.ndarray) -> Batch:
    totals += block.counts.sum(axis=0, dtype=np.int64)
    arrays = block.arrays()
    del arrays["counts"]
    # Copies: a batch that outlives its neighbours must not keep, or share, their whole block.
    return Batch(**{name: torch.from_numpy(array.copy()) for name, array in arrays.items()})
