"""Training and evaluation of a click model: `model(dense [B, D], sparse [B, F]) -> logits [B]`.

The reported NE is progressive: every batch is predicted before it is learned from, so one
pass gives an honest number without a held-out set. Nothing waits for the device between two
log lines. A run that is killed and resumed ends with the same bits as one that was not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from loka.core.exceptions import CheckpointRefused, DataRefused, NonFinite
from loka.core.files import canonical
from loka.data.batch import Batch, Source
from loka.train import state as run_state
from loka.train.checkpoint import Checkpoint, holds_checkpoints, load_newest, save
from loka.train.config import Precision, TrainConfig
from loka.train.interrupt import deferred_interrupt
from loka.train.length import Length, batches_from
from loka.train.metrics import RunningNE, normalized_entropy
from loka.train.optim import build_optimizers, warmup_factor

Track = Callable[[Iterable[Batch], str, int], Iterable[Batch]]


def untracked(batches: Iterable[Batch], description: str, total: int) -> Iterable[Batch]:
    """The progress display that shows nothing."""
    return batches


@dataclass(frozen=True)
class TrainLog:
    """`ne` covers all rows so far, `recent_ne` and `rows_per_second` those since the last log line."""

    step: int
    total_steps: int
    rows: int
    ne: float
    recent_ne: float
    rows_per_second: float


@dataclass(frozen=True)
class TrainResult:
    """`steps`, `rows` and `train_ne` cover the whole run; the speed is that of this process alone."""

    steps: int
    rows: int
    train_ne: float
    seconds: float
    rows_per_second: float
    resumed_from: int | None
    skipped_checkpoints: tuple[str, ...]


def train(
    model: nn.Module,
    source: Source,
    *,
    config: TrainConfig,
    identity_extra: Mapping[str, Any] | None = None,
    checkpoints: Path | None = None,
    resume: bool = True,
    track: Track = untracked,
    on_log: Callable[[TrainLog], None] | None = None,
    on_step: Callable[[int], None] | None = None,
    check: Callable[[nn.Module], None] | None = None,
) -> TrainResult:
    """Trains `model` in place and moves it to `config.device`.

    Args:
        model: its weights at the start are the caller's: seed before building it.
        source: rows in training order.
        config: what to do; its `seed` drives dropout.
        identity_extra: JSON values that a checkpoint has to share, such as the plan's digest.
        checkpoints: folder to save to and resume from; None saves nothing.
        resume: False demands a folder without checkpoints.
        track: wraps the batches to show progress, `(batches, description, total)`.
        on_log: receives a `TrainLog` every `log_every` steps.
        on_step: receives the count of completed steps after each.
        check: called with the model at each log line and save; it raises if a site holds a NaN.

    Raises:
        NonFinite: the loss is nan or infinite, noticed at the next log line or save.
        CheckpointRefused: the folder's checkpoints are unusable or of another run.
        KeyboardInterrupt: after the completed step was saved.
    """
    device = torch.device(config.device)
    model.to(device).train()
    optimizers = build_optimizers(model, config)
    running = RunningNE(device)
    length = Length.of(source, config)
    identity = {
        "config": config.identity(),
        "source": {"identity": source.identity, "rows": source.rows},
        "model": run_state.layout(model),
        "extra": dict(identity_extra or {}),
    }
    canonical(identity)  # fails now, not at the first save, when a value is not JSON
    torch.manual_seed(config.seed)
    found = _open(checkpoints, identity, resume=resume) if checkpoints else None
    if found:
        run_state.restore(found.state, model, optimizers, running, path=found.path)
    first = step = saved = found.step if found else 0
    between_steps = True
    log = _Log(running, length.steps, step=step)
    started, first_rows = time.perf_counter(), running.rows

    def finish_checks() -> None:
        if check:
            check(model)
        log.require_finite(step)

    def save_now() -> None:
        nonlocal saved
        if checkpoints and saved != step:
            state = run_state.capture(model, optimizers, running)
            save(checkpoints, step=step, state=state, identity=identity, keep=config.keep_checkpoints)
            saved = step

    with deferred_interrupt() as interrupt:
        try:
            for batch in track(batches_from(source, config, length, step=step), "train", length.steps - step):
                between_steps = False
                _set_rates(optimizers, config, warmup_factor(step, length.steps, config.warmup))
                _learn(model, batch.to(device), optimizers, running, config)
                step += 1
                between_steps = True
                last = step == length.steps
                if step % config.log_every == 0 or last:
                    finish_checks()
                    line = log.line(step)
                    if on_log:
                        on_log(line)
                if checkpoints and (step % config.checkpoint_every == 0 or last):
                    finish_checks()
                    save_now()
                if on_step:
                    on_step(step)
                if interrupt.requested:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            if between_steps:
                save_now()
            raise
    seconds = time.perf_counter() - started
    return TrainResult(
        steps=step,
        rows=running.rows,
        train_ne=running.ne(),
        seconds=seconds,
        rows_per_second=(running.rows - first_rows) / seconds,
        resumed_from=first if found else None,
        skipped_checkpoints=found.skipped if found else (),
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
    """Logits [N] and labels [N] of every row of `source`, in order, as float32.

    The model runs in eval mode without gradients; the mode of each module is put back.
    """
    model.to(device)
    training = [module for module in model.modules() if module.training]
    logits, labels = [], []
    total = -(-source.rows // batch_size)
    model.eval()
    try:
        with torch.no_grad():
            for batch in track(source.batches(batch_size), "evaluate", total):
                with _autocast(torch.device(device), precision):
                    output = model(batch.dense.to(device), batch.sparse.to(device))
                logits.append(output.float())
                labels.append(batch.label)
    finally:
        for module in training:
            module.training = True
    if not logits:
        raise DataRefused("the source to evaluate on gave no rows", way_out="check its row range")
    return torch.cat(logits).cpu().numpy(), torch.cat(labels).cpu().float().numpy()


def _learn(
    model: nn.Module,
    batch: Batch,
    optimizers: Mapping[str, torch.optim.Optimizer],
    running: RunningNE,
    config: TrainConfig,
) -> None:
    with _autocast(batch.dense.device, config.precision):
        logits = model(batch.dense, batch.sparse)
    losses = functional.binary_cross_entropy_with_logits(logits.float(), batch.label, reduction="none")
    running.add(losses, batch.label)
    for optimizer in optimizers.values():
        optimizer.zero_grad(set_to_none=True)
    losses.mean().backward()
    if config.grad_clip is not None and "dense" in optimizers:
        weights = [weight for group in optimizers["dense"].param_groups for weight in group["params"]]
        nn.utils.clip_grad_norm_(weights, config.grad_clip)
    for optimizer in optimizers.values():
        optimizer.step()


def _autocast(device: torch.device, precision: Precision) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def _set_rates(optimizers: Mapping[str, torch.optim.Optimizer], config: TrainConfig, factor: float) -> None:
    for name, rate in (("dense", config.lr), ("sparse", config.sparse_lr)):
        if name in optimizers:
            for group in optimizers[name].param_groups:
                group["lr"] = rate * factor


def _open(folder: Path, identity: Mapping[str, Any], *, resume: bool) -> Checkpoint | None:
    if resume:
        return load_newest(folder, identity=identity)
    if holds_checkpoints(folder):
        raise CheckpointRefused(
            f"{folder} already holds checkpoints",
            why=["a new run would mix its steps with theirs"],
            way_out="choose another folder, delete this one, or pass resume=True",
        )
    return None


class _Log:
    """Turns running sums into log lines; remembers what the last line covered."""

    def __init__(self, running: RunningNE, total_steps: int, *, step: int) -> None:
        self.running, self.total_steps = running, total_steps
        self.step, self.rows, self.sums, self.time = step, running.rows, running.read(), time.perf_counter()

    def require_finite(self, step: int) -> None:
        if not math.isfinite(self.running.read()[0]):
            raise NonFinite(
                f"the training loss became nan or infinite between steps {self.step} and {step}",
                way_out="pass a NaN check to find the site, lower the learning rates, or set grad_clip",
            )

    def line(self, step: int) -> TrainLog:
        sums, rows, now = self.running.read(), self.running.rows, time.perf_counter()
        recent = rows - self.rows
        losses, labels = sums[0] - self.sums[0], sums[1] - self.sums[1]
        line = TrainLog(
            step=step,
            total_steps=self.total_steps,
            rows=rows,
            ne=self.running.ne(),
            recent_ne=normalized_entropy(losses / recent, labels / recent),
            rows_per_second=recent / (now - self.time),
        )
        self.step, self.rows, self.sums, self.time = step, rows, sums, now
        return line
