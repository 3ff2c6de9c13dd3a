"""The reader that keeps a GPU fed: threads decode, shuffle and cut batches ahead of the model.

A `Store` is rows in groups on disk; `loka.data.order` says which come when. One task is one window of that
order: its groups are decoded, its rows gathered in their order straight into batches. Tasks are independent,
so they scale with cores, and a resumed run begins at the window that holds its next row. Memory: about
(workers + 2) windows, whatever the size of the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from loka.core.exceptions import DataRefused
from loka.data.batch import Batch, History, joined, tasks_of
from loka.data.block import Block, check_batching, merged, training_rows
from loka.data.content import identity_of
from loka.data.order import Order, Shuffle, order_of
from loka.data.workers import in_order, processors

# Beyond this many threads the cutting of batches, not the decoding, is what a reader waits for.
MOST_WORKERS = 16
# Part of `identity`: raise it whenever the same store gives other batches.
ORDER = 1


class Store(Protocol):
    """Encoded rows in groups, readable from several threads at once."""

    @property
    def group_rows(self) -> np.ndarray:
        """Rows of each group [G] int64."""
        ...

    @property
    def dense_features(self) -> int: ...

    @property
    def vocab_sizes(self) -> tuple[int, ...]: ...

    @property
    def history(self) -> History | None: ...

    @property
    def identity(self) -> str:
        """Changes when the rows or their encoding change."""
        ...

    def load(self, group: int, first: int, last: int) -> Block:
        """Rows [first, last) of a group, without counts; raises DataRefused with the file's name."""
        ...

    def account(self) -> dict[str, int]:
        """What was skipped or replaced when the store was made, and since."""
        ...


