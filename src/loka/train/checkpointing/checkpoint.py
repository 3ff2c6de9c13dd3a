"""Checkpoints that are either complete or absent.

    run/step-00000100/state.pt        torch.save, read back with weights_only=True
    run/step-00000100/manifest.json   a record: step, sha256 of state.pt, identity of the run

A checkpoint is written to a sibling folder, flushed to disk, and then renamed. A save that is killed leaves a folder
whose name starts with a dot; loading reports it, and the next save removes it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from loka.core.exceptions import CheckpointRefused, FileRefused
from loka.core.exchange import ranks_of
from loka.core.signature import MODEL_OPTIONS
from loka.core.storage.files import sha256_of_file
from loka.core.storage.record_file import RecordFile
from loka.train.checkpointing.identity import layout
from loka.train.checkpointing.resharding import taken_over, whole_state
from loka.train.checkpointing.sharded import damage, is_sharded, read_manifest, read_own, require_same_run
from loka.train.checkpointing.step_folders import (
    CheckpointNotSaved,
    altered,
    checkpoints_in,
    clean,
    differences_between,
    named_step,
    not_saved,
    put_in_place,
    read_state,
    remove_old,
    require_run,
    require_step,
    step_of,
    step_paths,
    unfinished_in,
    write_state,
)
from loka.train.ranks import together

__all__ = ["Checkpoint", "CheckpointNotSaved", "load_newest", "load_one", "newest_step", "save"]


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after `step` steps. `skipped`: which newer checkpoints were passed over, and why.

    `of_ranks`: several ranks wrote it, in shards. `sharded`: it is such a checkpoint, and `state` holds only what
    belongs to this rank. `identity`: which run it is of.
    """

    step: int
    state: dict[str, Any]
    path: Path
    skipped: tuple[str, ...] = ()
    sharded: bool = False
    of_ranks: bool = False
    identity: Mapping[str, Any] = field(default_factory=dict)


def save(folder: Path, *, step: int, state: Mapping[str, Any], identity: Mapping[str, Any], keep: int = 2) -> Path:
    """Writes `folder/step-...` and removes all but the newest `keep` up to this step.

    Raises:
        CheckpointNotSaved: the disk is full or refuses; earlier checkpoints are as before.
    """
    unfinished, target = step_paths(folder, step)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clean(folder)
        try:
            _write(unfinished, step=step, state=state, identity=identity)
            put_in_place(unfinished, target)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        remove_old(folder, step=step, keep=keep)
    except (OSError, RuntimeError) as error:
        raise not_saved(target, error) from error
    return target


def load_newest(folder: Path, *, identity: Mapping[str, Any] | None = None, steps: int = 0) -> Checkpoint | None:
    """The newest usable checkpoint in `folder` on the CPU, or None when it holds none. A collective.

    Without an `identity` it may be of any run. With one, a checkpoint of several ranks comes without weights
    and optimizer state, which `restore_sharded` reads to where they go.

    Args:
        steps: of the run in all, which another number of ranks has to take too.

    Raises:
        CheckpointRefused: there are checkpoints and none is usable; or one is of another run, of one process
            where there are several, or of an earlier version of LoKA, which had a folder for each rank.
    """
    _refuse_folders_of_ranks(folder)
    candidates = checkpoints_in(folder)
    _, told = together(lambda: [path.name for path in candidates])
    if len(set(told)) > 1:
        raise CheckpointRefused(
            f"the ranks find other checkpoints in {folder}",
            why=[f"rank {rank}: {names}" for rank, names in enumerate(told)],
            way_out="all ranks save to and go on from one folder: put it where all see it",
        )
    reasons = []
    for path in candidates:
        (state, _), told = together(partial(_attempt, path, identity, steps), lambda found: found[1])
        if bad := [why for why in told if why]:
            reasons.append((path, bad[0]))
            continue
        reasons += [(left, "its save was interrupted") for left in unfinished_in(folder)]
        skipped = tuple(f"{bad}: {why}; used {path.name} instead" for bad, why in reasons)
        return _found(path, state, identity, skipped)
    if not candidates:  # a first save that was killed leaves nothing to resume from
        return None
    raise CheckpointRefused(
        f"no checkpoint in {folder} can be used",
        why=[f"{path.name}: {why}" for path, why in reasons],
        way_out="restore one from a copy, or start over in an empty folder",
    )


def load_one(path: Path) -> Checkpoint | None:
    """A checkpoint of any run: `path` itself, such as "step-00000100", or the newest usable one in it. None where there
    is none.

    Raises:
        CheckpointRefused: there is one, and it is damaged.
    """
    if not named_step(path):
        return load_newest(path)
    if not path.is_dir():
        return None
    try:
        return _found(path, _read(path, None, 0), None, ())
    except FileRefused as error:
        raise CheckpointRefused(
            f"{path} cannot be used", why=error.why, way_out="name another checkpoint of the run"
        ) from error


_OF_TORCHREC = ".embedding_bags."  # weights of an EmbeddingBagCollection


