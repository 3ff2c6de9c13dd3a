"""Checkpoints of several ranks: tensors by torch.distributed.checkpoint (DCP), the rest of each rank beside.

    run/step-00000100/__3_0.distcp    what rank 3 wrote of the tensors of the run: DCP
    run/step-00000100/.metadata       where each part of each tensor lies: DCP
    run/step-00000100/rank-3.pt       what is rank 3's alone, read back with weights_only=True
    run/step-00000100/manifest.json   a record: step, ranks, sha256 of each file, the run's identities

All ranks write to one folder, which all see. It is a sibling of the last one, flushed and hashed by who wrote
it, and renamed by rank 0 once everyone is done: a rank that is killed leaves a folder that starts with a dot.
DCP's metadata is a pickle; it is read without running what it names (`_Metadata`).
"""

import contextlib
import enum
import json
import pickle
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from loka.core.exceptions import CheckpointRefused, FileRefused, first_line, truncated
from loka.core.exchange import rank_of, ranks_of
from loka.core.storage.codec import decode, encode
from loka.core.storage.files import is_own_file, sha256_of_file
from loka.core.storage.record_file import RecordFile
from loka.core.storage.untrusted import open_regular
from loka.train.checkpointing.state import unfit_state
from loka.train.checkpointing.step_folders import (
    UNFINISHED,
    altered,
    clean,
    not_saved,
    put_in_place,
    read_state,
    remove_old,
    require_run,
    require_step,
    step_paths,
    write_state,
)
from loka.train.ranks import RankFailed, all_or_none, first_rank, together

_METADATA = ".metadata"
_SHOWN, _PAUSE = 65.0, 0.1  # seconds; NFS keeps what it knows of a folder for up to 60, by default
_SEEN_BY_ALL = "put it where all ranks see it: they save to and go on from one folder"


