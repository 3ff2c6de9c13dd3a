"""One arm of a comparison: train, evaluate on held-out rows, and keep the result.

A finished arm is read back from its files when a demo is started again; an unfinished one
goes on from its newest checkpoint.
"""

import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from loka.cli.inputs import Data, train_config
from loka.cli.terminal import say
from loka.core.exceptions import FileRefused
from loka.core.records.stats import Stats
from loka.core.storage.codec import decode, encode
from loka.core.storage.files import read_record, read_tensors, sha256_of_file, write_record, write_tensors
from loka.nn import check_finite, fp8_runs, sites_of
from loka.probe import Probe
from loka.report.progress import ProgressBars
from loka.train import evaluate, newest_step, quality, train
from loka.validation.compare import Arm

_KIND, _VERSION = "loka-arm", 1
_CHECKPOINT_EVERY = 200


@dataclass(frozen=True, kw_only=True)
class ArmRun:
    data: Data
    out: Path
    batch_size: int
    device: str
    probe_every: int
    base_rate: float | None
    schedule: str
    track: ProgressBars


@dataclass(frozen=True, kw_only=True)
class _Finished:
    """`arm.json`: an arm without its quality, which follows from the predictions of checksum `held_out`."""

    name: str
    train_ne: float
    rows_per_second: float
    runs: Mapping[str, int]
    held_out: str


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """An arm with its held-out logits [N] and labels [N]."""

    arm: Arm
    logits: npt.NDArray[np.float32]
    labels: npt.NDArray[np.float32]


def run_arm(run: ArmRun, name: str, seed: int, build: Callable[[], nn.Module], *, probed: bool = False) -> ArmResult:
    folder = run.out / "arms" / f"{name.replace(' ', '-')}-{seed}"
    done = _read(folder)
    if done is not None:
        return done
    stats = run.out / "stats"
    if probed:
        _drop_unwatched(folder / "checkpoints", stats)
    model = build()
    config = train_config(
        batch_size=run.batch_size,
        schedule=run.schedule,
        seed=seed,
        device=run.device,
        checkpoint_every=_CHECKPOINT_EVERY,
        keep_checkpoints=1,
    )
    watch = None
    if probed:
        probe = Probe(model, every=run.probe_every, save_to=stats, resume=_saved_stats(stats), base_rate=run.base_rate)
        watch = _Watch(probe, stats)
    with watch.probe if watch else nullcontext():
        trained = train(
            model,
            run.data.train,
            config=config,
            identity_extra={"arm": name, "candidates": _candidates(model)},
            checkpoints=folder / "checkpoints",
            track=run.track,
            check=check_finite,
            on_step=watch.keep if watch else None,
        )
    for message in trained.skipped_checkpoints:
        say(message)
    logits, labels = evaluate(
        model, run.data.test, batch_size=run.batch_size, device=run.device, precision="bf16", track=run.track
    )
    arm = Arm(
        name=f"{name} (probed)" if probed else name,
        quality=quality(logits, labels),
        train_ne=trained.train_ne,
        rows_per_second=trained.rows_per_second,
        runs=fp8_runs(model),
    )
    result = ArmResult(arm=arm, logits=logits, labels=labels)
    _write(folder, result)
    return result


@dataclass(frozen=True)
class _Watch:
    """A probe whose statistics are saved with every checkpoint, so that both resume together."""

    probe: Probe
    folder: Path

    def keep(self, step: int) -> None:
        if step % _CHECKPOINT_EVERY == 0:
            self.probe.stats().save(self.folder)


def _saved_stats(folder: Path) -> Stats | None:
    try:
        return Stats.load(folder)
    except FileRefused:
        return None


def _drop_unwatched(checkpoints: Path, folder: Path) -> None:
    """Starts the probed arm over when its statistics do not reach its newest checkpoint.

    A kill between the two saves leaves steps that trained without being watched.
    """
    newest = newest_step(checkpoints)
    stats = _saved_stats(folder)
    watched = stats.steps if stats else 0
    if newest == watched:
        return
    say(f"statistics cover {watched} steps and the checkpoint {newest}: the probed run starts over")
    for leftover in (checkpoints, folder):
        if leftover.exists():
            shutil.rmtree(leftover)


def _candidates(model: nn.Module) -> list[list[Any]]:
    return [[name, *site.candidates] for name, site in sites_of(model).items()]


def _write(folder: Path, result: ArmResult) -> None:
    tensors = folder / "held_out.safetensors"
    write_tensors(tensors, {"logits": torch.from_numpy(result.logits), "labels": torch.from_numpy(result.labels)})
    finished = _Finished(
        name=result.arm.name,
        train_ne=result.arm.train_ne,
        rows_per_second=result.arm.rows_per_second,
        runs=result.arm.runs,
        held_out=sha256_of_file(tensors),
    )
    write_record(folder / "arm.json", kind=_KIND, version=_VERSION, content=encode(finished))


def _read(folder: Path) -> ArmResult | None:
    def parse(content: dict[str, Any]) -> ArmResult:
        found = decode(_Finished, content)
        held_out = read_tensors(
            folder / "held_out.safetensors", sha256=found.held_out, way_out="the arm is trained again"
        )
        logits, labels = held_out["logits"].numpy(), held_out["labels"].numpy()
        arm = Arm(
            name=found.name,
            quality=quality(logits, labels),
            train_ne=found.train_ne,
            rows_per_second=found.rows_per_second,
            runs=found.runs,
        )
        return ArmResult(arm=arm, logits=logits, labels=labels)

    try:
        return read_record(
            folder / "arm.json", kind=_KIND, version=_VERSION, way_out="the arm is trained again", parse=parse
        )
    except FileRefused:
        return None
