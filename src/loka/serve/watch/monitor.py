"""The alarm: has what reaches the FP8 sites moved since calibration? It never changes an answer.

    o_r = log2 of the least power of two s with max|x_r| <= 448 s     octaves of a row r
    m_b = median over the rows of batch b of o_r                      by site, one batch of 8; -inf for zeros alone
    m_0 = 1/2 + median over the calibration rows of log2(max|x_r| / 448)
    shift     |median of the last 16 m_b - m_0| > limit
    limit     = max(2, 0.25 + q99 of |o_r - m_0|)                   over single calibration rows

Octaves are those of the row's FP8 scale, which regions of compiled code compute anyway: a look costs no pass.

A single row is beyond the limit with probability p <= 0.01, and a batch's median hardly more often, so the
median of 16 independent batches is with at most C(16, 8) p^8 = 1.3e-12: below 1e-6 in 125,000 looks. A shift
of 20 times is 3.8 to 4.8 octaves, and seen when half of the 16 or one more show it, 79 batches later at most, where
the limit is below it; sites whose rows differ by more among themselves are named as blind. Zeros alone count where
no calibration row of a site was of zeros. A window goes on over new weights, which are judged once they have filled
more than half of it: what only weights of before showed is then no more than half. With static scales
the share of rows beyond the range is watched too: at least 4 rows and 1 % of a window. NaN and infinity are
named where they come first.
"""

import functools
import itertools
import logging
import math
import statistics
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch

from loka.core.storage.codec import sparse
from loka.kernels.edge.twin import E4M3_MAX, scale_above

EVERY = 8
"""Batches of which one is looked at."""
LOOKED_AT = 128
"""Rows of a batch, evenly spread: a look then costs as much for a batch of any size."""
WINDOW = 16
LEAST_OCTAVES = 2.0  # octaves are whole: from 2.8 times on, and 5.7 times are beyond it
MARGIN = 0.25  # less than from one median of 16 to the next
SHIFT_TO_SEE = math.log2(20.0) - 0.5  # octaves are whole
SATURATED_ROWS = 4
SATURATED_SHARE = 0.01

_LEAST = 2.0**-60  # a row's scale is no less, if all of it is zeros

_KINDS = ("nonfinite", "saturation", "shift")
_LOG = logging.getLogger("loka.serve")


@dataclass(frozen=True, kw_only=True)
class Range:
    """Of a site's input rows at calibration, in octaves of their scales: their median, and how far a healthy
    window's median lies from it at most. `ceiling`: the largest |x| that a static scale holds, else None. `zeros`:
    whether a row may be of zeros alone, as some were or nobody looked."""

    median: float
    limit: float
    ceiling: float | None
    zeros: bool = sparse(True)

    @property
    def blind(self) -> bool:
        """Whether a shift of 20 times would lie within what rows differ by anyway."""
        return self.limit >= SHIFT_TO_SEE


def range_of(row_amax: torch.Tensor, ceiling: float | None) -> Range:
    """Of row maxima [T] of which at least one is positive."""
    positive = row_amax[row_amax > 0]
    median = float((positive.double() / E4M3_MAX).log2().median()) + 0.5  # in the middle of its octave
    spread = float(torch.quantile((octaves_of(positive) - median).abs()[: 1 << 24], 0.99, interpolation="higher"))
    limit = max(LEAST_OCTAVES, spread + MARGIN)
    return Range(median=median, limit=limit, ceiling=ceiling, zeros=bool((row_amax == 0).any()))


def is_looked_at(batch: int) -> bool:
    """One of each `EVERY` batches, the first of the first ones, and then by a hash: what comes may have a period."""
    turn, place = divmod(batch, EVERY)
    return place == (blake2b(turn.to_bytes(8), digest_size=1).digest()[0] % EVERY if turn else 0)


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """`kind`: "shift", "saturation" or "nonfinite". `batch` counts looked-at batches of the site."""

    site: str
    kind: str
    batch: int
    text: str

    def __str__(self) -> str:
        return f"{self.site}: {self.text}"


class Looks(NamedTuple):
    """What one batch of `rows` shows at each of some sites [S]: the median of its octaves, -inf where all rows are
    zeros, NaN where no row tells any; how many rows a static scale does not hold, and how many are not finite."""

    octaves: np.ndarray
    rows: int
    saturated: np.ndarray
    nonfinite: np.ndarray