@dataclass(frozen=True)
class File:
    """A file of a checkpoint, as its manifest lists it."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest(RecordFile, kind="sharded training checkpoint", version=1, way_out="use another one"):
    """`identities` are of the ranks, in their order; `steps` is how many the run takes in all."""

    step: int
    steps: int
    ranks: int
    files: dict[str, File]
    identities: tuple[dict[str, Any], ...]


def is_sharded(path: Path) -> bool:
    """Whether a folder is a checkpoint of several ranks, or was meant to be one."""
    return not (path / "state.pt").exists() and any(path.glob("rank-*.pt"))


def require_one_folder(folder: Path) -> None:
    """Raises CheckpointRefused on all ranks where some see another `folder` than rank 0, whose lock it holds. A
    collective.

    Rank 0 makes a folder in it that the others look for, for `_SHOWN` seconds: another machine that found no `folder`
    before keeps that answer for a while, where a file system is shared over a network. Where rank 0 cannot make it, on
    a full disk say, nothing is compared.
    """
    _, names = together(lambda: f"{UNFINISHED}{secrets.token_hex(8)}")
    mark = folder / names[0]

    def mark_folder() -> bool:
        with contextlib.suppress(OSError):
            if first_rank():
                mark.mkdir()
            return True
        return False

    _, marked = together(mark_folder)
    if marked[0] == str(False):
        return
    _, seen = together(lambda: _seen_in_time(mark))
    if first_rank():
        shutil.rmtree(mark, ignore_errors=True)
    if blind := [
        f"rank {rank} does not see what rank 0 writes" for rank, found in enumerate(seen) if found != str(True)
    ]:
        raise CheckpointRefused(f"{folder} is not one folder on all ranks", why=blind, way_out=_SEEN_BY_ALL)


def _seen_in_time(mark: Path) -> bool:
    end = time.monotonic() + _SHOWN
    while not (found := mark.is_dir()) and time.monotonic() < end:
        time.sleep(_PAUSE)
    return found


def save_sharded(
    folder: Path,
    *,
    step: int,
    steps: int,
    tensors: Mapping[str, torch.Tensor],
    own: Mapping[str, Any],
    identity: Mapping[str, Any],
    keep: int,
) -> None:
    """Writes `folder/step-...`, and removes all but the newest `keep` up to this step. A collective.

    Args:
        tensors: DTensors, or tensors that are equal on all ranks, of which one rank writes each.
        own: of this rank: tensors, numbers and text.

    Raises:
        CheckpointNotSaved: a rank could not write its part; on all ranks. Earlier checkpoints are as before.
    """
    unfinished, target = step_paths(folder, step)
    rank = dist.get_rank()

    def begin() -> None:
        if first_rank():
            folder.mkdir(parents=True, exist_ok=True)
            clean(folder)
            unfinished.mkdir()

    def seen() -> None:
        if not unfinished.is_dir():
            raise OSError(f"{folder} is another folder on rank {rank} than on rank 0: all have to see one")

    def write() -> dict[str, Any]:
        try:
            write_state(unfinished / f"rank-{rank}.pt", own)
        except RuntimeError as error:
            raise OSError(first_line(error)) from error
        mine = [*unfinished.glob(f"__{rank}_*"), unfinished / f"rank-{rank}.pt"]
        if first_rank():
            mine.append(unfinished / _METADATA)
        return {file.name: encode(File(file.stat().st_size, sha256_of_file(file))) for file in mine}

    def finish() -> None:
        if first_rank():
            files = {name: decode(File, found) for one in map(json.loads, file_lists) for name, found in one.items()}
            manifest = Manifest(step, steps, ranks_of(), files, tuple(map(json.loads, identities)))
            manifest.save(unfinished / "manifest.json")
            put_in_place(unfinished, target)
            remove_old(folder, step=step, keep=keep)

    try:
        together(begin)
        together(seen)
        _write_tensors(unfinished, tensors)
        _, file_lists = together(write, json.dumps)
        _, identities = together(lambda: dict(identity), json.dumps)
        together(finish)
    except (OSError, RankFailed) as error:  # but no RuntimeError: a rank that is gone ends the run
        if first_rank():
            shutil.rmtree(unfinished, ignore_errors=True)
        raise not_saved(target, error) from error


def _write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes the tensors by DCP. Raises OSError on all ranks where that failed on one."""
    import torch.distributed.checkpoint as dcp  # 0.3 s

    try:
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder, sync_files=True))
    except dcp.CheckpointException as error:  # no Exception, but a BaseException
        failed = [f"rank {rank}: {cause[0]}" for rank, cause in sorted(error.failures.items())]
        raise OSError("; ".join(failed)) from error


def read_manifest(path: Path) -> Manifest:
    """Raises FileRefused where it is damaged, missing or another step's."""
    manifest = Manifest.load(path / "manifest.json")
    wanted = {_METADATA, *(f"rank-{rank}.pt" for rank in range(manifest.ranks))}
    require_step(path, manifest.step)
    if manifest.ranks < 1 or len(manifest.identities) != manifest.ranks or wanted - manifest.files.keys():
        raise FileRefused(f"cannot use {path}", why=["its manifest does not fit itself"])
    return manifest


def damage(path: Path, manifest: Manifest) -> str:
    """The first reason why one of the files that this rank has to look at is not as it was written; "" where there is
    none.
    """
    files = sorted(manifest.files)
    for name in files[rank_of() :: ranks_of()]:
        written = manifest.files[name]
        if not is_own_file(name):
            return f"its manifest names {name!r}, which is no file of the folder"
        reason = altered(path / name, sha256=written.sha256, size=written.bytes)
        if reason:
            return reason
    return ""


