"""The share of positive labels, which NE and KL/H are relative to: counted, not taken from predictions.

    H = -q ln q - (1 - q) ln(1 - q),   q the share;   undefined where all labels are equal

A model at the start of training predicts anything: at one positive in a thousand its mean prediction may be
thirty times off, and KL/H would be wrong by as much.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from loka.core.exceptions import DataRefused
from loka.core.numerics.label_rate import LabelRate
from loka.data.batch import Batch, Source, tasks_of

MOST_ROWS = 1_000_000
"""Read for the share; it is known to 1 % of itself from ten thousand positive ones."""


def count_labels(source: Source, *, batch_size: int, most: int = MOST_ROWS) -> dict[str, LabelRate]:
    """Reads the first `most` rows in whole batches, and counts their labels by task."""
    for found in _counted(source, batch_size):
        if next(iter(found.values())).rows >= most:
            break
    return found


def _counted(source: Source, batch_size: int) -> Iterator[dict[str, LabelRate]]:
    found = dict.fromkeys(tasks_of(source), LabelRate(positives=0, rows=0))
    yield found
    for batch in source.batches(batch_size):
        columns = batch.label.reshape(len(batch), -1).unbind(1)
        found = {name: _and(labels, column) for (name, labels), column in zip(found.items(), columns, strict=True)}
        yield found


def _and(labels: LabelRate, column: torch.Tensor) -> LabelRate:
    return LabelRate(positives=labels.positives + int((column > 0.5).sum()), rows=labels.rows + len(column))


def require_both(source: Source, *, batch_size: int, what: str) -> None:
    """Reads until rows of both classes were seen for every task, for which the first batch is mostly enough.

    Raises:
        DataRefused: all labels of a task are equal.
    """
    for found in _counted(source, batch_size):
        if all(labels.varies for labels in found.values()):
            return
    which = "" if len(found) == 1 else "{}: "
    alike = [which.format(name) + str(labels) for name, labels in found.items() if not labels.varies]
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


def by_name(labels: Mapping[str, LabelRate]) -> str:
    """A line of text for each task; a single task has no name in it."""
    if len(labels) == 1:
        return str(next(iter(labels.values())))
    return "; ".join(f"{name}: {each}" for name, each in labels.items())


def shares(labels: Mapping[str, LabelRate]) -> float | tuple[float, ...] | None:
    """The base rate of each task; None where all labels of a task are equal, since its NE is not defined."""
    if not all(each.varies for each in labels.values()):
        return None
    known = tuple(each.share for each in labels.values())
    return known[0] if len(known) == 1 else known
