"""Log lines for TensorBoard; needs `pip install 'loka[tensorboard]'`."""

from __future__ import annotations

import math
from pathlib import Path
from types import TracebackType
from typing import Any

from loka.core.exceptions import MissingLibrary
from loka.train.loop import TrainLog
from loka.train.metrics import Quality


class TensorBoard:
    """To be given to `train` as `on_log`, inside of `with`. One folder for a run, resumed ones included:
    what was written of steps that are trained again is replaced.

    Raises MissingLibrary where tensorboard is not installed.
    """

    def __init__(self, folder: Path | str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingLibrary(
                "TensorBoard logging needs the package tensorboard",
                why=[str(error)],
                way_out="pip install 'loka[tensorboard]', or log without it",
            ) from error
        self._make, self._folder = SummaryWriter, str(folder)
        self._writer: Any = None

    def __call__(self, line: TrainLog) -> None:
        if self._writer is None:
            self._writer = self._make(self._folder, purge_step=line.step)
        for name, value in scalars(line).items():
            self._writer.add_scalar(name, value, line.step)

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()


def scalars(line: TrainLog) -> dict[str, float]:
    """By tag: "ne/lifetime", "ne/window", "auc/window", "segment ne/NAME", ..; without what is not known.

    Of several tasks each begins with the task's name: "click/ne/lifetime".
    """
    found = {"rate": line.rate, "rows per second": line.rows_per_second}
    for task, reading in line.reading_by_task.items():
        of = f"{task}/" if len(line.reading_by_task) > 1 else ""
        found[f"{of}ne/recent"] = line.recent_ne_by_task[task]
        for name, quality in (("lifetime", reading.lifetime), ("window", reading.window)):
            found |= {f"{of}{measure}/{name}": value for measure, value in _measures(quality).items()}
        for name, quality in reading.segments.items():
            found[f"{of}segment ne/{name}"] = quality.ne
            found[f"{of}segment calibration/{name}"] = quality.calibration
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _measures(quality: Quality) -> dict[str, float]:
    return {"ne": quality.ne, "log loss": quality.logloss, "auc": quality.auc, "calibration": quality.calibration}
