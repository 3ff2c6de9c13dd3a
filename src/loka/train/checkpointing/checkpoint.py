"""Checkpoints that are whole or not there.

    run/step-00000100/state.pt        torch.save, read back with weights_only=True
    run/step-00000100/manifest.json   a record: step, sha256 of state.pt, identity of the run

A checkpoint is written to a sibling folder, flushed to disk, and renamed. A killed save
leaves a folder that starts with a dot, which loading reports and the next save removes.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from loka.core.exceptions import CheckpointRefused, FileRefused, LokaError, NotWritten
from loka.core.storage.codec import decode
from loka.core.storage.files import canonical, read_record, sha256_of_file, sync_folder, write_record
from loka.train.config import as_recorded

_KIND, _VERSION = "training checkpoint", 2  # 2: with the plan, and what FP8 sites carry
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED, _REMOVED = ".unfinished-", ".removed-"


class CheckpointNotSaved(LokaError):
    """A checkpoint could not be written; the earlier ones are untouched."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after `step` steps. `skipped` says what was passed over, and why."""

    step: int
    state: dict[str, Any]
    path: Path
    skipped: tuple[str, ...] = ()


def save(
    folder: Path, *, step: int, state: Mapping[str, Any], identity: Mapping[str, Any], keep: int = 2
) -> Path:
    """Writes `folder/step-...` and removes all but the newest `keep` up to this step.

    Raises:
        CheckpointNotSaved: the disk is full or refuses; earlier checkpoints are as before.
    """
    target = folder / f"step-{step:08d}"
    unfinished = folder / f"{_UNFINISHED}{target.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clean(folder)
        try:
            _write(unfinished, step=step, state=state, identity=identity)
            _put_in_place(unfinished, target)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        for old in [path for path in _newest_first(folder) if _step_of(path) <= step][keep:]:
            _remove(old)
    except (OSError, RuntimeError) as error:
        raise CheckpointNotSaved(
            f"cannot save {target}",
            why=[_reason(error), _standing(folder)],
            way_out="free space or choose another folder, then resume from the checkpoint before it",
        ) from error
    return target


def load_newest(
    folder: Path, *, identity: Mapping[str, Any] | None = None, at_most: int | None = None
) -> Checkpoint | None:
    """The newest usable checkpoint in `folder` on the CPU, or None when it holds none.

    Without an `identity` it may be of any run. Later ones than of step `at_most` are passed over.

    Raises:
        CheckpointRefused: there are checkpoints and none is usable, or one is of another run.
    """
    candidates = [path for path in _newest_first(folder) if at_most is None or _step_of(path) <= at_most]
    reasons = []
    for path in candidates:
        try:
            state = _read(path, identity)
        except FileRefused as error:
            reasons.append((path, "; ".join(error.why)))
            continue
        reasons += [(left, "its save was interrupted") for left in _unfinished(folder)]
        skipped = tuple(f"{bad}: {why}; used {path.name} instead" for bad, why in reasons)
        return Checkpoint(_step_of(path), state, path, skipped)
    if not candidates:  # a first save that was killed leaves nothing to resume from
        return None
    raise CheckpointRefused(
        f"no checkpoint in {folder} can be used",
        why=[f"{path.name}: {why}" for path, why in reasons],
        way_out="restore one from a copy, or start over in an empty folder",
    )


def load_one(path: Path) -> Checkpoint | None:
    """Of any run: `path` itself, "step-00000100", or the newest usable one in it. None where it holds none.

    Raises:
        CheckpointRefused: there is one, and it is damaged.
    """
    if not _NAME.fullmatch(path.name):
        return load_newest(path)
    if not path.is_dir():
        return None
    try:
        return Checkpoint(_step_of(path), _read(path, None), path)
    except FileRefused as error:
        raise CheckpointRefused(
            f"{path} cannot be used", why=error.why, way_out="name another checkpoint of the run"
        ) from error


