"""The share of positive labels, which NE and KL/H are relative to: counted, not taken from predictions.

    H = -q ln q - (1 - q) ln(1 - q),   q the share;   undefined where all labels are equal

A model at the start of training predicts anything: at one positive in a thousand its mean prediction may be
thirty times off, and KL/H would be wrong by as much.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from loka.core.error import Z95
from loka.core.exceptions import DataRefused
from loka.data.batch import Batch, Source, tasks_of

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
        return f"{self.positive} of {self.rows} labels are positive: a share of {self.rate:.3g} +- {Z95 * error:.1g}"


def count_labels(source: Source, *, batch_size: int, most: int = MOST_ROWS) -> dict[str, Labels]:
    """Reads the first `most` rows in whole batches, and counts their labels by task."""
    for found in _counted(source, batch_size):
        if next(iter(found.values())).rows >= most:
            break
    return found


def _counted(source: Source, batch_size: int) -> Iterator[dict[str, Labels]]:
    found = dict.fromkeys(tasks_of(source), Labels(positive=0, rows=0))
    yield found
    for batch in source.batches(batch_size):
        columns = batch.label.reshape(len(batch), -1).unbind(1)
        found = {name: _and(labels, column) for (name, labels), column in zip(found.items(), columns, strict=True)}
        yield found


def _and(labels: Labels, column: torch.Tensor) -> Labels:
    return Labels(positive=labels.positive + int((column > 0.5).sum()), rows=labels.rows + len(column))


def require_both(source: Source, *, batch_size: int, what: str) -> None:
    """Reads until rows of both classes were seen for every task, for which the first batch is mostly enough.

    Raises:
        DataRefused: all labels of a task are equal.
    """
    for found in _counted(source, batch_size):
        if all(labels.rate is not None for labels in found.values()):
            return
    which = "" if len(found) == 1 else "{}: "
    alike = [which.format(name) + str(labels) for name, labels in found.items() if labels.rate is None]
    raise DataRefused(
        f"{what}: {'; '.join(alike)}",
        why=["NE is the loss over the entropy of the labels, which is 0 here, and the AUC needs both classes"],
        way_out="check which column is the label, or choose rows that have both",
    )


def require_clicks(batch: Batch, tasks: Sequence[str]) -> None:
    """Raises DataRefused for labels that are no shares of a click, [B] or [B, tasks]: the loss would be of something
    else, and NE, over the entropy of their mean, nothing.
    """
    label = batch.label
    wanted = (len(batch),) if len(tasks) == 1 else (len(batch), len(tasks))
    if tuple(label.shape) != wanted:
        why = f"label is {list(label.shape)}; of {', '.join(tasks)} it has to be {list(wanted)}"
    elif not label.is_floating_point():
        why = f"label is {label.dtype}; it has to be torch.float32"
    elif not bool(((label >= 0) & (label <= 1)).all()):
        why = f"labels lie between {label.min().item():.6g} and {label.max().item():.6g}, not between 0 and 1"
    else:
        return
    raise DataRefused(
        "the source's labels are no clicks",
        why=[why],
        way_out="give labels 0 and 1 as float32 [B], or [B, tasks] where `source.tasks` names several",
    )


def by_name(labels: Mapping[str, Labels]) -> str:
    """A line of text for each task; a single task has no name in it."""
    if len(labels) == 1:
        return str(next(iter(labels.values())))
    return "; ".join(f"{name}: {each}" for name, each in labels.items())


def shares(labels: Mapping[str, Labels]) -> float | tuple[float, ...] | None:
    """The base rate of each task; None where all labels of a task are equal, since its NE is not defined."""
    rates = [each.rate for each in labels.values()]
    known = tuple(rate for rate in rates if rate is not None)
    if len(known) < len(rates):
        return None
    return known[0] if len(known) == 1 else known
