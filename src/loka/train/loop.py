"""Training and evaluation of a click model: `model(dense [B, D], sparse [B, F]) -> logits [B]`.

The reported NE is progressive: every batch is predicted before it is learned from, so one
pass gives an honest number without a held-out set. Nothing waits for the device between two
log lines. A run that is killed and resumed ends with the same bits as one that was not.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from loka.core.exceptions import DataRefused, NonFinite
from loka.core.exchange import ranks_of
from loka.core.progress import Track, untracked
from loka.core.records.plan import Plan
from loka.data.batch import Batch, Source, require_source, tasks_of
from loka.distributed import Fp8AllGather
from loka.nn.fsdp_units import reshard
from loka.probe.model_effects.untouched import evaluating
from loka.train.ahead import ahead_of
from loka.train.checkpointing.identity import run_identity, shared_by_ranks
from loka.train.checkpointing.rhythm import Rhythm
from loka.train.checkpointing.saves import Saves
from loka.train.checkpointing.sharded import require_one_folder
from loka.train.checkpointing.state import plan_text
from loka.train.config import Precision, TrainConfig
from loka.train.interrupt import deferred_interrupt
from loka.train.labels import require_clicks
from loka.train.length import Length, batches_from, last_parts, unused_batches
from loka.train.metrics import Quality, normalized_entropy, only
from loka.train.ranks import alone_together, require_alike_told, require_as_one, require_same_steps, together
from loka.train.run import Callback, Run
from loka.train.running import Reading
from loka.train.segments import Segments
from loka.train.steps.forward import arguments, matrix_precision, predict, repeatable, tasks_in


@dataclass(frozen=True)
class TrainLog:
    """`ne` covers all rows so far, `recent_ne` and `rows_per_second` those since the last log line.

    `reading_by_task` has more of all rows, of the window, and by segment. Of rows with several labels NE is
    by task alone: `ne`, `recent_ne` and `reading` raise a LokaError that names the tasks.
    """

    step: int
    total_steps: int
    rows: int
    recent_ne_by_task: Mapping[str, float]
    rows_per_second: float
    rate: float
    reading_by_task: Mapping[str, Reading]

    @property
    def reading(self) -> Reading:
        return only(self.reading_by_task, "reading")

    @property
    def recent_ne(self) -> float:
        return only(self.recent_ne_by_task, "recent_ne")

    @property
    def ne(self) -> float:
        return self.reading.lifetime.ne


@dataclass(frozen=True)
class TrainResult:
    """Steps, rows and `reading_by_task` cover the whole run; the speed is that of this process alone.

    `plan` is the one that the model runs by, `step_reason` why steps did not run as the config asks,
    `average` the mean of the weights that the config asked for (`as_averaged` judges it), `final_rate` the
    rate of the last step as a share of the peak, `gathering` how FSDP2 gathers in FP8 where the config asks
    for it: `remove()` it before `loka.revert`, `exchange` how TorchRec moved embeddings, where it did.
    """

    steps: int
    rows: int
    reading_by_task: Mapping[str, Reading]
    seconds: float
    rows_per_second: float
    resumed_from: int | None
    skipped_checkpoints: tuple[str, ...]
    plan: Plan | None = None
    step_reason: str | None = None
    unsaved: tuple[str, ...] = field(default=())
    average: AveragedModel | None = None
    final_rate: float = 1.0
    gathering: Fp8AllGather | None = None
    exchange: str | None = None

    @property
    def reading(self) -> Reading:
        """Of the one task; raises LokaError where there are several."""
        return only(self.reading_by_task, "reading")

    @property
    def train_ne(self) -> float:
        return self.reading.lifetime.ne

    @property
    def quality(self) -> Quality:
        """Progressive, of all rows."""
        return self.reading.lifetime


def train(
    model: nn.Module,
    source: Source,
    *,
    config: TrainConfig,
    plan: Plan | None = None,
    callback: Callback | None = None,
    segments: Segments | None = None,
    identity_extra: Mapping[str, Any] | None = None,
    checkpoints: Path | str | None = None,
    resume: bool = True,
    track: Track = untracked,
    on_log: Callable[[TrainLog], None] | None = None,
    on_step: Callable[[int], None] | None = None,
    check: Callable[[nn.Module], None] | None = None,
    say: Callable[[object], object] = lambda what: None,
) -> TrainResult:
    """Trains `model` in place and moves it to `config.device`.

    In a process group all ranks call it, each with the model in DistributedDataParallel and rows of its own:
    as many batches as the others, and results are of its own rows.

    Args:
        model: its weights at the start are the caller's: seed before building it.
        source: rows in training order.
        config: what to do; its `seed` drives dropout.
        plan: converts the model, which is not converted yet; checkpoints hold it.
        callback: what goes on beside the steps, such as `Auto`.
        segments: metrics by segment too.
        identity_extra: JSON values that a checkpoint has to share.
        checkpoints: folder to save to and resume from; None saves nothing. Several ranks save to one that all
            of them see, and as many or other ranks go on from it, where `source` is `loka.data.Dealt`.
        resume: False demands a folder without checkpoints.
        track: wraps the batches to show progress, `(batches, description, total)`.
        on_log: receives a `TrainLog` every `log_every` steps.
        on_step: receives the count of completed steps after each.
        check: called with the model at each log line and save; it raises if a site holds a NaN.
        say: receives what is decided before steps: how ranks gather and send; `str()` of it is to be read.

    Raises:
        NonFinite: the loss is nan or infinite, noticed at the next log line or save.
        CheckpointRefused: the folder's checkpoints are unusable or of another run.
        CheckpointNotSaved: the last state could not be written. Earlier on, that is a warning, the
            checkpoint before stays, and training goes on.
        InUse: another process trains in the folder of checkpoints.
        DataRefused: the source is none, or breaks its promise (of labels the first batch is looked at), or ranks would
            take other numbers of steps.
        LokaError: ranks have other configurations, but for the seed; or other models, plans, columns or torch.
        RankFailed: another rank raised, between two steps.
        KeyboardInterrupt: Ctrl-C or SIGTERM, after the completed step was saved; it says so. Several ranks
            save nothing then.
    """
    model.train()
    checkpoints = Path(checkpoints) if checkpoints else None
    callback = callback or Callback()
    require_source(source)
    length = Length.of(source, config)
    # What all ranks do together has to come at the same steps on each.
    rhythm = Rhythm(config.checkpoint_every)
    saving = rhythm if checkpoints else "no checkpoints"
    parts = f", the last batches in {last_parts(source, config, length)} parts" if config.accumulate > 1 else ""
    require_same_steps(f"{length.steps} steps{parts}, a log line every {config.log_every}, {saving}")
    identity = run_identity(
        model,
        source,
        config,
        plan=plan,
        beside=callback.identity(),
        segments=segments.identity() if segments else None,
        extra=identity_extra or {},
    )
    way_out = "give all ranks one model, plan, kind of rows, torch, and TrainConfig, whose seed alone may differ"
    require_alike_told(shared_by_ranks(identity, source), way_out=way_out)
    torch.manual_seed(config.seed)
    saves = Saves(checkpoints, rhythm, identity=identity)
    found = saves.newest(length.steps, resume=resume)
    run = Run(model, config, steps=length.steps, segments=segments, tasks=tasks_of(source), say=say, before=found)

    def unused() -> Iterator[Batch]:
        found = unused_batches(source, config, length, step=run.step)
        return run.coming.beside(found) if run.coming is not None else found

    def write(folder: Path) -> None:
        beside = {"given_plan": plan_text(plan), "beside": callback.state()}
        run.save(folder, beside=beside, identity=identity)

    run.unused = unused
    if plan and not found:
        run.adopt(plan)
    if found:
        run.restore(found, plan)
        callback.restore(found.state["beside"])
    first_step = run.step
    between_steps = True
    log = _Log(run, check)
    started, first_rows = time.perf_counter(), run.running.rows

    failed: BaseException | None = None
    exact = matrix_precision(config.precision, run.device)
    # A second run in the folder would remove what this one is about to save.
    alone = alone_together(checkpoints, saves=run.step < length.steps)
    with alone, deferred_interrupt() as run.interrupt, exact, repeatable(config.deterministic):
        if checkpoints and ranks_of() > 1:
            require_one_folder(checkpoints)
        try:
            run.open_wire(batches_from(source, config, length, step=run.step))
            callback.start(run)
            run.coming = ahead_of(batches_from(source, config, length, step=run.step), run.device)
            for batch in track(run.coming, "train", length.steps - run.step):
                if run.step == first_step:
                    together(partial(require_clicks, batch, run.tasks))
                sight = callback.before(run)
                between_steps = False
                run.learn(batch.to(run.device), sight=sight)
                between_steps = True
                if run.step == first_step + 1:
                    require_as_one(run.replicas, saved=checkpoints is not None)
                callback.after(run)
                last = run.step == length.steps
                if last or run.step % config.log_every == 0:
                    together(log.require_finite)
                    line = log.line()
                    if on_log:
                        on_log(line)
                if saves.due(run.step, now=last or run.save_due):
                    together(log.require_finite)
                    run.save_due = False
                    saves.save(run.step, write, last=last)
                if on_step:
                    on_step(run.step)
                run.interrupt.check()
        except KeyboardInterrupt as error:
            failed = error
            if between_steps and ranks_of() == 1:  # several get the signal at different steps
                saves.save(run.step, write, last=True)
            error.args = (str(saves),)
            raise
        except BaseException as error:
            failed = error
            raise
        finally:
            reason, exchange = run.step_reason, run.exchange
            with ExitStack() as ends:  # each of them, the last first, whatever another raises
                ends.callback(run.close)
                ends.callback(callback.stop, run, failed)
                if run.coming is not None:
                    ends.callback(run.coming.close, failed)
    seconds = time.perf_counter() - started
    _, reasons = together(lambda: reason or "")  # compilers may err on one rank alone
    others = [f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why]
    return TrainResult(
        steps=run.step,
        rows=run.running.rows,
        reading_by_task=run.running.read(),
        seconds=seconds,
        rows_per_second=(run.running.rows - first_rows) / seconds,
        resumed_from=found.step if found else None,
        skipped_checkpoints=found.skipped if found else (),
        plan=run.plan,
        step_reason=reason or "; ".join(others) or None,
        unsaved=tuple(saves.failed),
        average=run.average,
        final_rate=run.rate_factor,
        gathering=run.gathering,
        exchange=exchange,
    )


def evaluate(
    model: nn.Module,
    source: Source,
    *,
    batch_size: int,
    device: str = "cpu",
    precision: Precision = "fp32",
    track: Track = untracked,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Logits [N] and labels [N] of every row of `source`, in order, as float32; of several tasks [N, tasks].

    The model runs in eval mode without gradients; the mode of each module is put back.
    """
    require_source(source)
    target = torch.device(device)
    model.to(target)
    logits, labels = [], []
    total = -(-source.rows // batch_size)
    try:
        with (
            evaluating(model),
            torch.no_grad(),
            matrix_precision(precision, target),
            closing(ahead_of(source.batches(batch_size), target)) as batches,
        ):
            for batch in track(batches, "evaluate", total):
                inputs = arguments(batch.to(target))
                logits.append(predict(model, inputs, precision, tasks=tasks_in(batch)))
                labels.append(batch.label.clone())  # pageable: pinned memory is for the batches to come
    finally:
        reshard(model)  # what FSDP2's root keeps gathered would hide the weights from who looks at them next
    if not logits:
        raise DataRefused("the source to evaluate on gave no rows", way_out="check its row range")
    return torch.cat(logits).cpu().numpy(), torch.cat(labels).cpu().float().numpy()


class _Log:
    def __init__(self, run: Run, check: Callable[[nn.Module], None] | None) -> None:
        self.check = check
        self.run, self.step, self.rows = run, run.step, run.running.rows
        self.sums, self.time = run.running.losses_and_clicks(), time.perf_counter()

    def require_finite(self) -> None:
        if self.check:
            self.check(self.run.model)
        sums = self.run.running.losses_and_clicks().values()
        if not all(math.isfinite(losses) for losses, _ in sums):
            raise NonFinite(
                f"the training loss became nan or infinite between steps {self.step} and {self.run.step}",
                way_out="look for NaN in the rows' features, lower the learning rates, set grad_clip, or keep weights "
                "in float32; where the model runs by a plan, check=loka.check_finite finds the site",
            )

    def line(self) -> TrainLog:
        run, now = self.run, time.perf_counter()
        sums, rows = run.running.losses_and_clicks(), run.running.rows
        count = rows - self.rows
        recent = {}
        for task, (losses, clicks) in sums.items():
            before = self.sums[task]
            recent[task] = normalized_entropy((losses - before[0]) / count, (clicks - before[1]) / count)
        line = TrainLog(
            step=run.step,
            total_steps=run.steps,
            rows=rows,
            recent_ne_by_task=recent,
            rows_per_second=count / (now - self.time),
            rate=run.rate,
            reading_by_task=run.running.read(),
        )
        self.step, self.rows, self.sums, self.time = run.step, rows, sums, now
        return line
