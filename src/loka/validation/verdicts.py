"""The verdict on paired runs against a limit: pass, fail or undecided, and what would decide it.

    pass       the interval lies inside [-limit, limit]
    fail       it lies outside
    undecided  it crosses the line, or there are too few pairs or rows to have an interval

The interval is that of `PairVariance.interval`: over seeds and rows together, because a verdict is about the
model that will be trained tomorrow and the traffic it will see. At an effect that sits on the limit it
passes at most 2.5 % of the time, if pairs are normal. Segments share their error by Bonferroni: each of m
has level 1 - 0.05 / m, so that all of them hold together 95 % of the time, however segments overlap or
depend. Holm's steps would reject more, but have no two-sided intervals to show, and a verdict of "pass"
needs an interval, not a rejected null.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from loka.core.error import Estimate
from loka.core.storage.codec import inline, record
from loka.validation.paired import Verdict, verdict
from loka.validation.variance import MIN_PAIRS, MOST_PAIRS, PairVariance

ERROR = 0.05
MIN_LABELS = 50
"""Of each class in a segment: fewer, and the mean loss of its rows is far from normal."""


@record(derived=("ne_percent", "over_seeds", "verdict", "pairs_needed", "outlook"))
@dataclass(frozen=True, kw_only=True)
class RowsVerdict:
    """The verdict on all rows, or on one segment of them.

    `clicks` are its positive labels; `tail` is 1 less the level of its interval; `limit` is in percent.
    """

    name: str
    variance: PairVariance = inline()
    clicks: int
    limit: float
    tail: float

    @property
    def ne_percent(self) -> Estimate:
        """The relative difference of NE with the interval that the verdict goes by."""
        return self.variance.interval(self.tail)

    @property
    def over_seeds(self) -> Estimate:
        """The same of other seeds on these very rows, for reading: no verdict goes by it."""
        return self.variance.over_seeds(self.tail)

    @property
    def too_small(self) -> str:
        """Why nothing can be said whatever the numbers are; empty if something can."""
        others = self.variance.rows - self.clicks
        if min(self.clicks, others) < MIN_LABELS:
            return f"{self.clicks} clicks and {others} others: {MIN_LABELS} of each are needed for a verdict"
        if not math.isfinite(self.variance.mean):
            return "the control has no loss here"
        if self.variance.pairs < MIN_PAIRS:
            return f"{MIN_PAIRS - self.variance.pairs} more pairs before there is a verdict"
        return ""

    @property
    def verdict(self) -> Verdict:
        return "undecided" if self.too_small else verdict(self.ne_percent, limit=self.limit)

    @property
    def pairs_needed(self) -> int | None:
        """In all, for a pass or a fail at this mean and variance; None where no number decides."""
        if not math.isfinite(self.variance.mean):
            return None
        return self.variance.pairs_to(abs(self.limit - abs(self.variance.mean)), self.tail)

    @property
    def outlook(self) -> str:
        """What would decide it if mean and variance stay as they are; empty where it is decided."""
        few, variance = self.too_small, self.variance
        if few or self.verdict != "undecided":
            return few
        margin = self.limit - abs(variance.mean)
        if margin > 0:
            return f"a pass: {self._needs(margin)}"
        without = f"a pass is not attainable at this mean (were it 0: {self._needs(self.limit)})"
        return f"{without}; a fail: {self._needs(-margin)}"

    def _needs(self, margin: float) -> str:
        variance = self.variance
        needed = variance.pairs_to(margin, self.tail)
        if needed is not None:
            more = max(needed - variance.pairs, 1)
            return f"{more} more pair{'s' if more > 1 else ''}"
        rows = variance.rows_to(margin, self.tail)
        if rows is not None and rows > variance.rows:
            return f"about {rows} rows, which no number of pairs replaces"
        return f"more than {MOST_PAIRS} pairs"


def joined(verdicts: Iterable[Verdict]) -> Verdict:
    """fail where anything fails, pass where all passes: a segment cannot hide behind the average."""
    found = set(verdicts)
    if "fail" in found:
        return "fail"
    return "pass" if found == {"pass"} else "undecided"
