"""Which steps are sampled: one in `every`, or as many as an overhead allows.

    gap after a sample at step t  =  min(max(50, t / 4), 2000)                       "auto"
    balance  +=  overhead * base             for each step;     base = median time of unsampled steps
    balance  -=  cost of a sample            cost = its step and the next one, less 2 base

What a model's operands look like moves early and settles, hence the geometric gap; it is stretched
until the balance, a token bucket, holds what the next sample is expected to cost. So the share of
samples in the time of training stays under `overhead`, up to the one sample whose cost was expected
too low. The first sample of a process holds work that is done once (the account of FLOPs, first
allocations); it shows no cost and is charged that of the second one, which comes 50 steps later on
trust. After `LONGEST` unsampled steps a sample is due whatever the balance: only where one costs
more than overhead * LONGEST plain steps (200 at 1 %) does the share end up above `overhead`. A step
in which something else was done (an evaluation) tells nothing; where no sample can be timed, `_TRUSTED`
of them are taken at the geometric gaps, and then one in `LONGEST` steps.

Among several ranks a step that one of them samples holds up all others, so rank 0 decides for all, by its
own clock (core/exchange.py `follow`). Every decision says at which step the next one falls: after a
sample at the end of the gap, else where the balance will have been earned. Only there do the others ask,
and rank 0 waits for nobody; a rank that gets no answer warns and goes by its own clock from then on.
Without an initialised process group each process decides for itself.

Clocks never wait for a device: on CUDA an event is recorded at each step's begin and read when it has
passed, a step or more later. On the CPU it is the wall clock.
"""

import itertools
import json
import math
import time
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from numbers import Real
from statistics import median
from typing import Any

import torch

from loka.core.exceptions import LokaError
from loka.core.exchange import follow
from loka.core.timing import elapsed, event_on

_SHORTEST, _GROWTH, _CAP = 50, 0.25, 2000
LONGEST = 20_000
_WINDOW = 25  # unsampled steps whose median is `base`; a mean would take minutes of compiling for training
_FEWEST = 5  # of them, before a cost is known
_TRUSTED = 8  # samples whose cost is not known
_numbers = itertools.count()  # of the "auto" schedules of this process, which ranks make in the same order


class Costs:
    """What samples cost, from what steps took. Times in seconds, of this process alone."""

    def __init__(self) -> None:
        self._pending: dict[int, float | None] = {}  # samples not settled yet, and what their step took
        self._first: int | None = None
        self._uncharged = 0
        self._base: deque[float] = deque(maxlen=_WINDOW)
        self.taken = 0
        self.trained = 0.0
        """The time of all steps without their samples' cost."""
        self.spent = 0.0
        """On samples."""
        self.expected: float | None = None
        """Of the next sample; None while no cost is known."""

    @property
    def settled(self) -> bool:
        return not self._pending

    @property
    def base(self) -> float:
        """What a plain step takes; 0 while none was timed."""
        return median(self._base) if self._base else 0.0

    def sampled(self, step: int) -> None:
        if self._first is None:
            self._first = step
        self._pending[step] = None
        self.taken += 1
        self._uncharged += 1

    def took(self, step: int, seconds: float | None) -> None:
        """From the begin of `step` to that of the next one; None where more than a step was done in it."""
        follows = step - 1 in self._pending
        if step in self._pending:
            self._pending[step] = seconds
            self._pending.pop(step - 1, None)  # nothing plain stands between them: no cost to see
        elif follows:
            self._settle(step - 1, seconds)
        elif seconds is not None:
            self._base.append(seconds)
        self.trained += self.base

    def _settle(self, step: int, after: float | None) -> None:
        """`after`: what the step after the sample took; it may pay for what the sample left behind."""
        took = self._pending.pop(step)
        if step == self._first or took is None or after is None or len(self._base) < _FEWEST:
            return  # charged with the next one
        cost = took + after - 2 * self.base
        self.expected = max(cost if self.expected is None else (self.expected + cost) / 2, 0.0)
        self.spent += cost * self._uncharged
        self._uncharged = 0


class SamplingSchedule(ABC):
    """Asked at the begin of each step; told later what steps took, through `costs`."""

    def __init__(self) -> None:
        self.costs = Costs()

    def due(self, step: int) -> bool:
        """Whether step number `step` (ascending by one) is sampled; asked once for each."""
        wanted = self._wanted(step)
        if wanted:
            self.costs.sampled(step)
        return wanted

    @property
    def overhead(self) -> float | None:
        """The share of samples in the time of training, this process alone; None while it is not known."""
        known = self.costs.expected is not None and self.costs.trained > 0
        return self.costs.spent / self.costs.trained if known else None

    @abstractmethod
    def _wanted(self, step: int) -> bool: ...


