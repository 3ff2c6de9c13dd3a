"""From a spread to a verdict: pass, fail or undecided against a limit, and what would decide it.

    pass       the interval lies inside [-limit, limit]
    fail       it lies outside
    undecided  it crosses the line, or there are too few pairs or rows to have an interval

The interval is that of `Spread.interval`: over seeds and rows together, because a verdict is about the
model that will be trained tomorrow and the traffic it will see. At an effect that sits on the limit it
passes at most 2.5 % of the time. Segments share their error by Bonferroni: with m of them each interval
has level 1 - 0.05 / m, so that all of them hold together 95 % of the time, however segments overlap or
depend. Holm's steps would reject more, but have no two-sided intervals to show, and a verdict of "pass"
needs an interval, not a rejected null.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from loka.core.error import Estimate
from loka.core.storage.codec import decode, encode
from loka.validation.paired import Verdict, verdict
from loka.validation.variance import MIN_PAIRS, MOST_PAIRS, Spread

ERROR = 0.05
MIN_LABELS = 50
"""Of each class in a segment: fewer, and the mean loss of its rows is far from normal."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdict on all rows, or on a segment of them.

    `clicks` are its positive labels; `tail` is 1 less the level of its interval; `limit` is in percent.
    """

    name: str
    spread: Spread
    clicks: int
    limit: float
    tail: float

    @property
    def ne_percent(self) -> Estimate:
        """The relative difference of NE with the interval that the verdict goes by."""
        return self.spread.interval(self.tail)

    @property
    def too_small(self) -> str:
        """Why nothing can be said whatever the numbers are; empty if something can."""
        others = self.spread.rows - self.clicks
        if min(self.clicks, others) < MIN_LABELS:
            return f"{self.clicks} clicks and {others} others: {MIN_LABELS} of each are needed to judge"
        if not math.isfinite(self.spread.mean):
            return "the control has no loss here"
        if self.spread.pairs < MIN_PAIRS:
            return f"{MIN_PAIRS - self.spread.pairs} more pairs before anything is judged"
        return ""

    @property
    def verdict(self) -> Verdict:
        return "undecided" if self.too_small else verdict(self.ne_percent, limit=self.limit)

    @property
    def pairs_needed(self) -> int | None:
        """In all, for a pass or a fail at this mean and spread; None where no number decides."""
        if not math.isfinite(self.spread.mean):
            return None
        return self.spread.pairs_to(abs(self.limit - abs(self.spread.mean)), self.tail)

    @property
    def outlook(self) -> str:
        """What would decide it should mean and spread stay as they are; empty where it is decided."""
        few, spread = self.too_small, self.spread
        if few or self.verdict != "undecided":
            return few
        margin = self.limit - abs(spread.mean)
        if margin > 0:
            return f"a pass: {self._needs(margin)}"
        without = f"a pass is not attainable at this mean (were it 0: {self._needs(self.limit)})"
        return f"{without}; a fail: {self._needs(-margin)}"

    def _needs(self, margin: float) -> str:
        """What makes the half-width at most `margin`."""
        spread = self.spread
        needed = spread.pairs_to(margin, self.tail)
        if needed is not None:
            more = max(needed - spread.pairs, 1)
            return f"{more} more pair{'s' if more > 1 else ''}"
        rows = spread.rows_to(margin, self.tail)
        if rows is not None and rows > spread.rows:
            return f"about {rows} rows, which no number of pairs replaces"
        return f"more than {MOST_PAIRS} pairs"

    def to_json(self) -> dict[str, Any]:
        """What is needed to judge again, and the answers for readers of the file."""
        spread = self.spread
        return {
            "name": self.name,
            "rows": spread.rows,
            "clicks": self.clicks,
            "pairs": spread.pairs,
            "mean": encode(spread.mean),
            "between_pairs": encode(spread.between),
            "rows_error": encode(spread.rows_error),
            "clusters": spread.clusters,
            "effective_clusters": spread.effective,
            "limit": self.limit,
            "tail": self.tail,
            "ne_percent": encode(self.ne_percent),
            "over_seeds": encode(spread.over_seeds(self.tail)),
            "verdict": self.verdict,
            "pairs_needed": self.pairs_needed,
            "outlook": self.outlook,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Judgement:
        spread = Spread(
            mean=decode(float, content["mean"]),
            pairs=content["pairs"],
            rows=content["rows"],
            between=decode(float, content["between_pairs"]),
            rows_error=decode(float, content["rows_error"]),
            clusters=content.get("clusters"),
            effective=content.get("effective_clusters"),
        )
        return cls(
            name=content["name"],
            spread=spread,
            clicks=content["clicks"],
            limit=content["limit"],
            tail=content["tail"],
        )


def joined(average: Judgement, segments: tuple[Judgement, ...]) -> Verdict:
    """fail where anything fails, pass where all passes: a segment cannot hide behind the average."""
    verdicts = {average.verdict, *(segment.verdict for segment in segments)}
    if "fail" in verdicts:
        return "fail"
    return "pass" if verdicts == {"pass"} else "undecided"
