"""How many steps a run takes, and its batches from any step on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from loka.core.exceptions import DataRefused
from loka.data.batch import Batch, Source, at_epoch, rows_of
from loka.train.config import TrainConfig


@dataclass(frozen=True)
class Length:
    """How long a run is: `rows` rows in `steps` steps, `per_epoch` of them in each epoch."""

    rows: int
    steps: int
    per_epoch: int

    @classmethod
    def of(cls, source: Source, config: TrainConfig) -> Length:
        if source.rows < 1:
            raise DataRefused("the source has no rows to train on", way_out="check its row range")
        rows = source.rows * config.epochs
        if config.max_rows is not None:
            rows = min(rows, config.max_rows)
        per_epoch = math.ceil(source.rows / config.batch_size)
        epochs, rest = divmod(rows, source.rows)
        return cls(rows, epochs * per_epoch + math.ceil(rest / config.batch_size), per_epoch)


def batches_from(source: Source, config: TrainConfig, length: Length, *, step: int) -> Iterator[Batch]:
    """The batches from `step` on; the last one is cut where the run ends."""
    while step < length.steps:
        epoch, index = divmod(step, length.per_epoch)
        for batch in at_epoch(source, epoch).batches(config.batch_size, start=index):
            expected = min(config.batch_size, source.rows - index * config.batch_size)
            if len(batch) != expected:
                break
            left = length.rows - epoch * source.rows - index * config.batch_size
            yield batch if left >= expected else rows_of(batch, 0, left)
            step, index = step + 1, index + 1
            if step == length.steps or index == length.per_epoch:
                break
        if step < length.steps and index < length.per_epoch:
            raise DataRefused(
                f"the source ended or gave a batch of another size at batch {index} of epoch {epoch}",
                why=[f"it promised {source.rows} rows; its account is {source.account()}"],
                way_out="fix the count of rows, or the files if they changed while training",
            )


def last_parts(source: Source, config: TrainConfig, length: Length) -> list[int]:
    """Into how many parts the last batch of an epoch, and the last batch of the run, are split for backward: 10 rows in
    4 parts of at most 3, or 6 rows in 3 parts of 2. Ranks that exchange gradients in each backward need the same
    numbers.
    """
    found = []
    for rows in (min(source.rows, length.rows), length.rows % source.rows or source.rows):
        left = rows % config.batch_size or config.batch_size
        found.append(-(-left // config.part_rows(left)))
    return found


def unused_batches(source: Source, config: TrainConfig, length: Length, *, step: int) -> Iterator[Batch]:
    """The batches from `step` on that no step before has trained on: those of the first epoch."""
    left = min(length.per_epoch, length.steps) - step
    return itertools.islice(batches_from(source, config, length, step=step), max(left, 0))
