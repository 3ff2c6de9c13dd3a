"""The share of positive labels, counted: H of it, and how sure H is.

    H = h(q),  h(q) = -q ln q - (1 - q) ln(1 - q),      Var(ln H) = (ln((1 - q) / q) / H)^2 q (1 - q) / n

to first order in the error of q = positives / n. Fewer than ten rows of one kind tell the rate to no better
than a third, and H of it likewise: then nothing that is relative to H can be promised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST = 10
"""Positive rows, and negative ones, without which the rate counts as unknown."""


@dataclass(frozen=True, kw_only=True)
class LabelRate:
    """`positives` of `rows` labels, of one task."""

    positives: float
    rows: int

    def __post_init__(self) -> None:
        if not 0 <= self.positives <= self.rows:
            raise ValueError(f"{self.positives} positives of {self.rows} rows cannot be")

    @property
    def share(self) -> float:
        return self.positives / self.rows if self.rows else math.nan

    @property
    def unsupported(self) -> str:
        """Why H of these labels is not known; "" where it is."""
        if not self.rows:
            return "no labels were read, so KL/H has no base rate: pass base_rate="
        rare = min(self.positives, self.rows - self.positives)
        if not rare:
            which = "positive" if self.positives else "negative"
            return f"all {self.rows} labels are {which}: H is 0, and nothing can be stated relative to it"
        if rare < LEAST:
            kind = "positive" if rare == self.positives else "negative"
            return (
                f"{rare:g} {kind} labels of {self.rows} do not tell the base rate (it takes {LEAST}): read "
                "more rows, or pass base_rate="
            )
        return ""

    @property
    def log_variance(self) -> float:
        """Of ln H, by the choice of rows; inf where the labels do not tell it."""
        q = self.share
        if not 0 < q < 1:
            return math.inf
        entropy = -q * math.log(q) - (1 - q) * math.log1p(-q)
        return (math.log((1 - q) / q) / entropy) ** 2 * q * (1 - q) / self.rows
