"""What a training run prints: log lines, its result, and its quality on held-out rows."""

from __future__ import annotations

from torch import nn
from torch.optim.swa_utils import AveragedModel

from loka.cli.inputs import Data
from loka.cli.terminal import say
from loka.nn import fp8_runs
from loka.report.progress import ProgressBars
from loka.train import Quality, TrainConfig, TrainLog, TrainResult, evaluate, quality
from loka.train.average import as_averaged


def show_log(line: TrainLog) -> None:
    say(
        f"step {line.step}/{line.total_steps}  ne {line.ne:.5f}  recent {line.recent_ne:.5f}  "
        f"{line.rows_per_second:.0f} rows/s"
    )


def show_result(result: TrainResult, config: TrainConfig) -> None:
    for message in (*result.skipped_checkpoints, *result.unsaved):
        say(message)
    if result.resumed_from is not None:
        say(f"continued from step {result.resumed_from}")
    if result.step_reason is not None:
        say(f"steps did not run as --step {config.step} asks: {result.step_reason}")
    say(f"train: {result.steps} steps, NE {result.train_ne:.5f}, {result.rows_per_second:.0f} rows/s")
    say(f"window: {_line(result.reading.window)}")
    for name, found in result.reading.segments.items():
        say(f"{name}: ne {found.ne:.5f}  calibration {found.calibration:.4f}  ({found.rows} rows)")


def show_quality(
    model: nn.Module, opened: Data, config: TrainConfig, bars: ProgressBars, average: AveragedModel | None
) -> None:
    def found() -> Quality:
        logits, labels = evaluate(
            model,
            opened.test,
            batch_size=config.batch_size,
            device=config.device,
            precision=config.precision,
            track=bars,
        )
        return quality(logits, labels)

    say(f"held out: {_line(found())}")
    if average is not None:
        with as_averaged(model, average, rows=opened.train, config=config):
            say(f"held out, by the mean of the weights ({config.average}): {_line(found())}")
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
