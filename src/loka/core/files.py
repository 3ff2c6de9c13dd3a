"""Files that LoKA writes and reads: versioned JSON with a checksum, written atomically.

A record file is `{"kind", "version", "sha256", "content"}`. The checksum covers the
canonical JSON of `content`, so truncation and hand edits are both noticed. Nothing here
can execute code: JSON for records, safetensors for arrays.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from loka.core.exceptions import FileRefused, MissingLibrary

if TYPE_CHECKING:
    import torch


T = TypeVar("T")


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomic(path: Path, data: bytes) -> None:
    """Writes `data` so that a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes a rename in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def write_record(path: Path, *, kind: str, version: int, content: Mapping[str, Any]) -> None:
    digest = hashlib.sha256(canonical(content)).hexdigest()
    record = {"kind": kind, "version": version, "sha256": digest, "content": content}
    write_atomic(path, json.dumps(record, indent=1, allow_nan=False).encode() + b"\n")


def read_record(
    path: Path, *, kind: str, version: int, way_out: str, parse: Callable[[dict[str, Any]], T]
) -> T:
    """`parse` applied to the content of a record file; one ending in ".gz" was compressed with gzip.

    Raises:
        FileRefused: missing, truncated, edited, of another kind, or from a newer LoKA.
    """

    def refuse(reason: str, remedy: str = way_out) -> FileRefused:
        return FileRefused(f"cannot use {path} as a {kind}", why=[reason], way_out=remedy)

    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        record = json.loads(data, parse_constant=_no_constant)
    except FileNotFoundError:
        raise refuse("there is no such file") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise refuse(f"it is not whole gzip data ({error}); it was truncated or overwritten") from error
    except OSError as error:
        raise refuse(f"it cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise refuse(f"it is not complete JSON ({error}); it was truncated or overwritten") from error
    if not isinstance(record, dict) or not {"kind", "version", "sha256", "content"} <= set(record):
        raise refuse("it lacks the fields kind, version, sha256 and content")
    if record["kind"] != kind:
        raise refuse(f"it is a {record['kind']}")
    if record["version"] != version:
        raise refuse(f"it has format version {record['version']}, and this LoKA reads {version}")
    if hashlib.sha256(canonical(record["content"])).hexdigest() != record["sha256"]:
        raise refuse("its checksum differs: it was edited or damaged after LoKA wrote it")
    try:
        return parse(record["content"])
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise refuse(f"its content is not that of a {kind} ({type(error).__name__}: {error})") from error


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes CPU copies of `tensors` as safetensors, atomically."""
    write_atomic(path, tensors_to_bytes(tensors))


def tensors_to_bytes(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """As safetensors."""
    flat = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return bytes(_safetensors().save(flat))


def tensors_from_bytes(data: bytes) -> dict[str, torch.Tensor]:
    return dict(_safetensors().load(data))


def read_tensors(path: Path, *, sha256: str, way_out: str) -> dict[str, torch.Tensor]:
    """Reads a safetensors file whose checksum a record states."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileRefused(f"cannot read {path}", why=[str(error)], way_out=way_out) from error
    if hashlib.sha256(data).hexdigest() != sha256:
        reason = "its checksum differs from the one in the record beside it: truncated or damaged"
        raise FileRefused(f"cannot use {path}", why=[reason], way_out=way_out)
    return tensors_from_bytes(data)


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise MissingLibrary(
            "statistics are stored as safetensors, which is not installed",
            way_out="pip install safetensors",
        ) from error
    return safetensors.torch
