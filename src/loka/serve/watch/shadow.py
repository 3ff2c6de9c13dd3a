"""The shadow check: a share of requests is answered in high precision too, and the two are compared."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from loka.core.exceptions import ServeRefused, first_line
from loka.serve.watch.agreement import as_real, finite_in_both

log = logging.getLogger("loka.serve")


@dataclass(frozen=True, kw_only=True)
class Shadow:
    """Differences |frozen - high precision| over all floating-point outputs of `requests` requests.

    `nonfinite` counts those that are finite in one of the two only; they are in neither mean nor maximum.
    `changed` counts integers and booleans that differ. `failed` counts requests for which the answer in high precision
    raised, which are in none of the others.
    """

    requests: int
    rows: int
    mean_abs: float
    max_abs: float
    nonfinite: int
    changed: int
    failed: int

    def __str__(self) -> str:
        failed = f"; {self.failed} more failed in high precision" if self.failed else ""
        if not self.requests:
            return f"no request was shadowed{failed}"
        return (
            f"{self.requests} requests, {self.rows} rows shadowed: answers differ by {self.mean_abs:.2e} on "
            f"average and {self.max_abs:.2e} at most; {self.nonfinite} are finite in one of the two only, "
            f"{self.changed} integers or booleans differ{failed}"
        )


def check_share(share: float) -> None:
    if not 0 <= share <= 1:
        raise ServeRefused(f"shadow={share} is no share of requests", way_out="such as 0.01, or 0 for none")


class Tally:
    """Adds up shadowed requests of one version. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests = self._rows = self._values = self._nonfinite = self._changed = self._failed = 0
        self._sum = self._max = 0.0

    def compare(self, low: Sequence[torch.Tensor], answered: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Notes what `answered()` gives in high precision beside the outputs `low` of a request. Where it raises, as it
        may where memory is short, that is counted, and told for the first time: the request has its answer already.
        """
        try:
            self.note(low, answered())
        except Exception as error:
            with self._lock:
                self._failed += 1
                first = self._failed == 1
            if first:
                log.warning("a request has its answer, and none in high precision beside it: %s", first_line(error))

    def note(self, low: Sequence[torch.Tensor], high: Sequence[torch.Tensor]) -> None:
        """Outputs [B, ...] of one request. It waits for the device."""
        pairs = list(zip(map(as_real, low), map(as_real, high), strict=True))
        numbers = [(one, other) for one, other in pairs if one.is_floating_point()]
        changed = sum(int((one != other).sum()) for one, other in pairs if not one.is_floating_point())
        lost = sum(int((one.isfinite() != other.isfinite()).sum()) for one, other in numbers)
        apart = [(a - b).abs() for a, b in (finite_in_both(*pair) for pair in numbers) if a.numel()]
        values, total = sum(one.numel() for one in apart), sum(float(one.sum()) for one in apart)
        largest = max((float(one.max()) for one in apart), default=0.0)
        with self._lock:
            self._requests += 1
            self._rows += low[0].shape[0]
            self._values += values
            self._nonfinite += lost
            self._changed += changed
            self._sum += total
            self._max = max(self._max, largest)

    def shadow(self) -> Shadow:
        with self._lock:
            return Shadow(
                requests=self._requests,
                rows=self._rows,
                mean_abs=self._sum / max(self._values, 1),
                max_abs=self._max,
                nonfinite=self._nonfinite,
                changed=self._changed,
                failed=self._failed,
            )
