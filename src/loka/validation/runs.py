"""The runs of a validation, kept on disk: train one, evaluate it on held-out rows, never train it twice.

    out/runs/<arm>-<seed>/run.json                record: who it is, its quality, its curve
    out/runs/<arm>-<seed>/held_out.safetensors    logits [N] float32 and labels [N], checksum in the record;
                                                  also logits by the mean of the weights, where one was kept
    out/runs/<arm>-<seed>/checkpoints/            while it trains; removed when it is done

A killed run goes on from its newest checkpoint, and a finished one is read back. A file that is damaged
means that the run is done again; a run of something else, or of a model that began otherwise, is refused.
"""

from __future__ import annotations

import math
import re
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from loka.core.exceptions import FileRefused, LokaError, NonFinite
from loka.core.progress import Track
from loka.core.storage.codec import record, sparse
from loka.core.storage.files import digest_of, read_tensors, remove_unfinished, sha256_of_file, write_tensors
from loka.core.storage.record_file import RecordFile
from loka.data.batch import Source, tasks_of
from loka.nn import check_finite, fp8_runs
from loka.train.average import as_averaged
from loka.train.checkpointing.checkpoint import identity_in
from loka.train.checkpointing.rhythm import EVERY
from loka.train.config import TrainConfig, as_recorded
from loka.train.length import Length
from loka.train.loop import TrainLog, TrainResult, evaluate, train
from loka.train.metrics import Quality, columns, quality_by_task
from loka.train.run import Callback
from loka.validation.arms import ArmSpec, title_of
from loka.validation.initial import differences, initial_state, settings_differing

_WAY_OUT = "the run is done again"
_POINTS = 100  # of a training curve

Progress = Callable[[str, TrainLog], None]
# Stands around the training of a model whose checkpoints lie in the folder; what it gives is told each step.
Watch = Callable[[nn.Module, TrainConfig, Path], AbstractContextManager[Callable[[int], None] | None]]


@record(row=True)
@dataclass(frozen=True)
class CurvePoint:
    """Progressive NE after `rows` training rows: of all so far, and of those since the last point."""

    rows: int
    ne: float
    recent_ne: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """One arm trained with one seed. `fp8` counts FP8 GEMMs by site (`nn.fp8_runs`).

    `rows_per_second` is that of the process that ended it, 0 where that had nothing left to train.
    `mean_quality` is that of the mean of its weights, where the config kept one; `final_rate` the learning
    rate of the last step as a share of the peak. `broke` says where a NaN or infinity ended it; it has no
    quality then. Of several tasks there is one of these for each, named by `task`.
    """

    arm: str
    seed: int
    quality: Quality | None = None
    train_ne: float = math.nan
    rows_per_second: float = 0.0
    curve: tuple[CurvePoint, ...] = ()
    fp8: Mapping[str, int] = field(default_factory=dict)
    mean_quality: Quality | None = None
    final_rate: float = 1.0
    broke: str = ""
    task: str = sparse("")

    @property
    def title(self) -> str:
        return title_of(self.arm, self.task)


def _check(found: _Finished) -> None:
    missing = (found.run.quality is None, found.held_out is None)
    if missing != ((True, True) if found.run.broke else (False, False)):
        raise ValueError("it has to hold a quality and predictions, or say where the run ended in NaN")


@record(check=_check)
@dataclass(frozen=True, kw_only=True)
class _Finished(RecordFile, kind="loka-validation-run", version=1, way_out=_WAY_OUT):
    """`run.json`: a run, its identity, and the checksum of its predictions (None where it broke).

    Of several tasks `run` is that of the first, `others` those of the others.
    """

    run: Run
    identity: Mapping[str, Any]
    held_out: str | None
    others: tuple[Run, ...] = sparse(())

    @property
    def runs(self) -> tuple[Run, ...]:
        return (self.run, *self.others)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all runs of a validation share. `build` makes a fresh model after the seed was set."""

    build: Callable[[], nn.Module]
    train: Source
    test: Source
    config: TrainConfig
    out: Path
    identity: Mapping[str, Any]
    track: Track
    on_log: Progress | None = None

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks; of one alone "", as runs always had it."""
        found = tasks_of(self.test)
        return found if len(found) > 1 else ("",)


@dataclass(frozen=True)
class HeldOut:
    """Logits and labels of the held-out rows, all [N] or [N, tasks], in order; `mean_logits` are those of
    the mean of the weights, None where none was kept."""

    logits: npt.NDArray[np.float32]
    labels: npt.NDArray[np.float32]
    mean_logits: npt.NDArray[np.float32] | None = None

    def by_task(self, tasks: Sequence[str]) -> dict[str, HeldOut]:
        """Those of each task by itself, [N]."""
        parts = [columns(self.logits), columns(self.labels)]
        parts += [] if self.mean_logits is None else [columns(self.mean_logits)]
        return {name: HeldOut(*each) for name, each in zip(tasks, zip(*parts, strict=True), strict=True)}


