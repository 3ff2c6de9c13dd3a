"""Which part of the traffic a row belongs to, so that one part cannot hide behind the average."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from loka.data.batch import Batch

OTHER = "other"
_MOST = 1000


@dataclass(frozen=True)
class Segments:
    """`of(batch)` gives each row's place in `names`, int64 [B]; any other number counts as "other".

    `of` gets the batch on the training device and must not wait for it. `by` says what it goes by: two runs
    with equal `names` and `by` are taken for the same.

    Raises ValueError for no name, one given twice, "other", or more than 1000.
    """

    names: tuple[str, ...]
    of: Callable[[Batch], torch.Tensor]
    by: str

    def __post_init__(self) -> None:
        if not 1 <= len(self.names) <= _MOST:
            raise ValueError(f"{len(self.names)} segments; there have to be 1 to {_MOST}, the rest is {OTHER!r}")
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice or OTHER in self.names:
            raise ValueError(f"names of segments have to differ, from {OTHER!r} too: {', '.join(twice) or OTHER}")

    @classmethod
    def of_column(cls, column: int, *, ids: Iterable[int] = range(16), name: str = "") -> Segments:
        """One segment for each of `ids` of sparse column `column`; all other ids together are "other"."""
        ids = tuple(ids)
        name = name or f"sparse {column}"

        def of(batch: Batch) -> torch.Tensor:
            seen = batch.sparse[:, column]
            if ids == tuple(range(len(ids))):
                return seen
            place = torch.full_like(seen, -1)
            for at, wanted in enumerate(ids):
                place = torch.where(seen == wanted, at, place)
            return place

        return cls(tuple(f"{name} = {id}" for id in ids), of, by=f"column {column}, ids {list(ids)}")

    def identity(self) -> dict[str, Any]:
        """What a checkpoint has to share."""
        return {"by": self.by, "names": list(self.names)}
