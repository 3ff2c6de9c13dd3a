"""Reads the batches of a run before its steps need them.

CPU     a batch is read when it is asked for
GPU     a thread of its own reads into pinned memory, one batch after the other, at most two ahead: reading
        takes no time of the GPU's, and a copy to the GPU does not wait for what it computes
"""

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from threading import Lock

import torch

from loka.core.device import index_of
from loka.data.batch import Batch
from loka.data.workers import in_order

_AT_MOST = 3  # that which is asked for, and two


class Ahead(Iterator[Batch]):
    """Yields each batch once, also where TorchRec's pipeline takes some before the loop comes to them.

    Args:
        copied: what is copied of the batches that a thread reads ahead, since a source may fill the same memory again;
            None: there is no thread. While a thread reads, other readers of the source must go through `beside`.
    """

    def __init__(self, batches: Iterator[Batch], *, copied: Callable[[Batch], Batch] | None = None) -> None:
        self._taken: deque[Batch] = deque()
        self._reading, self._copied = Lock(), copied
        self._thread = None if copied is None else self._by_thread(batches)
        self._batches = self._thread or batches

    def __next__(self) -> Batch:
        return self._taken.popleft() if self._taken else next(self._batches)

    def early(self, device: torch.device) -> Iterator[Batch]:
        """The batches that the loop will come to, moved to the device on the caller's stream. One batch at a time is
        read; a later call begins with those that an earlier one took and the loop has not reached.
        """
        yield from tuple(self._taken)
        for batch in self._batches:
            self._taken.append(batch.to(device))
            yield self._taken[-1]

    def beside(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Other batches of the same source, which need not know of threads: only one reader at a time reads it."""
        return iter(lambda: self._read(batches), None)

    def close(self, failed: BaseException | None = None) -> None:
        """Afterwards no thread reads. An interrupt while it waits for a thread ends the waiting, and does not replace
        the error `failed` that came before.
        """
        try:
            if self._thread is not None:
                self._thread.close()
        except KeyboardInterrupt:
            if failed is None:
                raise

    def _read(self, batches: Iterator[Batch]) -> Batch | None:
        with self._reading:
            batch = next(batches, None)
            return batch if batch is None or self._copied is None else self._copied(batch)

    def _by_thread(self, batches: Iterator[Batch]) -> Generator[Batch, None, None]:
        reads = in_order(lambda _: self._read(batches), itertools.count(), workers=1, ahead=_AT_MOST)
        with closing(reads):
            yield from itertools.takewhile(lambda batch: batch is not None, reads)


def ahead_of(batches: Iterator[Batch], device: torch.device) -> Ahead:
    """The batches for steps on `device`, read as the text of this module says. The caller closes it."""
    if device.type != "cuda":
        return Ahead(batches)
    index = index_of(device)

    def on_device() -> Iterator[Batch]:
        torch.cuda.set_device(index)  # which is current is each thread's own
        yield from batches

    return Ahead(on_device(), copied=Batch.pinned)
