"""A step waits for the slowest rank: E[max over ranks of the sum of t(L)], of rows dealt at random and balanced."""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loka.core.error import Estimate, estimate_mean
from loka.core.exceptions import LokaError, UnknownName

_FEWEST_BATCHES, _MOST_BATCHES = 4, 64
_LONGEST = 1e15  # microseconds: sums of squares are finite


@dataclass(frozen=True, kw_only=True)
class LengthTimes:
    """Microseconds of a row of each length, by arm, such as bf16 and plan."""

    lengths: tuple[float, ...]
    us: Mapping[str, tuple[float, ...]]

    def __post_init__(self) -> None:
        for values in (self.lengths, *self.us.values()):
            if len(values) != len(self.lengths) or not all(0 <= value < math.inf for value in values):
                raise ValueError(f"a time of 0 or more is needed for each length, not {values}")
        if list(self.lengths) != sorted({*self.lengths}) or not (self.lengths and self.us):
            raise ValueError("lengths ascend, and have times")

    def of(self, arm: str, lengths: Sequence[float]) -> Any:
        """On lines between measured ones. Raises LokaError for lengths outside, with their share, and for an arm
        that was not measured.
        """
        if arm not in self.us:
            raise UnknownName(f"no times of {arm!r} were measured", way_out=f"one of {', '.join(self.us)}")
        low, high = self.lengths[0], self.lengths[-1]
        if outside := sum(not low <= one <= high for one in lengths):
            why = f"{100 * outside / len(lengths):.3g} % of the lengths are outside of {low:g} to {high:g}"
            raise LokaError(why, way_out="measure times of them too")
        return np.interp(lengths, self.lengths, self.us[arm])


def balanced(times: Sequence[float], ranks: int) -> list[list[int]]:
    """Rows of each rank: the longest first, to the rank with the least time."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0.0, rank) for rank in range(ranks)]
    for row in sorted(range(len(times)), key=lambda row: -times[row]):
        busy, rank = heap[0]
        dealt[rank].append(row)
        heapq.heapreplace(heap, (busy + times[row], rank))
    return dealt


def waits(times: Sequence[float], *, ranks: int, batch_size: int) -> tuple[Estimate, Estimate]:
    """Microseconds of a step at random, and balanced or as dealt where that is less: means over batches of
    `batch_size` rows a rank that have no row in common, out of rows of `times`, and their 95 % intervals.

    Raises LokaError for fewer than four such batches, whose spread would tell nothing of other rows.
    """
    rows = ranks * batch_size
    if min(ranks, batch_size) < 1 or not all(0 <= us <= _LONGEST for us in times):
        why = f"{ranks} ranks of {batch_size} rows of at most {max(times):g} us"
        raise LokaError(why, way_out=f"give ranks and rows, and times of 0 to {_LONGEST:g} us")
    count = min(len(times) // rows, _MOST_BATCHES)
    if count < _FEWEST_BATCHES:
        raise LokaError(
            f"{len(times)} rows for {ranks} ranks of {batch_size}: at least {_FEWEST_BATCHES * rows} are needed",
            way_out=f"more rows, smaller batches or fewer ranks: the interval is of {_FEWEST_BATCHES} batches or more",
        )
    found = []
    for batch in np.random.default_rng(0).permutation(times)[: count * rows].reshape(count, rows):
        dealt = max(map(math.fsum, batch.reshape(ranks, batch_size)))
        found.append((dealt, min(dealt, max(math.fsum(batch[mine]) for mine in balanced(batch.tolist(), ranks)))))
    random, even = zip(*found, strict=True)
    return estimate_mean(random), estimate_mean(even)
