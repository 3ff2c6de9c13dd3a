"""What a training run prints: log lines, its result, and its quality on held-out rows."""

from collections.abc import Mapping

from torch import nn
from torch.optim.swa_utils import AveragedModel

from loka.cli.inputs import Data
from loka.cli.terminal import say
from loka.data.batch import tasks_of
from loka.nn import fp8_runs
from loka.report.progress import ProgressBars
from loka.train import Quality, TrainConfig, TrainLog, TrainResult, evaluate
from loka.train.average import as_averaged
from loka.train.metrics import quality_by_task


def show_log(line: TrainLog) -> None:
    recent = line.recent_ne_by_task
    parts = [
        f"{_of(task, recent)}ne {reading.lifetime.ne:.5f}  recent {recent[task]:.5f}"
        for task, reading in line.reading_by_task.items()
    ]
    say(f"step {line.step}/{line.total_steps}  {'  '.join(parts)}  {line.rows_per_second:.0f} rows/s")


def show_result(result: TrainResult, config: TrainConfig) -> None:
    for message in (*result.skipped_checkpoints, *result.unsaved):
        say(message)
    if result.resumed_from is not None:
        say(f"continued from step {result.resumed_from}")
    if result.step_reason is not None:
        say(f"steps did not run as --step {config.step} asks: {result.step_reason}")
    speed = f"{result.rows_per_second:.0f} rows/s" if result.rows_per_second else "no step was left to train"
    say(f"train: {result.steps} steps, NE {train_ne(result)}, {speed}")
    readings = result.reading_by_task
    for task, reading in readings.items():
        of = _of(task, readings)
        say(f"{of}window: {_line(reading.window)}")
        for name, found in reading.segments.items():
            say(f"{of}{name}: ne {found.ne:.5f}  calibration {found.calibration:.4f}  ({found.rows} rows)")


def train_ne(result: TrainResult) -> str:
    """Progressive NE of all rows, of each task."""
    readings = result.reading_by_task
    return "  ".join(f"{_of(task, readings)}{reading.lifetime.ne:.5f}" for task, reading in readings.items())


def _of(task: str, by_task: Mapping[str, object]) -> str:
    return f"{task}: " if len(by_task) > 1 else ""


def show_quality(
    model: nn.Module, opened: Data, config: TrainConfig, bars: ProgressBars, average: AveragedModel | None
) -> None:
    def found() -> dict[str, Quality]:
        logits, labels = evaluate(
            model,
            opened.test,
            batch_size=config.batch_size,
            device=config.device,
            precision=config.precision,
            track=bars,
        )
        return quality_by_task(tasks_of(opened.test), logits, labels)

    def show(what: str) -> None:
        for task, quality in (by_task := found()).items():
            say(f"{_of(task, by_task)}{what}: {_line(quality)}")

    show("held out")
    if average is not None:
        with as_averaged(model, average, rows=opened.train, config=config):
            show(f"held out, by the mean of the weights ({config.average})")
    for site, runs in fp8_runs(model).items():
        say(f"ran {runs} x {site}")
    for line in opened.account():
        say(line)


def _line(found: Quality) -> str:
    if found.rows and found.base_rate in (0, 1):
        return (
            f"logloss {found.logloss:.5f}  ({found.rows} rows, whose labels are all "
            f"{found.base_rate:.0f}: NE, AUC and calibration are not defined)"
        )
    return (
        f"ne {found.ne:.5f}  logloss {found.logloss:.5f}  auc {found.auc:.5f}  "
        f"calibration {found.calibration:.4f}  ({found.rows} rows, base rate {found.base_rate:.4f})"
    )