def require_same_run(path: Path, manifest: Manifest, identity: Mapping[str, Any], *, steps: int) -> None:
    """Raises CheckpointRefused where the checkpoint is of another run, or so many ranks cannot go on with it."""
    ranks = ranks_of()
    if ranks == manifest.ranks:
        saved = manifest.identities[rank_of()]
        require_run(path, saved, identity)
        return
    if any(one != manifest.identities[0] for one in manifest.identities) or "rank" in identity["source"]:
        raise CheckpointRefused(
            f"{path} is of {manifest.ranks} ranks, and {ranks} are here",
            why=["each read rows of its own, which nobody can share out anew"],
            way_out=f"go on with {manifest.ranks} ranks, or train on loka.data.Dealt rows from the start",
        )
    require_run(
        path,
        _of_any_ranks(manifest.identities[0]),
        _of_any_ranks(identity),
        of_ranks=f"batch_size, max_rows: of all ranks together; {manifest.ranks} ranks before, {ranks} now",
    )
    if steps != manifest.steps:
        raise CheckpointRefused(
            f"{path} is of a run of {manifest.steps} steps, and {ranks} ranks would take {steps}",
            why=["the last step of an epoch has too few rows for as many ranks"],
            way_out=f"go on with {manifest.ranks} ranks or fewer",
        )


# Parts of a rank's batch, which has other rows now; how ranks exchange.
_OF_RANKS = ("accumulate", "gather", "gradients")


def _of_any_ranks(identity: Mapping[str, Any]) -> dict[str, Any]:
    config = {name: value for name, value in identity["config"].items() if name not in _OF_RANKS}
    return {**identity, "config": config}


def read_own(path: Path, rank: int) -> dict[str, Any]:
    """What belonged to one rank alone. Raises FileRefused."""
    return read_state(path / f"rank-{rank}.pt")


def read_tensors(path: Path, wanted: Callable[[Mapping[str, Any]], Mapping[str, torch.Tensor]]) -> None:
    """Reads tensors into those that `wanted` returns, given DCP's metadata by name. A collective.

    Into a DTensor goes the part of this rank, however many ranks wrote it.

    Raises CheckpointRefused: the checkpoint holds no such tensor, or of another shape.
    """
    import torch.distributed.checkpoint as dcp

    reader = dcp.FileSystemReader(path)

    def targets() -> Mapping[str, torch.Tensor]:
        saved = _metadata(path).state_dict_metadata
        into = wanted(saved)
        lines = [
            f"{name}: {tuple(tensor.shape)} here, "
            + (f"{tuple(saved[name].size)} there" if name in saved else "not in the checkpoint")
            for name, tensor in into.items()
            if name not in saved or saved[name].size != tensor.shape
        ]
        if lines:
            raise unfit_state(path, truncated(lines, 20))
        return into

    into = all_or_none(targets)
    reader.read_metadata = lambda *args, **kwargs: _metadata(path, reader.load_id)  # type: ignore[method-assign]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # in one process it says what is meant
        dcp.load(dict(into), storage_reader=reader, no_dist=ranks_of() == 1)


def _metadata(path: Path, load_id: str | None = None) -> Any:
    from torch.distributed.checkpoint.metadata import StorageMeta

    try:
        with open_regular(path / _METADATA) as file:
            metadata = _Metadata(file).load()
    except pickle.UnpicklingError as error:
        raise FileRefused(f"cannot use {path}", why=[str(error)]) from error
    metadata.storage_meta = metadata.storage_meta or StorageMeta()
    metadata.storage_meta.load_id = load_id
    return metadata


class _Metadata(pickle.Unpickler):
    """An unpickler that makes nothing but the values by which DCP describes tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        plain = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
        allowed = module in plain and name in _DESCRIPTIONS
        allowed = allowed or (module, name) in _VALUES
        allowed = allowed or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))
        if not allowed:
            raise pickle.UnpicklingError(f"{_METADATA} asks for {module}.{name}, and code from a checkpoint is not run")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Any:
    """What pickles of Python before 3.11.4 ask `getattr` for: a member of an enum, and nothing else."""
    if not isinstance(kind, enum.EnumMeta):
        raise pickle.UnpicklingError(f"{_METADATA} asks for {name} of {kind}, which is no enum")
    return kind[name]


_DESCRIPTIONS = {
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
    "_StorageInfo",
}
_VALUES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
}