def holds_checkpoints(folder: Path) -> bool:
    return bool(_newest_first(folder))


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint in `folder`, usable or not; 0 when there is none."""
    return max(map(_step_of, _newest_first(folder)), default=0)


def _reason(error: OSError | RuntimeError) -> str:
    if isinstance(error, NotWritten):
        return error.why[0]
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]


def _standing(folder: Path) -> str:
    """What a run that ends now would resume from."""
    left = _newest_first(folder)
    return f"{left[0].name} is the newest checkpoint, as it was" if left else "there is no earlier checkpoint"


def _read(path: Path, identity: Mapping[str, Any] | None) -> dict[str, Any]:
    """The state in `path`. FileRefused: damaged. CheckpointRefused: of another run."""
    manifest = read_record(
        path / "manifest.json",
        kind=_KIND,
        version=_VERSION,
        way_out="use another one",
        parse=partial(decode, _Manifest),
    )
    differences = _from_run(manifest.identity, identity) if identity is not None else []
    if differences:
        raise CheckpointRefused(
            f"{path} belongs to another run",
            why=differences,
            way_out="use the values of that run to resume it, or choose another folder for this one",
        )
    if manifest.step != _step_of(path):
        raise FileRefused(f"cannot use {path}", why=[f"its manifest is that of step {manifest.step}"])
    file = path / "state.pt"
    try:
        if sha256_of_file(file) != manifest.sha256:
            size = file.stat().st_size
            reason = f"the checksum of state.pt differs ({size} bytes, {manifest.bytes} were written)"
            raise FileRefused(f"cannot use {path}", why=[reason])
    except OSError as error:
        raise FileRefused(f"cannot use {path}", why=[f"state.pt: {error.strerror}"]) from error
    try:
        state = torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:  # what torch raises on bytes that it did not write has no bounds
        raise FileRefused(f"cannot use {path}", why=[_why_unloadable(error)]) from error
    if not isinstance(state, dict):
        raise FileRefused(f"cannot use {path}", why=[f"state.pt holds a {type(state).__name__}, not a state"])
    return state


def _why_unloadable(error: Exception) -> str:
    """Without torch's own advice, which is to load the file with the code in it allowed to run."""
    named = re.search(r"GLOBAL (\S+) was not an allowed global", str(error))
    if named:
        return f"state.pt does not load: it asks for {named[1]}, and code from a checkpoint is not run"
    if isinstance(error, pickle.UnpicklingError):
        return "state.pt does not load: it holds more than tensors, numbers and text, and code is not run"
    return f"state.pt does not load: it is damaged ({type(error).__name__})"


@dataclass(frozen=True)
class _Manifest:
    step: int
    bytes: int
    sha256: str
    identity: dict[str, Any]


def _from_run(saved: dict[str, Any], identity: Mapping[str, Any]) -> list[str]:
    """How a checkpoint's run differs from the one of `identity`."""
    wanted = json.loads(canonical(identity))
    saved = _as_today(saved, wanted)
    if "config" in saved and "config" in wanted:
        saved = {**saved, "config": as_recorded(saved["config"], wanted["config"])}
    return _differences(saved, wanted)


# Of earlier versions, which could run several layers as one: what ran so, and what watched or allowed it.
_RAN, _AROUND = ("wholes", "turned"), ("valve", "chains", "chain_recipes")


def _as_today(saved: dict[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of such a run without what today's lack. Layers that did run as one stay, and differ."""
    plan, beside = saved.get("plan"), saved.get("beside")
    if isinstance(plan, dict):
        saved = {**saved, "plan": {name: value for name, value in plan.items() if value or name not in _RAN}}
    if isinstance(beside, dict) and beside:
        saved = {**saved, "beside": _dropped(beside, wanted.get("beside")) or None}
    return saved


def _dropped(saved: Any, wanted: Any) -> Any:
    if not isinstance(saved, dict):
        return saved
    there = wanted if isinstance(wanted, dict) else {}
    kept = {name: value for name, value in saved.items() if name in there or name not in _AROUND}
    return {name: _dropped(value, there.get(name)) for name, value in kept.items()}


def _differences(saved: Any, current: Any, name: str = "") -> list[str]:
    """One line per leaf that differs between two JSON values."""
    if not (isinstance(saved, dict) and isinstance(current, dict)):
        return [] if saved == current else [f"{name}: {saved!r} in the checkpoint, {current!r} now"]
    lines = []
    for key in sorted(saved.keys() | current.keys()):
        inner = f"{name}.{key}" if name else key
        lines += _differences(saved.get(key), current.get(key), inner)
    return lines


def _write(folder: Path, *, step: int, state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    folder.mkdir()
    file = folder / "state.pt"
    with _Written(file, "wb") as stream:
        try:
            torch.save(dict(state), stream)
        except RuntimeError:  # "[enforce fail at inline_container.cc:672]": torch keeps to itself what failed
            if stream.failed is None:
                raise
            raise stream.failed from None
        os.fsync(stream.fileno())
    manifest = _Manifest(step, file.stat().st_size, sha256_of_file(file), dict(identity))
    # This flushes the folder too, in which state.pt has its name already.
    write_record(folder / "manifest.json", kind=_KIND, version=_VERSION, content=asdict(manifest))


class _Written(io.FileIO):
    """A file that remembers the error it raised."""

    failed: OSError | None = None

    def write(self, data: Any) -> int:
        view, done = memoryview(data).cast("B"), 0
        try:
            while done < len(view):  # one call takes 2 GB at most, and a nearly full disk less
                done += super().write(view[done:])
        except OSError as error:
            self.failed = error
            raise
        return done


def _put_in_place(unfinished: Path, target: Path) -> None:
    if target.exists():  # it was skipped as unusable, and the run reached this step again
        _remove(target)
    os.rename(unfinished, target)
    sync_folder(target.parent)


def _remove(path: Path) -> None:
    """Renames first: a removal that is cut short leaves no half checkpoint under a valid name."""
    removed = path.with_name(f"{_REMOVED}{path.name}")
    os.rename(path, removed)
    shutil.rmtree(removed, ignore_errors=True)


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match
    return int(match[1])


def _newest_first(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=_step_of)[::-1]


def _unfinished(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{_UNFINISHED}*"))


def _clean(folder: Path) -> None:
    for path in [*_unfinished(folder), *folder.glob(f"{_REMOVED}*")]:
        shutil.rmtree(path)
