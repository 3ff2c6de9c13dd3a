"""Rows of a run of several ranks, shared out anew when it goes on with another number of them.

    the rows lie in P parts of n rows each: P is the number of ranks that the run began with
    step s is rows [s B, (s + 1) B) of every part, one part behind the other: P B rows
    rank r of R takes [r b, (r + 1) b) of these,  b = P B / R

So a step has the same rows whatever the number of ranks, as long as a rank's batch is chosen for it: after s
steps it is known which rows were trained on, none is read twice and none is passed over. A rank reads the
parts that its rows lie in, so where R is P it reads its own part and nothing else. What the last step of an
epoch cannot share out evenly, fewer than R rows, is left out.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from loka.core.exceptions import DataRefused
from loka.data.batch import Batch, Source, at_epoch, history_of, joined, rows_of, tasks_of


class Dealt:
    """A `Source` of what rank `rank` of `ranks` reads of `parts`, which are the same on all ranks.

    Raises DataRefused where parts have different numbers of rows, or there are fewer rows than ranks.
    """

    def __init__(self, parts: Sequence[Source], *, rank: int, ranks: int) -> None:
        if not 0 <= rank < ranks:
            raise ValueError(f"rank={rank} of ranks={ranks}: need 0 <= rank < ranks")
        sizes = {part.rows for part in parts}
        if len(sizes) != 1:
            raise DataRefused(
                f"{len(parts)} parts of {sorted(sizes)} rows: a step takes equally many of each",
                way_out="parts of as many rows, such as Reader.parts makes",
            )
        self.parts, self._rank, self._ranks = tuple(parts), rank, ranks
        self.all_rows = sizes.pop() * len(parts)  # of all ranks together, with those that are left out
        self.rows = self.all_rows // ranks
        if self.all_rows < ranks:
            raise DataRefused(
                f"{self.all_rows} rows are fewer than {ranks} ranks",
                why=["a step takes at least one row on each rank"],
                way_out="give more rows, or start fewer ranks",
            )
        read = range(rank * len(parts) // ranks, -(-(rank + 1) * len(parts) // ranks))
        self._first, self._read = read.start, self.parts[read.start : read.stop]
        first = self.parts[0]
        self.dense_features, self.vocab_sizes = first.dense_features, first.vocab_sizes
        self.history, self.tasks = history_of(first), tasks_of(first)

    @property
    def identity(self) -> str:
        """The same on all ranks, and for any number of them."""
        parts = ["Dealt", *(part.identity for part in self.parts)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def at_epoch(self, epoch: int) -> Dealt:
        parts = [at_epoch(part, epoch) for part in self.parts]
        return Dealt(parts, rank=self._rank, ranks=self._ranks)

    def account(self) -> dict[str, int]:
        """Of the parts that this rank reads."""
        total: Counter[str] = Counter()
        for part in self._read:
            total.update(part.account())
        left_out = self.all_rows % self._ranks
        return {**total, "rows left out of each epoch, which ranks cannot share": left_out}

    def batches(self, batch_size: int, *, start: int = 0) -> Iterator[Batch]:
        """Raises DataRefused where the rows of a step are no multiple of the number of parts."""
        size, rest = divmod(batch_size * self._ranks, len(self.parts))
        if rest:
            raise DataRefused(
                f"{self._ranks} ranks of {batch_size} rows take {batch_size * self._ranks} in a step, which "
                f"{len(self.parts)} parts cannot give evenly",
                way_out=f"a batch size of which {self._ranks} ranks take a multiple of {len(self.parts)}",
            )
        return self._batches(size, start)

    def _batches(self, size: int, start: int) -> Iterator[Batch]:
        with ExitStack() as held:
            streams = [part.batches(size, start=start) for part in self._read]
            for stream in streams:
                held.callback(getattr(stream, "close", _nothing))  # a generator's threads end with it
            for batches in zip(*streams, strict=True):
                if len(own := self._own(batches)):  # the mean of a loss over no row is NaN
                    yield own

    def _own(self, batches: Sequence[Batch]) -> Batch:
        """This rank's rows of one step, of which `batches` are those of the parts that it reads."""
        each = len(batches[0])
        every = each * len(self.parts)
        first = self._rank * every // self._ranks - self._first * each
        last = first + every // self._ranks
        if len(batches) == 1 and (first, last) == (0, each):
            return batches[0]
        return rows_of(joined(batches), first, last)


def _nothing() -> None: ...
