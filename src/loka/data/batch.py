"""A batch of click rows, and what every source of batches offers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch

from loka.core.device import moved
from loka.core.exceptions import DataRefused


@dataclass(frozen=True, kw_only=True)
class Batch:
    """`dense` [B, D] float32, `sparse` [B, F] int64 ids, `label` [B] float32 in {0, 1}, or [B, tasks].

    Rows with a history also have `sequence` [B, L] int64 ids, oldest first, padded with 0 on the right, and
    `lengths` [B] int64, how many of the L are there.
    """

    dense: torch.Tensor
    sparse: torch.Tensor
    label: torch.Tensor
    sequence: torch.Tensor | None = None
    lengths: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.label.shape[0]

    def to(self, device: torch.device | str) -> Batch:
        """A copy on `device`; from pinned memory to a GPU it does not wait for the copy."""
        return Batch(**{name: moved(tensor, device) for name, tensor in self.tensors().items()})

    def pinned(self) -> Batch:
        """A copy in pinned memory; of what lies on a GPU, there, when it is done."""

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_cuda:
                return torch.empty_like(tensor, pin_memory=True).copy_(tensor)
            copy = tensor.clone()
            torch.cuda.current_stream(tensor.device).synchronize()  # readers have other streams
            return copy

        return Batch(**{name: copied(tensor) for name, tensor in self.tensors().items()})

    def tensors(self) -> dict[str, torch.Tensor]:
        """The fields by name, without those that are absent."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def rows_of(batch: Batch, first: int, last: int) -> Batch:
    """Rows [first, last) of a batch."""
    return Batch(**{name: tensor[first:last] for name, tensor in batch.tensors().items()})


def joined(batches: Sequence[Batch]) -> Batch:
    """The rows of all batches, one after the other."""
    if len(batches) == 1:
        return batches[0]
    parts = [batch.tensors() for batch in batches]
    return Batch(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})


@dataclass(frozen=True, kw_only=True)
class History:
    """The sequence feature of a source: at most `length` ids, each in [0, vocab_size); 0 is padding."""

    length: int
    vocab_size: int


ONE_TASK = ("label",)


class Source(Protocol):
    """Rows in a fixed order. The same source, `batch_size` and `start` give the same batches.

    A source may have three more: `history`, a `History` or None (see `history_of`), `tasks`, the names of
    its label columns (see `tasks_of`), and `at_epoch(epoch)`, the same rows in that epoch's order.
    """

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
        """Batches `start`, `start` + 1, ...; the last one may be short. For a GPU they are read by a thread of
        their own: who iterates elsewhere meanwhile, in a callback say, needs a source that several may read."""
        ...

    def account(self) -> dict[str, int]:
        """What was skipped or replaced so far, by reason; nothing is dropped silently."""
        ...


def require_source(source: object) -> None:
    """Raises DataRefused for what is no source, such as a list of batches, with what it lacks."""
    lacking = [name for name in _PROMISED if not hasattr(source, name)]
    if lacking:
        raise DataRefused(
            f"a {type(source).__name__} is no source of rows: it has no {', '.join(lacking)}",
            way_out="give a source of loka.data, or a class of your own with these (see loka.data.Source); a loop of "
            "your own takes any batches, inside of `with loka.Probe(model):`",
        )


_PROMISED = ("rows", "identity", "batches")  # what training asks of it


def history_of(source: Source) -> History | None:
    """The sequence feature of the source's batches, None where they have none."""
    found: History | None = getattr(source, "history", None)
    return found


def tasks_of(source: object) -> tuple[str, ...]:
    """The tasks of a source or a store, by their label columns; one, "label", where it does not say."""
    found: tuple[str, ...] = getattr(source, "tasks", ONE_TASK)
    return found


def at_epoch(source: Source, epoch: int) -> Source:
    """The source in the order of that epoch; the source itself when its order never changes."""
    turn = getattr(source, "at_epoch", None)
    return source if turn is None else turn(epoch)