def looks_of(row_amax: torch.Tensor, ceilings: Sequence[float | None]) -> Looks:
    """Of sites at once, as a server's thread has to do it between requests: of what `look` gave of each, [S, rows],
    on the host, and the largest |x| that its static scale holds."""
    amax = row_amax.numpy()
    finite = np.isfinite(amax)
    known = np.sort(np.where(finite & (amax > 0), amax, np.inf), axis=1)
    counts = (known < np.inf).sum(axis=1)
    octaves = np.where((amax == 0).all(axis=1), -np.inf, np.nan)
    (seen,) = np.nonzero(counts)
    middle = known[seen, (counts[seen] - 1) // 2]  # the lower of two; octaves rise as maxima do
    octaves[seen] = octaves_of(torch.from_numpy(middle)).numpy()
    saturated = np.zeros(len(amax), dtype=int)
    if any(ceiling is not None for ceiling in ceilings):
        most = np.array([np.inf if ceiling is None else ceiling for ceiling in ceilings], dtype=amax.dtype)
        saturated = (finite & (amax > most[:, None])).sum(axis=1)
    return Looks(octaves, amax.shape[1], saturated, (~finite).sum(axis=1))


def octaves_of(row_amax: torch.Tensor) -> torch.Tensor:
    """float64 [T], whole numbers, of finite row maxima [T]."""
    return scale_above(row_amax.float()).double().log2()


def look(rows: torch.Tensor) -> torch.Tensor:
    """max|x_row| of the input rows [T, K] of a site, of `LOOKED_AT` at most: float32, on their device."""
    return torch.linalg.vector_norm(some_of(rows), torch.inf, dim=1).float()


def look_of_scales(scales: torch.Tensor) -> torch.Tensor:
    """What `look` would give up to the octave, from the FP8 scales [n] of the rows."""
    return torch.where(scales <= _LEAST, 0.0, scales * E4M3_MAX)


def some_of(rows: torch.Tensor) -> torch.Tensor:
    """`LOOKED_AT` of them at most, evenly spread."""
    return rows[:: apart(rows.shape[0])].detach()


@functools.lru_cache(maxsize=4096)
def apart(rows: int) -> int:
    """From one row of `rows` that is looked at to the next. It has no divisor in common with them: rows may
    be the tokens of a batch, and each token is to have its turn."""
    return next(step for step in itertools.count(-(-rows // LOOKED_AT)) if math.gcd(step, rows) == 1)


class Monitor:
    """Keeps the last looks at each site of one version. Threads may share it."""

    def __init__(self, ranges: Mapping[str, Range], *, behind: "Monitor | None" = None) -> None:
        """`behind`: of the version before, with the same ranges."""
        self.ranges = ranges
        self._names = tuple(ranges)
        self._index = {name: index for index, name in enumerate(ranges)}
        self._median = np.array([known.median for known in ranges.values()])
        self._limit = np.array([known.limit for known in ranges.values()])
        self._zeros = np.array([known.zeros for known in ranges.values()], dtype=bool)
        self._looks = np.zeros(len(ranges), dtype=int)
        self._seen = np.zeros(len(ranges), dtype=int)  # octaves so far, of which the last lie in turns:
        self._octaves = np.full((len(ranges), WINDOW), np.nan)
        self._saturated: dict[str, deque[tuple[int, int]]] = {
            name: deque(maxlen=WINDOW) for name, known in ranges.items() if known.ceiling is not None
        }
        self._raised: dict[tuple[str, str], Alarm] = {}
        self._found: list[Alarm] = []  # in the batch that is looked at
        self._lock = threading.Lock()
        if behind is not None:
            with behind._lock:
                self._seen, self._octaves = behind._seen.copy(), behind._octaves.copy()
        self._before = self._seen.copy()

    def observe(self, name: str, rows: torch.Tensor) -> None:
        """Looks at the input rows [T, K] of the site `name`. It waits for the device."""
        if name in self.ranges and rows.numel():
            self.look_at(([name], look(rows).cpu().unsqueeze(0)))

    def look_at(self, *several: tuple[Sequence[str], torch.Tensor]) -> None:
        """Takes what `look` gave of sites of one batch, [sites, rows] on the host."""
        ceilings = [[self.ranges[name].ceiling for name in names] for names, _ in several]
        self.note(*((names, looks_of(amax, most)) for (names, amax), most in zip(several, ceilings, strict=True)))

    def note(self, *several: tuple[Sequence[str], Looks]) -> None:
        """Takes looks at sites of one batch; a site that ran several times is there as often."""
        with self._lock:
            for names, looks in several:
                indices = np.array([self._index[name] for name in names], dtype=int)
                if len(set(names)) == len(names):
                    self._take(indices, looks)
                else:
                    for one in range(len(names)):
                        self._take(indices[one : one + 1], _only(looks, one))
                for one, name in enumerate(names) if self._saturated else ():
                    self._judge_saturation(name, int(looks.saturated[one]), looks.rows)
            # The sites behind it see it too; the first one is what to look for.
            bad = [
                (self._index[names[one]], int(looks.nonfinite[one]), looks.rows)
                for names, looks in several
                for one in np.flatnonzero(looks.nonfinite).tolist()
            ]
            if bad and not any(kind == "nonfinite" for _, kind in self._raised):
                index, count, rows = min(bad, key=lambda each: each[0])
                self._raise(self._names[index], "nonfinite", f"{count} of {rows} rows hold NaN or infinity")
            told = self._told()
        for alarm in told:  # without the lock: who handles the warning may ask for all alarms
            _LOG.warning("loka.serve alarm: %s", alarm)

    def _take(self, indices: np.ndarray, looks: Looks) -> None:
        """Of sites that are each there once."""
        self._looks[indices] += 1
        told = ~np.isnan(looks.octaves) & ~(np.isneginf(looks.octaves) & self._zeros[indices])
        indices = indices[told]
        self._octaves[indices, self._seen[indices] % WINDOW] = looks.octaves[told]
        self._seen[indices] += 1
        beyond = np.abs(self._octaves[indices] - self._median[indices, None]) > self._limit[indices, None]
        judged = (self._seen[indices] >= WINDOW) & (2 * (self._seen - self._before)[indices] > WINDOW)
        # Where fewer than half of them are beyond the limit, the median is within.
        for index in indices[judged & (2 * beyond.sum(axis=1) >= WINDOW)].tolist():
            name, oldest = self._names[index], int(self._seen[index]) % WINDOW
            if (name, "shift") not in self._raised:
                self._judge_shift(name, np.roll(self._octaves[index], -oldest).tolist())

    def _judge_shift(self, name: str, octaves: list[float]) -> None:
        """`octaves`: of the last looks, in the order of time."""
        known = self.ranges[name]
        if abs(statistics.median(octaves) - known.median) > known.limit:
            # The window still holds batches of before; the last ones tell how far it went.
            now = statistics.median(octaves[-WINDOW // 4 :]) - known.median
            self._raise(
                name,
                "shift",
                f"rows are {2.0**now:.3g} times those of calibration, beyond "
                f"{2.0**known.limit:.3g} times either way, all to half an octave",
            )

    def _judge_saturation(self, name: str, saturated: int, rows: int) -> None:
        ceiling = self.ranges[name].ceiling
        if ceiling is None:
            return
        window = self._saturated[name]
        window.append((saturated, rows))
        over, all_rows = (sum(column) for column in zip(*window, strict=True))
        if over >= max(SATURATED_ROWS, SATURATED_SHARE * all_rows):
            text = f"{over} of {all_rows} rows are beyond {ceiling:.3g}, which the scale holds"
            self._raise(name, "saturation", text)

    def _raise(self, name: str, kind: str, text: str) -> None:
        if (name, kind) not in self._raised:
            batch = int(self._looks[self._index[name]])
            self._found.append(Alarm(site=name, kind=kind, batch=batch, text=text))

    def _told(self) -> list[Alarm]:
        """Those of one batch that are new, in the order of the model."""
        found = sorted(self._found, key=lambda each: (self._index[each.site], _KINDS.index(each.kind)))
        self._found.clear()
        return [alarm for alarm in found if self._raised.setdefault((alarm.site, alarm.kind), alarm) is alarm]

    def alarms(self) -> tuple[Alarm, ...]:
        with self._lock:
            return tuple(self._raised.values())


def _only(looks: Looks, index: int) -> Looks:
    part = slice(index, index + 1)
    return Looks(looks.octaves[part], looks.rows, looks.saturated[part], looks.nonfinite[part])
