"""A batch of click rows, and what every source of batches offers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, kw_only=True)
class Batch:
    """`dense` [B, D] float32, `sparse` [B, F] int64 ids, `label` [B] float32 in {0, 1}."""

    dense: torch.Tensor
    sparse: torch.Tensor
    label: torch.Tensor

    def __len__(self) -> int:
        return self.label.shape[0]

    def to(self, device: torch.device | str) -> Batch:
        return Batch(
            dense=self.dense.to(device, non_blocking=True),
            sparse=self.sparse.to(device, non_blocking=True),
            label=self.label.to(device, non_blocking=True),
        )


class Source(Protocol):
    """Rows in a fixed order. The same source, `batch_size` and `start` give the same batches."""

    @property
    def rows(self) -> int:
        """How many rows one pass gives."""
        ...

    @property
    def dense_features(self) -> int: ...

    @property
    def vocab_sizes(self) -> tuple[int, ...]:
        """Ids of sparse column i lie in [0, vocab_sizes[i])."""
        ...

    @property
    def identity(self) -> str:
        """Changes when the rows, their order or their encoding change; checkpoints carry it."""
        ...

    def batches(self, batch_size: int, *, start: int = 0) -> Iterator[Batch]:
        """Batches `start`, `start` + 1, ...; the last one may be short."""
        ...

    def account(self) -> dict[str, int]:
        """What was skipped or replaced so far, by reason; nothing is dropped silently."""
        ...