class Every(SamplingSchedule):
    """One step in `every`, the first one included."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self._every = every

    def _wanted(self, step: int) -> bool:
        return step % self._every == 0


class Auto(SamplingSchedule):
    """As often as `overhead` allows; see above.

    Args:
        overhead: the share of training time that samples may take, above 0.
        start: the first step of this process; above 0 the run goes on from earlier statistics, and waits
            `_SHORTEST` steps before its first sample.
    """

    def __init__(self, *, overhead: float, start: int = 0) -> None:
        super().__init__()
        self._share = overhead
        self._next = self._last = start  # when it is decided again; the last sample
        self._resumed = start > 0
        self._key = f"loka/every-auto/{next(_numbers)}"
        self._decisions = 0
        self._alone = False

    def _wanted(self, step: int) -> bool:
        if step < self._next:
            return False
        sampled, wait = self._agreed(step)
        self._next = step + wait
        if sampled:
            self._last = step
        return sampled

    def _agreed(self, step: int) -> tuple[bool, int]:
        """Whether the step is sampled, and in how many steps the next decision falls, on all ranks alike."""
        self._decisions += 1
        if not self._alone:
            try:
                key = f"{self._key}/{self._decisions}"
                sampled, wait = json.loads(follow(key, lambda: json.dumps(self._decide(step))))
                return sampled, wait
            except LokaError as error:
                self._alone = True
                warnings.warn(
                    'Probe(every="auto") goes by this rank\'s own clock from now on; its sampled steps hold '
                    f"up the other ranks. {error}",
                    stacklevel=2,
                )
        return self._decide(step)

    def _decide(self, step: int) -> tuple[bool, int]:
        if self._resumed and self._decisions == 1:
            return False, _SHORTEST
        left = self._last + LONGEST - step
        lacking = self._lacking()
        if lacking == 0 or left <= 0:
            return True, int(min(max(_SHORTEST, _GROWTH * step), _CAP))
        return False, min(lacking, left)

    def _lacking(self) -> int:
        """Steps until the next sample is earned, as far as that can be told; 0 once it is."""
        costs = self.costs
        if costs.expected is None:
            return 0 if costs.taken < _TRUSTED else 1 if not costs.settled else LONGEST
        if not costs.settled:
            return 1
        missing = costs.expected - (self._share * costs.trained - costs.spent)
        earned = self._share * costs.base  # in a step
        if missing <= 0:
            return 0
        return math.ceil(missing / earned) if earned > 0 else 1


def sampling_of(every: int | str, *, overhead: float, start: int = 0) -> SamplingSchedule:
    """Raises ValueError for an `every` or an `overhead` that cannot be."""
    if every == "auto":
        if not (isinstance(overhead, Real) and 0 < overhead < 1):
            raise ValueError(f"overhead is {overhead!r}; a share of training time lies between 0 and 1")
        return Auto(overhead=overhead, start=start)
    if not isinstance(every, int) or isinstance(every, bool):
        raise ValueError(f'every is {every!r}; it is a number of steps, or "auto"')
    if every < 1:
        raise ValueError(f"every is {every}; it must be at least 1")
    return Every(every)


class Clock(ABC):
    """Times of steps, from marks at their begins."""

    def __init__(self) -> None:
        self._marks: deque[tuple[int, Any]] = deque()
        self._disturbed: set[int] = set()

    def mark(self, step: int) -> None:
        self._marks.append((step, self._now()))

    def disturb(self) -> None:
        if self._marks:
            self._disturbed.add(self._marks[-1][0])

    def read(self, tell: Callable[[int, float | None], None]) -> None:
        """Tells every step whose time is known by now, in order, once."""
        while len(self._marks) > 1 and self._passed(self._marks[1][1]):
            step, begin = self._marks.popleft()
            seconds = self._between(begin, self._marks[0][1])
            disturbed = step in self._disturbed
            self._disturbed.discard(step)
            tell(step, None if disturbed else seconds)

    @abstractmethod
    def _now(self) -> Any: ...

    @abstractmethod
    def _passed(self, mark: Any) -> bool: ...

    @abstractmethod
    def _between(self, begin: Any, end: Any) -> float: ...


class WallClock(Clock):
    def _now(self) -> float:
        return time.perf_counter()

    def _passed(self, mark: Any) -> bool:
        return True

    def _between(self, begin: float, end: float) -> float:
        return end - begin


class CudaClock(Clock):
    """Events on the stream of `device` that a step begins on. Reading one costs no wait."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def _now(self) -> torch.cuda.Event:
        return event_on(self._device)

    def _passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def _between(self, begin: Any, end: Any) -> float:
        return elapsed(begin, end) / 1e6


def clock_of(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else WallClock()