def run(bench: Bench, arm: ArmSpec, seed: int, *, watch: Watch | None = None) -> tuple[Run, ...]:
    """Trains `arm` with `seed`, or reads back the run that did: one `Run` for each task.

    Raises:
        LokaError: the folder holds a run of another model, other rows, or another configuration.
        CheckpointRefused: so do its checkpoints.
    """
    folder = folder_of(bench.out, arm.name, seed)
    config = _config(bench, seed)
    torch.manual_seed(seed)
    model = bench.build()
    identity = {**_identity(bench, arm, config), "initial": initial_state(model)}
    done = _finished(folder, identity)
    if done is not None:
        _tidy(folder)
        return done
    try:
        finished, held_out = _train(bench, arm, config, folder, watch, model, identity["initial"])
    except NonFinite as error:
        broken = Run(arm=arm.name, seed=seed, broke=str(error))
        finished = tuple(replace(broken, task=task) for task in bench.tasks)
        held_out = None
    digest = None
    if held_out is not None:
        tensors = folder / "held_out.safetensors"
        parts = {name: torch.from_numpy(part) for name, part in vars(held_out).items() if part is not None}
        write_tensors(tensors, parts)
        digest = sha256_of_file(tensors)
    first, *others = finished
    _Finished(run=first, identity=identity, held_out=digest, others=tuple(others)).save(folder / "run.json")
    _tidy(folder)
    return finished


