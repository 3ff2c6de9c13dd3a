"""Encoded rows on their way to batches, with what was replaced or skipped in each row.

Sources produce blocks of whatever length suits their storage; `into_batches` cuts them to the caller's
batch size. Counts travel per row, so an account never depends on how far a reader happened to read ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from loka.data.batch import Batch


@dataclass(frozen=True, kw_only=True)
class Block:
    """`dense` [n, D] float32, `sparse` [n, F] int64, `label` [n] float32, `counts` [n, reasons] int32."""

    dense: np.ndarray
    sparse: np.ndarray
    label: np.ndarray
    counts: np.ndarray

    def __len__(self) -> int:
        return self.label.shape[0]

    def rows(self, first: int, last: int) -> Block:
        """Rows [first, last) as views."""
        return Block(
            dense=self.dense[first:last],
            sparse=self.sparse[first:last],
            label=self.label[first:last],
            counts=self.counts[first:last],
        )


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
        merged = _merge(held)
        cut = 0
        while rows - cut >= batch_size:
            yield _hand_out(merged.rows(cut, cut + batch_size), totals)
            cut += batch_size
        held = [merged.rows(cut, rows)] if cut < rows else []
        rows -= cut
    if rows:
        yield _hand_out(_merge(held), totals)


def shard_range(rows: int, *, shard: int, shards: int) -> tuple[int, int]:
    """The rows [first, last) of one shard: contiguous, disjoint, sizes differing by at most one."""
    if shards < 1 or not 0 <= shard < shards:
        raise ValueError(f"shard={shard} of shards={shards}: need 0 <= shard < shards")
    return rows * shard // shards, rows * (shard + 1) // shards


def check_batching(batch_size: int, start: int) -> None:
    """Refuse a batch size below one and a negative start."""
    if batch_size < 1 or start < 0:
        raise ValueError(f"batch_size={batch_size}, start={start}: need batch_size >= 1 and start >= 0")


def _merge(blocks: list[Block]) -> Block:
    if len(blocks) == 1:
        return blocks[0]
    return Block(
        dense=np.concatenate([block.dense for block in blocks]),
        sparse=np.concatenate([block.sparse for block in blocks]),
        label=np.concatenate([block.label for block in blocks]),
        counts=np.concatenate([block.counts for block in blocks]),
    )


def _hand_out(block: Block, totals: np.ndarray) -> Batch:
    totals += block.counts.sum(axis=0, dtype=np.int64)
    # Copies: a batch that outlives its neighbours must not keep, or share, their whole block.
    return Batch(
        dense=torch.from_numpy(block.dense.copy()),
        sparse=torch.from_numpy(block.sparse.copy()),
        label=torch.from_numpy(block.label.copy()),
    )