class Groups:
    """Files of `rows` rows in groups of `size` rows, the last group of each file with what is left of it.

    `rows_of` [G] int64 has the rows of each group.
    """

    def __init__(self, rows: Sequence[int], size: int) -> None:
        self._first = np.cumsum([0, *(-(-count // size) for count in rows)])
        parts = [np.minimum(size, count - np.arange(0, count, size)) for count in rows]
        self.rows_of = np.concatenate(parts).astype(np.int64)

    def locate(self, group: int) -> tuple[int, int]:
        """In which file a group lies, and which of that file's groups it is."""
        file = int(np.searchsorted(self._first, group, side="right")) - 1
        return file, group - int(self._first[file])


class Reader:
    """A `Source` over rows [first_row, first_row + rows) of a store, shuffled where `shuffle` has a seed.

    `workers` threads decode ahead; their number changes the speed, not the rows. With `pin` the batches lie
    in pinned memory, from which `Batch.to("cuda")` copies while the GPU computes. Of `world` ranks each reads
    its own `rows // world` rows; what cannot be shared out evenly is left out and in the account.
    `Dealt` shares the `parts` of a reader out to any number of ranks.
    """

    def __init__(
        self,
        store: Store,
        *,
        shuffle: Shuffle | None = None,
        first_row: int = 0,
        rows: int | None = None,
        workers: int | None = None,
        pin: bool = False,
        counts_store: bool = True,
    ) -> None:
        present = int(store.group_rows.sum())
        rows = present - first_row if rows is None else rows
        self._shuffle = shuffle or Shuffle()
        if first_row < 0 or rows < self._shuffle.world or first_row + rows > present:
            raise DataRefused(
                f"rows [{first_row}, {first_row + rows}) were asked for, for {self._shuffle.world} ranks",
                why=[f"there are {present} rows, and every rank needs one"],
                way_out="choose first_row and rows inside the data",
            )
        if workers is not None and workers < 1:
            raise ValueError(f"workers={workers}: need at least one")
        self._store, self._first, self._last = store, first_row, first_row + rows
        self.rows = rows // self._shuffle.world
        self.dense_features, self.vocab_sizes = store.dense_features, store.vocab_sizes
        self.history, self.tasks = store.history, tasks_of(store)
        self._workers = workers or min(processors(), MOST_WORKERS)
        self._pin = pin
        self._counts_store = counts_store

    @property
    def identity(self) -> str:
        """Of all epochs: a run carries its epoch in its step."""
        config = {
            "source": "Reader",
            "order": ORDER,
            "store": self._store.identity,
            "range": [self._first, self._last],
            **asdict(replace(self._shuffle, epoch=0)),
        }
        return identity_of(config)

    def at_epoch(self, epoch: int) -> Reader:
        """The same rows in the order of that epoch."""
        return self._shuffled(self._counts_store, epoch=epoch)

    def parts(self, count: int) -> tuple[Reader, ...]:
        """As many readers as ranks, each of its own rows; the first has the account of all."""
        return tuple(self._shuffled(self._counts_store and not rank, rank=rank, world=count) for rank in range(count))

    def _shuffled(self, counts_store: bool, **changes: int) -> Reader:
        return Reader(
            self._store,
            shuffle=replace(self._shuffle, **changes),
            first_row=self._first,
            rows=self._last - self._first,
            workers=self._workers,
            pin=self._pin,
            counts_store=counts_store,
        )

    def batches(self, batch_size: int, *, start: int = 0) -> Iterator[Batch]:
        """Batches `start`, `start` + 1, ...; windows before `start` are not read.

        The threads live as long as the iterator: closing it, an interrupt or an error ends them.
        """
        check_batching(batch_size, start)
        return self._batches(batch_size, start * batch_size)

    def account(self) -> dict[str, int]:
        """What the store counted when it was made, over all its rows, and the rows no rank reads.

        Of two readers of one store that `split` made, or of several `parts`, only the first has counts.
        """
        left_out = (self._last - self._first) % self._shuffle.world
        if not self._counts_store:
            return {}
        return {**self._store.account(), "rows left out of each epoch, ranks get equally many": left_out}

    @cached_property
    def _order(self) -> Order:
        return order_of(self._store.group_rows, first=self._first, last=self._last, shuffle=self._shuffle)

    def _batches(self, batch_size: int, position: int) -> Iterator[Batch]:
        order = self._order
        windows = range(order.window_of(position), len(order.window) - 1)

        def cut(window: int) -> list[Batch]:
            return self._cut(window, batch_size, max(position, int(order.start[window])))

        held: list[Batch] = []
        for parts in in_order(cut, windows, workers=self._workers, ahead=self._workers + 2):
            for part in parts:
                held.append(part)
                if sum(map(len, held)) == batch_size:
                    yield _joined(held, pin=self._pin)
                    held = []
        if held:
            yield _joined(held, pin=self._pin)

    def _cut(self, window: int, batch_size: int, position: int) -> list[Batch]:
        """The rows of a window from `position` on, cut where batches end."""
        order = self._order
        start, stop = int(order.start[window]), int(order.start[window + 1])
        block = merged([self._store.load(*piece) for piece in order.pieces(window)])
        rows = order.rows(window)
        parts = []
        while position < stop:
            end = min(position + batch_size - position % batch_size, stop)
            inside = slice(position - start, end - start)
            parts.append(_gathered(block, inside if rows is None else rows[inside], pin=self._pin))
            position = end
        return parts


def split(
    store: Store, *, holdout: float, shuffle: Shuffle | None = None, workers: int | None = None, pin: bool = False
) -> tuple[Reader, Reader]:
    """A training source, and one of the last `holdout` share of the rows in their stored order."""
    train = training_rows(int(store.group_rows.sum()), holdout=holdout)
    shuffle = shuffle or Shuffle()
    kept = replace(shuffle, seed=None, epoch=0)
    return (
        Reader(store, shuffle=shuffle, rows=train, workers=workers, pin=pin),
        Reader(store, shuffle=kept, first_row=train, workers=workers, pin=pin, counts_store=False),
    )


def _gathered(block: Block, rows: slice | np.ndarray, *, pin: bool) -> Batch:
    """The chosen rows in tensors of their own; ids become int64 on the way."""
    tensors = {}
    for name, array in block.arrays().items():
        if name == "counts":
            continue
        # mode="clip" lets numpy gather without a second copy; the indices are in range.
        chosen = array[rows] if isinstance(rows, slice) else array.take(rows, axis=0, mode="clip")
        dtype = torch.float32 if name in ("dense", "label") else torch.int64
        tensors[name] = torch.empty(chosen.shape, dtype=dtype, pin_memory=pin, device="cpu")
        np.copyto(tensors[name].numpy(), chosen)
    return Batch(**tensors)


def _joined(parts: list[Batch], *, pin: bool) -> Batch:
    return joined(parts).pinned() if pin and len(parts) > 1 else joined(parts)
