"""`loka probe`: statistics from a training run, or of a checkpoint's model as it is."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import nn

from loka.cli.inputs import (
    Data,
    choose_device,
    effects_by,
    open_data,
    restore,
    share_of_labels,
    size_of_world,
    steps_between,
    train_config,
)
from loka.cli.models import build_model
from loka.cli.options import (
    BaseRate,
    BatchSize,
    DataFile,
    Device,
    ModelName,
    Rows,
    ScheduleName,
    SchemaFile,
    Seed,
    WithMods,
    refuse_idle,
)
from loka.cli.terminal import say
from loka.cli.torchrun import require_alone
from loka.cli.train_lines import show_log, train_ne
from loka.cli.trained_on import OTHER_ROWS, are_others, rows_of_run
from loka.core.exceptions import LokaError
from loka.core.records.stats import Stats
from loka.core.storage.alone import alone_in
from loka.data.batch import Source, tasks_of
from loka.probe import Probe
from loka.report.progress import ProgressBars
from loka.train import TrainConfig
from loka.train import train as train_model
from loka.train.automatic.as_it_is import Divided, as_they_are, effect_lines, learn, rate_of, renew
from loka.train.checkpointing.checkpoint import Checkpoint
from loka.train.checkpointing.state import rate_in
from loka.train.running import label_rates
from loka.validation.segments import divide, division_named


def probe(
    context: typer.Context,
    model: ModelName = "wukong",
    data: DataFile = None,
    schema: SchemaFile = None,
    out: Annotated[Path, typer.Option(help="Folder for the statistics.")] = Path("stats"),
    every: Annotated[
        str, typer.Option(help="A step in so many is sampled; auto: as often as costs at most 1 %.")
    ] = "20",
    rows: Rows = None,
    batch_size: BatchSize = 256,
    schedule: ScheduleName = "cosine",
    seed: Seed = 0,
    device: Device = None,
    with_mods: WithMods = None,
    base_rate: BaseRate = None,
    segment: Annotated[
        list[str] | None,
        typer.Option(
            help="dense:FEATURE[:BUCKETS] or sparse:FEATURE[:COUNT]: effects of each segment of the held-out "
            "rows by itself too, for `loka plan --ne-of`; given once."
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Of `loka train`: a folder of them, or one. Its model as it is; nothing is trained."),
    ] = None,
) -> None:
    """Train in bf16, or load a checkpoint, and learn what flows through every site.

    Effects on KL/H are those of the model at the end, from at most 8 batches that training has not used.
    """
    require_alone("probe")
    if checkpoint is not None:
        refuse_idle(context, "with --checkpoint", "every", "schedule")
    if segment and len(segment) > 1:
        raise LokaError(
            f"--segment {' and --segment '.join(segment)}: segments that overlap cannot be drawn apart",
            way_out="a probe for each",
        )
    cadence, device = steps_between(every, "--every"), choose_device(device)
    opening = partial(open_data, data, rows=size_of_world(rows, data), seed=seed, schema=schema)
    opened = opening()
    rate = share_of_labels(base_rate, opened.train)
    built = build_model(model, opened.train, seed=seed, with_mods=with_mods, show=say).to(device)
    config = train_config(batch_size=batch_size, schedule=schedule, seed=seed, device=device)
    segments = _divided(segment[0], opened.test, batch_size) if segment else None
    with alone_in(out, "probing"):
        if checkpoint is not None:
            found = restore(checkpoint, built)
            if are_others(rows_of_run(found), opened, opening):
                say(f"{OTHER_ROWS}, and what is taken for unused may have been trained on")
            stats = _of_checkpoint(built, found, opened, config, rate, segments)
        else:
            effects = effects_by(rate, opened.train, batch_size)
            made = Probe(built, every=cadence, save_to=out, logits=as_they_are, **effects)
            with _saying_what_is_left(out), made as probing:
                result = train_model(built, opened.train, config=config, track=ProgressBars("probe"), on_log=show_log)
            stats = probing.stats()
            say(f"{stats.sampled_steps} of {stats.steps} steps sampled, train NE {train_ne(result)}")
            began = time.perf_counter()
            fresh = opened.test.batches(batch_size)
            known = rate or rate_of(result.reading_by_task)
            stats = renew(
                built,
                stats,
                fresh,
                config=config,
                base_rate=known,
                tasks=tasks_of(opened.test),
                segments=segments,
                seed=seed,
            )
            for line in effect_lines(stats, time.perf_counter() - began):
                say(line)
            stats = replace(stats, final_rate=result.final_rate)
        stats.save(out)
        for path, reason in stats.skipped.items():
            say(f"not probed: {path}: {reason}")
        for path, left in stats.left_out().items():
            say(f"left out: {path}: {left}")
        say(f"written: {out}")


@contextlib.contextmanager
def _saying_what_is_left(out: Path) -> Iterator[None]:
    """Statistics of a part of the steps can be measured like those of all: the message says which these are."""
    try:
        yield
    except KeyboardInterrupt as error:
        error.args = (
            f"what {out} holds, if anything, is of the steps so far, with effects on KL/H of the model on the way; "
            "the same command begins anew",
        )
        raise


def _divided(text: str, source: Source, batch_size: int) -> Divided:
    (found,) = divide(source, [division_named(text, source)], batch_size=batch_size)
    return Divided(found.names, torch.from_numpy(found.group))


def _of_checkpoint(
    model: nn.Module, found: Checkpoint, opened: Data, config: TrainConfig, rate: float | None, segments: Divided | None
) -> Stats:
    """From held-out rows, which a run with the same --data, --rows and --seed has not trained on."""
    say(f"the model of {found.path}, after {found.step} steps; the last fifth of the rows is taken for unused")
    began = time.perf_counter()
    known = rate or label_rates(found.state["running"])
    stats = learn(model, opened.test, config=config, base_rate=known, segments=segments)
    say(f"{stats.sampled_steps} batches went forward and backward, and no weight moved")
    for line in effect_lines(stats, time.perf_counter() - began):
        say(line)
    return replace(stats, final_rate=rate_in(found.state))