def require_model(found: Checkpoint, model: nn.Module) -> bool:
    """Checks that the run of `found` trained a model such as this one: weights may fit by name and shape alone.

    Returns whether the kinds of modules were compared too. They are not where TorchRec has sharded tables and put
    modules of its own in, nor where the checkpoint does not say of which model it is.

    Raises CheckpointRefused, with what differs.
    """
    mine, saved = layout(model), found.identity.get("model")
    sharded = found.of_ranks and any(_OF_TORCHREC in f".{name}" for name in found.state["model"])
    if not isinstance(saved, dict):
        return False
    if differences := differences_between(saved | ({"layout": mine["layout"]} if sharded else {}), mine, "model"):
        raise CheckpointRefused(
            f"the run of {found.path} trained another model than this {mine['class']}",
            why=[*differences, "a layout is the kinds of all modules, and names, shapes and dtypes of weights"],
            way_out=f"build the model as that run did: {MODEL_OPTIONS}",
        )
    return not sharded


def holds_checkpoints(folder: Path) -> bool:
    return bool(checkpoints_in(folder))


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint in `folder`, usable or not; 0 when there is none."""
    return max(map(step_of, checkpoints_in(folder)), default=0)


def identity_in(folder: Path) -> dict[str, Any] | None:
    """The identity in the newest checkpoint in `folder` that has one. Nothing else is read or checked."""
    for path in checkpoints_in(folder):
        try:
            return identity_at(path)
        except FileRefused:
            continue
    return None


def identity_at(path: Path) -> dict[str, Any]:
    """The identity of the run in the checkpoint at `path`. Raises FileRefused where it does not say."""
    return read_manifest(path).identities[0] if is_sharded(path) else _manifest(path).identity


def given_plan_in(folder: Path) -> tuple[dict[str, Any], Path] | None:
    """A state for `plan_in`, with the plan that the run in `folder` began by, and where it was found."""
    for path in checkpoints_in(folder):
        try:
            return (read_own(path, 0) if is_sharded(path) else _read(path, None, 0)), path
        except FileRefused:
            continue
    return None


def _found(
    path: Path, state: dict[str, Any], identity: Mapping[str, Any] | None, skipped: tuple[str, ...]
) -> Checkpoint:
    sharded = is_sharded(path)
    if sharded and identity is None:
        state = whole_state(path, read_manifest(path))
    own = sharded and identity is not None
    return Checkpoint(step_of(path), state, path, skipped, own, of_ranks=sharded, identity=identity_at(path))


def _attempt(path: Path, identity: Mapping[str, Any] | None, steps: int) -> tuple[dict[str, Any], str]:
    try:
        return _read(path, identity, steps), ""
    except FileRefused as error:
        return {}, "; ".join(error.why)


def _refuse_folders_of_ranks(folder: Path) -> None:
    old = [path for path in sorted(folder.glob("rank-*")) if checkpoints_in(path)]
    if old:
        raise CheckpointRefused(
            f"{folder} holds a folder of checkpoints for each rank, as LoKA wrote them until 2026-11",
            why=[", ".join(path.name for path in old)],
            way_out="finish that run with the version that began it, or start over in an empty folder",
        )


def _read(path: Path, identity: Mapping[str, Any] | None, steps: int) -> dict[str, Any]:
    """The state in `path`; of a checkpoint of several ranks, the part of this rank.

    Raises FileRefused: it is damaged. CheckpointRefused: it is of another run.
    """
    if is_sharded(path):
        manifest = read_manifest(path)
        if identity is not None:
            require_same_run(path, manifest, identity, steps=steps)
        if reason := damage(path, manifest):
            raise FileRefused(f"cannot use {path}", why=[reason])
        return taken_over(path, manifest)
    if ranks_of() > 1 and identity is not None:
        raise CheckpointRefused(
            f"{path} is of one process, and {ranks_of()} ranks are here",
            way_out="go on without torchrun, or start over in an empty folder",
        )
    found = _manifest(path)
    if identity is not None:
        require_run(path, found.identity, identity)
    file = path / "state.pt"
    reason = altered(file, sha256=found.sha256, size=found.bytes)
    if reason:
        raise FileRefused(f"cannot use {path}", why=[reason])
    return read_state(file)


def _manifest(path: Path) -> _Manifest:
    manifest = _Manifest.load(path / "manifest.json")
    require_step(path, manifest.step)
    return manifest


# 2: with the plan, and what FP8 sites carry
@dataclass(frozen=True)
class _Manifest(RecordFile, kind="training checkpoint", version=2, way_out="use another one"):
    step: int
    bytes: int
    sha256: str
    identity: dict[str, Any]


def _write(folder: Path, *, step: int, state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    folder.mkdir()
    file = folder / "state.pt"
    write_state(file, state)
    manifest = _Manifest(step, file.stat().st_size, sha256_of_file(file), dict(identity))
    # This flushes the folder too, in which state.pt has its name already.
    manifest.save(folder / "manifest.json")