def _tidy(folder: Path) -> None:
    """Removes what a run goes on from. One that was killed here has its record, and may still have that."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    remove_unfinished(folder)
    (folder / "curve.json").unlink(missing_ok=True)  # of an earlier version


def held_out(out: Path, arm: str, seed: int) -> HeldOut:
    """The predictions of a finished run. Raises FileRefused where they are missing or damaged."""
    folder = folder_of(out, arm, seed)
    sha256 = _record(folder).held_out
    if sha256 is None:
        why = [f"{arm} with seed {seed} ended in NaN"]
        raise FileRefused(f"{folder} holds no predictions", why=why, way_out="leave out that pair")
    tensors = read_tensors(folder / "held_out.safetensors", sha256=sha256, way_out=_WAY_OUT)
    return HeldOut(**{name: tensor.numpy() for name, tensor in tensors.items()})


def has_run(out: Path, arm: str, seed: int) -> bool:
    """Whether a finished run lies there, of whatever."""
    return (folder_of(out, arm, seed) / "run.json").exists()


def folder_of(out: Path, arm: str, seed: int) -> Path:
    return out / "runs" / f"{re.sub(r'[^A-Za-z0-9_.+-]', '_', arm)}-{seed}"


def _config(bench: Bench, seed: int) -> TrainConfig:
    """Log lines and checkpoints fall on the same steps, fixed ones, so that a resumed curve has no seam."""
    steps = Length.of(bench.train, bench.config).steps
    every = max(steps // _POINTS, 1)
    between = -(-(bench.config.checkpoint_every or EVERY) // every) * every
    return replace(bench.config, seed=seed, log_every=every, checkpoint_every=between)


def world_of(bench: Bench) -> str:
    """A digest of what pairs share: model, rows and configuration, without the seed."""
    return digest_of(_shared(bench))[:16]


def setting_of(bench: Bench) -> str:
    """The same of any model: rows and configuration."""
    shared = _shared(bench)
    del shared["model"]
    return digest_of(shared)[:16]


def _shared(bench: Bench) -> dict[str, Any]:
    shared = _identity(bench, None, bench.config)
    del shared["arm"], shared["config"]["seed"]
    return shared


def _identity(bench: Bench, arm: ArmSpec | None, config: TrainConfig) -> dict[str, Any]:
    return {
        "arm": {"name": arm.name, **arm.identity} if arm else None,
        "config": config.identity(),
        "train": [bench.train.identity, bench.train.rows],
        "test": [bench.test.identity, bench.test.rows],
        "model": dict(bench.identity),
    }


def _finished(folder: Path, identity: Mapping[str, Any]) -> tuple[Run, ...] | None:
    try:
        found = _record(folder)
        if found.held_out is not None:
            path = folder / "held_out.safetensors"
            if not path.exists() or sha256_of_file(path) != found.held_out:
                return None
    except FileRefused:
        return None
    there = dict(found.identity)
    there["config"] = as_recorded(there.get("config"), identity["config"])
    if "initial" not in there:
        warnings.warn(
            f"runs in {folder.parent} are of before 2026-11-28 and do not say what their model began as: whether it "
            "is this one goes by its name",
            RuntimeWarning,
            stacklevel=2,
        )
        there["initial"] = identity["initial"]
    differs = [part for part in identity if identity[part] != there.get(part)]
    if differs:
        named = [part for part in differs if part != "initial"]
        raise LokaError(
            f"{folder} holds a run of something else",
            why=[
                *(line for part in named for line in settings_differing(part, there.get(part), identity[part])),
                *differences(there["initial"], identity["initial"]),
            ],
            way_out="choose another output folder, or remove that one; weights that NumPy or `random` draws are others "
            "each time: draw them by torch, whose seed is set",
        )
    return found.runs


def _record(folder: Path) -> _Finished:
    return _Finished.load(folder / "run.json")


def _train(
    bench: Bench,
    arm: ArmSpec,
    config: TrainConfig,
    folder: Path,
    watch: Watch | None,
    model: nn.Module,
    initial: Mapping[str, Any],
) -> tuple[tuple[Run, ...], HeldOut]:
    """Trains `model` as `arm` has it, from its latest checkpoint if there is one, and evaluates it on held-out rows.

    Returns a `Run` for each task, and the predictions. Raises NonFinite where it ends in NaN.
    """
    if (folder / "curve.json").exists():
        # An earlier version kept a curve apart from the checkpoints: going on would lose its beginning.
        _tidy(folder)
    model.to(config.device)
    arm.apply(model)
    curve = _Curve()

    def log(line: TrainLog) -> None:
        curve.add(line)
        if bench.on_log:
            bench.on_log(f"{arm.name} seed {config.seed}", line)

    checkpoints = folder / "checkpoints"
    identity = {"arm": {"name": arm.name, **arm.identity}, "model": dict(bench.identity)}
    begun = identity_in(checkpoints)
    if begun is None or "initial" in (begun.get("extra") or {}):  # those of before 2026-11-28 do not say it
        identity["initial"] = dict(initial)
    with nullcontext() if watch is None else watch(model, config, checkpoints) as on_step:
        trained = train(
            model,
            bench.train,
            config=config,
            callback=curve,
            identity_extra=identity,
            checkpoints=checkpoints,
            track=bench.track,
            on_log=log,
            on_step=on_step,
            check=check_finite,
        )
    for message in trained.skipped_checkpoints:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return _evaluated(bench, arm, config, model, trained, curve)


def _evaluated(
    bench: Bench, arm: ArmSpec, config: TrainConfig, model: nn.Module, trained: TrainResult, curve: _Curve
) -> tuple[tuple[Run, ...], HeldOut]:
    """The same of a model that is `trained`; with the mean of its weights too, where that was kept."""

    def predict() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        return evaluate(
            model,
            bench.test,
            batch_size=config.batch_size,
            device=config.device,
            precision=config.precision,
            track=bench.track,
        )

    logits, labels = predict()
    mean_logits = None
    if trained.average is not None:
        with as_averaged(model, trained.average, rows=bench.train, config=config):
            mean_logits, _ = predict()
    found = quality_by_task(bench.tasks, logits, labels)
    of_mean = None if mean_logits is None else quality_by_task(bench.tasks, mean_logits, labels)
    finished = tuple(
        Run(
            arm=arm.name,
            seed=config.seed,
            quality=found[task],
            train_ne=reading.lifetime.ne,
            rows_per_second=trained.rows_per_second,
            curve=curve.points(place),
            fp8=fp8_runs(model),
            mean_quality=of_mean[task] if of_mean else None,
            final_rate=trained.final_rate,
            task=task,
        )
        for place, (task, reading) in enumerate(zip(bench.tasks, trained.reading_by_task.values(), strict=True))
    )
    return finished, HeldOut(logits, labels, mean_logits)


class _Curve(Callback):
    """Log lines of a run that may be killed: they lie in each checkpoint that it may go on from. A line is NE
    and recent NE, of each task in turn."""

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, ...]] = {}

    def add(self, line: TrainLog) -> None:
        both = zip(line.reading_by_task.values(), line.recent_ne_by_task.values(), strict=True)
        self._points[line.rows] = tuple(ne for reading, recent in both for ne in (reading.lifetime.ne, recent))

    def state(self) -> dict[str, Any]:
        return {str(rows): list(line) for rows, line in self._points.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._points = {int(rows): tuple(line) for rows, line in state.items()}

    def points(self, task: int = 0) -> tuple[CurvePoint, ...]:
        """Of that task, by its place."""
        return tuple(CurvePoint(rows, *line[2 * task : 2 * task + 2]) for rows, line in sorted(self._points.items()))
