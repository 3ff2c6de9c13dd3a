"""The share of positive labels, which NE and KL/H are relative to: counted, not taken from predictions.

    H = -q ln q - (1 - q) ln(1 - q),   q the share;   undefined where all labels are equal

A model at the start of training predicts anything: at one positive in a thousand its mean prediction may be
thirty times off, and KL/H would be wrong by as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from loka.core.exceptions import DataRefused
from loka.data.batch import Source

MOST_ROWS = 1_000_000
"""Read for the share; it is known to 1 % of itself from ten thousand positive ones."""


@dataclass(frozen=True, kw_only=True)
class Labels:
    """`positive` of `rows` labels that were read."""

    positive: int
    rows: int

    @property
    def rate(self) -> float | None:
        """None where all labels are equal, and NE is not defined."""
        return self.positive / self.rows if 0 < self.positive < self.rows else None

    def __str__(self) -> str:
        if self.rate is None:
            return f"all {self.rows} labels read are {int(self.positive > 0)}"
        error = math.sqrt(self.rate * (1 - self.rate) / self.rows)
        return (
            f"{self.positive} of {self.rows} labels are positive: "
            f"a share of {self.rate:.3g} +- {1.96 * error:.1g}"
        )


def count_labels(source: Source, *, batch_size: int, most: int = MOST_ROWS) -> Labels:
    """Reads the first `most` rows, whole batches."""
    positive = rows = 0
    for batch in source.batches(batch_size):
        positive, rows = positive + int((batch.label > 0.5).sum()), rows + len(batch)
        if rows >= most:
            break
    return Labels(positive=positive, rows=rows)


def require_both(source: Source, *, batch_size: int, what: str) -> None:
    """Reads until rows of both classes were seen, which the first batch mostly has.

    Raises:
        DataRefused: all labels are equal.
    """
    labels = Labels(positive=0, rows=0)
    for batch in source.batches(batch_size):
        seen = int((batch.label > 0.5).sum())
        labels = Labels(positive=labels.positive + seen, rows=labels.rows + len(batch))
        if labels.rate is not None:
            return
    raise DataRefused(
        f"{what}: {labels}",
        why=[
            "NE is the loss over the entropy of the labels, which is 0 here, and the AUC needs both classes"
        ],
        way_out="check which column is the label, or choose rows that have both",
    )
