"""After which steps a run saves."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from loka.train.ranks import together

EVERY = 200  # steps, where nobody said
_REST = 19  # times what the last save took, until the next: a twentieth of the time goes into saving


class Rhythm:
    """Saves after every so many steps. With None it saves after `EVERY` steps, or as many more as it takes until 19
    times the duration of the last save have passed by rank 0's clock: on an H100 200 steps of a model of 222 M
    parameters take 5 s, and saving them takes 8.
    """

    def __init__(self, every: int | None) -> None:
        self._every, self._took, self._since = every, 0.0, time.perf_counter()

    def __str__(self) -> str:
        return f"a checkpoint every {self._every or EVERY} steps{'' if self._every else ' or more seldom'}"

    def due(self, step: int) -> bool:
        """Whether to save now. A collective where `every` is None."""
        if step % (self._every or EVERY):
            return False
        if self._every:
            return True
        _, told = together(lambda: time.perf_counter() - self._since >= _REST * self._took)
        return told[0] == str(True)

    @contextmanager
    def saving(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:  # a disk that is full may take long to say so
            self._since = time.perf_counter()
            self._took = self._since - began
