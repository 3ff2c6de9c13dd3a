"""The order of rows in an epoch, as a function of seed, epoch, rank and world size and of nothing else.

    groups, in the order of permutation(seed, epoch), laid end to end     positions 0 .. rows - 1
    rank r of w takes positions [r n, (r + 1) n),  n = rows // w
    which are cut into windows of whole groups, about `window_rows` rows each
    the rows of window k come in the order of permutation(seed, epoch, r, k)

So neither the number of workers nor the batch size can change it, ranks are disjoint and of equal length,
and any position is found without reading what comes before. Shuffling is bounded: two rows of one group stay
within a window of each other. `rows % w` rows at the end of an epoch's order are left out.
"""

from dataclasses import dataclass

import numpy as np

_GROUPS, _ROWS = 0, 1


@dataclass(frozen=True, kw_only=True)
class Shuffle:
    """What an order follows from; `seed` None keeps the rows as they are stored."""

    seed: int | None = None
    epoch: int = 0
    rank: int = 0
    world: int = 1
    window_rows: int = 65_536

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank={self.rank} of world={self.world}: need 0 <= rank < world")
        if self.epoch < 0 or (self.seed is not None and self.seed < 0) or self.window_rows < 1:
            raise ValueError(
                f"seed={self.seed}, epoch={self.epoch}, window_rows={self.window_rows}: "
                "need seed and epoch >= 0 and window_rows >= 1"
            )


@dataclass(frozen=True, kw_only=True)
class Order:
    """The pieces of one rank in reading order: rows [first, last) of `group`, each array [P].

    `window` [W + 1] is the first piece of every window, `start` [W + 1] the position of its first row.
    """

    shuffle: Shuffle
    group: np.ndarray
    first: np.ndarray
    last: np.ndarray
    window: np.ndarray
    start: np.ndarray

    def pieces(self, window: int) -> list[tuple[int, int, int]]:
        """(group, first, last) of each piece of a window."""
        part = slice(self.window[window], self.window[window + 1])
        return list(zip(self.group[part].tolist(), self.first[part].tolist(), self.last[part].tolist(), strict=True))

    def rows(self, window: int) -> np.ndarray | None:
        """The order [n] of a window's rows, or None when they stay as they are."""
        shuffle = self.shuffle
        if shuffle.seed is None:
            return None
        rng = _stream(shuffle.seed, _ROWS, shuffle.epoch, shuffle.rank, shuffle.world, window)
        return rng.permutation(int(self.start[window + 1] - self.start[window]))

    def window_of(self, position: int) -> int:
        """The window that holds a row position; the number of windows when it lies behind the last row."""
        return int(np.searchsorted(self.start, position, side="right")) - 1


def order_of(group_rows: np.ndarray, *, first: int, last: int, shuffle: Shuffle) -> Order:
    """The order of one rank over rows [first, last) of groups of `group_rows` [G] rows."""
    ends = np.cumsum(group_rows)
    begins = ends - group_rows
    group = np.flatnonzero((ends > first) & (begins < last))
    low = np.maximum(first - begins[group], 0)
    high = np.minimum(last - begins[group], group_rows[group])
    if shuffle.seed is not None:
        order = _stream(shuffle.seed, _GROUPS, shuffle.epoch).permutation(len(group))
        group, low, high = group[order], low[order], high[order]
    rank_rows = (last - first) // shuffle.world
    begin, end = shuffle.rank * rank_rows, (shuffle.rank + 1) * rank_rows
    ends = np.cumsum(high - low)
    begins = ends - (high - low)
    mine = (ends > begin) & (begins < end)
    low = low + np.maximum(begin - begins, 0)
    high = high - np.maximum(ends - end, 0)
    group, low, high = group[mine], low[mine], high[mine]
    ends = np.cumsum(high - low)
    begins = ends - (high - low)
    # A piece belongs to the window in which it begins, so no group is read for two windows.
    window = np.flatnonzero(np.diff(begins // shuffle.window_rows, prepend=-1))
    return Order(
        shuffle=shuffle,
        group=group,
        first=low,
        last=high,
        window=np.append(window, len(group)),
        start=np.append(begins[window], rank_rows),
    )


def _stream(seed: int, *key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *key])))
