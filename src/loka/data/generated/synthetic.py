"""Synthetic clicks: Zipf ids, heavy-tailed counts, missing values and a planted teacher, streamed.

Rows are generated in fixed blocks of 4096, each from its own random stream (seed, block), so row r depends on
nothing but the world and r: not on the batch size, the start, or how many shards share the work. The price
is at most one block generated in vain at each end of a range. `loka.data.generated.teacher` has the
equations.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np

from loka.data.batch import Batch, History
from loka.data.block import Block, check_batching, into_batches, shard_range
from loka.data.content import identity_of
from loka.data.generated.history import ROWS as HISTORY_ROWS
from loka.data.generated.history import HistoryWorld, draw_history, history_logits, make_history
from loka.data.generated.teacher import (
    ROWS,
    World,
    WorldConfig,
    draw_features,
    make_world,
    sigmoid,
    stream,
    teacher_logits,
)

BLOCK_ROWS = 4096
VOCAB_SIZES = (
    *(300, 500, 10000, 4000, 80, 10, 2500, 100, 3, 6000, 1500, 8000, 1000),
    *(15, 2000, 5000, 4, 700, 400, 20, 3000, 30, 150, 1200, 50, 200),
)
REASONS = ("missing dense values", "missing categories")
# Part of `identity`: raise it whenever the same arguments give other rows.
GENERATION = 1


class SyntheticClicks:
    """A `Source` of generated rows; the same arguments give the same rows on every pass and machine.

    `seed` fixes the world, teacher included. Rows [first_row, first_row + rows) of that world are split into
    `shards` contiguous parts, of which this source is number `shard`; so a held-out set is a later row range
    of the same seed. `vocab_sizes` count id 0, which stands for a missing value; ids are sorted by frequency.
    With `history` > 0 every row has a sequence of up to so many ids of the first column, on which its label
    depends (`loka.data.generated.history`); that is another world than the one without.
    """

    def __init__(
        self,
        *,
        rows: int,
        seed: int,
        shard: int = 0,
        shards: int = 1,
        vocab_sizes: Sequence[int] = VOCAB_SIZES,
        dense_features: int = 13,
        base_rate: float = 0.2,
        alpha: float = 1.05,
        first_row: int = 0,
        history: int = 0,
    ) -> None:
        if rows < 1 or first_row < 0 or seed < 0 or dense_features < 0:
            raise ValueError(
                f"rows={rows}, first_row={first_row}, seed={seed}, dense_features={dense_features}: "
                "need rows >= 1 and the others >= 0"
            )
        if history < 0:
            raise ValueError(f"history={history}: the longest history, or 0 for none")
        if not 0.0 < base_rate < 1.0:
            raise ValueError(f"base_rate={base_rate}: a click rate lies strictly between 0 and 1")
        if not vocab_sizes or min(vocab_sizes) < 2:
            raise ValueError("vocab_sizes: need at least one table, each with id 0 (missing) and one more id")
        first, last = shard_range(rows, shard=shard, shards=shards)
        self._first, self._last = first_row + first, first_row + last
        self.rows = last - first
        self._config = WorldConfig(
            seed=seed,
            vocab_sizes=tuple(int(size) for size in vocab_sizes),
            dense_features=dense_features,
            base_rate=base_rate,
            alpha=alpha,
        )
        self.dense_features, self.vocab_sizes = dense_features, self._config.vocab_sizes
        self.history = History(length=history, vocab_size=self.vocab_sizes[0]) if history else None
        self._totals = np.zeros(len(REASONS), np.int64)

    @property
    def identity(self) -> str:
        config = {
            "source": "SyntheticClicks",
            "generation": GENERATION,
            "range": [self._first, self._last],
            **asdict(self._config),
            **({"history": self.history.length} if self.history else {}),
        }
        return identity_of(config)

    def batches(self, batch_size: int, *, start: int = 0) -> Iterator[Batch]:
        """Batches `start`, `start` + 1, ...; jumping to `start` generates nothing before it."""
        check_batching(batch_size, start)
        blocks = (block for block, _ in self._blocks(start * batch_size, self.rows))
        return into_batches(blocks, batch_size=batch_size, totals=self._totals)

    def account(self) -> dict[str, int]:
        """Counts over all rows handed out by `batches` since this object was made, repeats included."""
        return dict(zip(REASONS, map(int, self._totals), strict=True))

    def teacher_logits(self, first: int = 0, rows: int | None = None) -> np.ndarray:
        """True logits [rows] float64 of rows `first`, ... of this source: the best any model can do."""
        last = self.rows if rows is None else min(first + rows, self.rows)
        return np.concatenate([np.empty(0), *(logits for _, logits in self._blocks(first, last))])

    def _blocks(self, first: int, last: int) -> Iterator[tuple[Block, np.ndarray]]:
        world = make_world(self._config)
        seen = make_history(self._config, self.history.length) if self.history else None
        position, end = self._first + first, self._first + last
        while position < end:
            index, inside = divmod(position, BLOCK_ROWS)
            block, logits = _generate(world, seen, self._config.seed, index)
            stop = min(BLOCK_ROWS, inside + end - position)
            yield block.rows(inside, stop), logits[inside:stop]
            position += stop - inside


def _generate(world: World, seen: HistoryWorld | None, seed: int, index: int) -> tuple[Block, np.ndarray]:
    """Block `index` of the world's rows, and the logits [BLOCK_ROWS] its labels were drawn from."""
    rng = stream(seed, ROWS, index)
    features = draw_features(world, rng, BLOCK_ROWS)
    logits = teacher_logits(world, features.dense, features.sparse)
    extra = {}
    if seen is not None:
        sequence, lengths = draw_history(seen, stream(seed, HISTORY_ROWS, index), BLOCK_ROWS)
        logits = logits + history_logits(seen, features.sparse[:, 0], sequence, lengths)
        extra = {"sequence": sequence, "lengths": lengths}
    label = (rng.random(BLOCK_ROWS) < sigmoid(logits)).astype(np.float32)
    counts = np.stack([features.missing_dense, features.missing_sparse], axis=1).astype(np.int32)
    block = Block(dense=features.dense, sparse=features.sparse, label=label, counts=counts, **extra)
    return block, logits
