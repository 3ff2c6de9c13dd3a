"""The folders of checkpoints, step-00000100, and the files in them that hold plain state.

Of one process (checkpoint.py) and of several (sharded.py) alike: written beside, flushed, renamed.
"""

import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from loka.core.exceptions import CheckpointRefused, FileRefused, LokaError
from loka.core.signature import MODEL_OPTIONS
from loka.core.storage.files import canonical, sha256_of_file, sync_folder
from loka.train.config import as_recorded

_NAME = re.compile(r"step-(\d{8,})")
UNFINISHED, _REMOVED = ".unfinished-", ".removed-"


class CheckpointNotSaved(LokaError):
    """A checkpoint could not be written; the earlier ones are untouched."""


def step_paths(folder: Path, step: int) -> tuple[Path, Path]:
    """Where a checkpoint is written, and where it is once it is whole (`put_in_place`)."""
    target = folder / f"step-{step:08d}"
    return folder / f"{UNFINISHED}{target.name}", target


def named_step(path: Path) -> bool:
    return _NAME.fullmatch(path.name) is not None


def put_in_place(unfinished: Path, target: Path) -> None:
    if target.exists():  # it was skipped as unusable, and the run reached this step again
        _remove(target)
    os.rename(unfinished, target)
    sync_folder(target.parent)


def _remove(path: Path) -> None:
    """Renames first: a removal that is cut short leaves no half checkpoint under a valid name."""
    removed = path.with_name(f"{_REMOVED}{path.name}")
    os.rename(path, removed)
    shutil.rmtree(removed, ignore_errors=True)


def step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match
    return int(match[1])


def require_step(path: Path, step: int) -> None:
    """Raises FileRefused where the manifest in `path` is that of another step."""
    if step != step_of(path):
        raise FileRefused(f"cannot use {path}", why=[f"its manifest is that of step {step}"])


def altered(file: Path, *, sha256: str, size: int) -> str:
    """Why a file is not the one that was written; "" where it is."""
    try:
        if sha256_of_file(file) == sha256:
            return ""
        found = file.stat().st_size
        return f"the checksum of {file.name} differs ({found} bytes, {size} were written)"
    except OSError as error:
        return f"{file.name}: {error.strerror}"


def checkpoints_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=step_of)[::-1]


def unfinished_in(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{UNFINISHED}*"))


def clean(folder: Path) -> None:
    for path in [*unfinished_in(folder), *folder.glob(f"{_REMOVED}*")]:
        shutil.rmtree(path)


def remove_old(folder: Path, *, step: int, keep: int) -> None:
    """All checkpoints but the newest `keep` up to `step`."""
    for old in [path for path in checkpoints_in(folder) if step_of(path) <= step][keep:]:
        _remove(old)


def not_saved(target: Path, error: Exception) -> CheckpointNotSaved:
    return CheckpointNotSaved(
        f"cannot save {target}",
        why=[_reason(error), _standing(target.parent)],
        way_out="free space or choose another folder, then resume from the checkpoint before it",
    )


def _reason(error: Exception) -> str:
    if isinstance(error, LokaError) and error.why:
        return error.why[0]
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]


def _standing(folder: Path) -> str:
    left = checkpoints_in(folder)
    return f"{left[0].name} is the newest checkpoint, as it was" if left else "there is no earlier checkpoint"


def write_state(file: Path, state: Mapping[str, Any]) -> None:
    """Flushed to the disk. Raises OSError."""
    with _Written(file, "wb") as stream:
        try:
            torch.save(dict(state), stream)
        except RuntimeError:  # "[enforce fail at inline_container.cc:672]": torch keeps to itself what failed
            if stream.failed is None:
                raise
            raise stream.failed from None
        os.fsync(stream.fileno())


class _Written(io.FileIO):
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


def read_state(file: Path) -> dict[str, Any]:
    """What `write_state` wrote, on the CPU. Raises FileRefused, and runs no code in it."""
    try:
        state = torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:  # what torch raises on bytes that it did not write has no bounds
        raise FileRefused(f"cannot use {file.parent}", why=[_why_unloadable(file, error)]) from error
    if not isinstance(state, dict):
        held = f"{file.name} holds a {type(state).__name__}, not a state"
        raise FileRefused(f"cannot use {file.parent}", why=[held])
    return state


def _why_unloadable(file: Path, error: Exception) -> str:
    """Without torch's own advice, which is to load the file with the code in it allowed to run."""
    named = re.search(r"GLOBAL (\S+) was not an allowed global", str(error))
    if named:
        return f"{file.name} does not load: it asks for {named[1]}, and code from a checkpoint is not run"
    if isinstance(error, pickle.UnpicklingError):
        return f"{file.name} does not load: it holds more than tensors, numbers and text, and code is not run"
    return f"{file.name} does not load: it is damaged ({type(error).__name__})"


def require_run(path: Path, saved: dict[str, Any], identity: Mapping[str, Any], *, of_ranks: str = "") -> None:
    """Raises CheckpointRefused where the checkpoint in `path` is of another run than that of `identity`."""
    differences = _from_run(saved, identity)
    if differences:
        of_model = any(line.startswith("model.") for line in differences)
        raise CheckpointRefused(
            f"{path} belongs to another run",
            why=[*differences, *([of_ranks] if of_ranks else [])],
            way_out=f"use the values of that run to resume it{f' ({MODEL_OPTIONS})' if of_model else ''}, or choose "
            "another folder for this one",
        )


def _from_run(saved: dict[str, Any], identity: Mapping[str, Any]) -> list[str]:
    wanted = json.loads(canonical(identity))
    saved = _as_today(saved, wanted)
    if "config" in saved and "config" in wanted:
        saved = {**saved, "config": as_recorded(saved["config"], wanted["config"])}
    return differences_between(saved, wanted)


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


def differences_between(saved: Any, current: Any, name: str = "") -> list[str]:
    if not (isinstance(saved, dict) and isinstance(current, dict)):
        return [] if saved == current else [f"{name}: {saved!r} in the checkpoint, {current!r} now"]
    lines = []
    for key in sorted(saved.keys() | current.keys()):
        inner = f"{name}.{key}" if name else key
        lines += differences_between(saved.get(key), current.get(key), inner)
    return lines
