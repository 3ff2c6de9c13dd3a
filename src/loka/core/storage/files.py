"""Files that LoKA writes and reads: versioned JSON with a checksum, written atomically.

A record file is `{"kind", "version", "sha256", "content"}`. The checksum covers the
canonical JSON of `content`, so truncation and hand edits are both noticed. Nothing here
can execute code: JSON for records, safetensors for arrays.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import gzip
import hashlib
import json
import lzma
import os
import secrets
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from loka.core.exceptions import FileRefused, LokaError, MissingLibrary, NotWritten
from loka.core.storage.untrusted import Limits, open_regular, parse_json, read_bounded

if TYPE_CHECKING:
    import torch


T = TypeVar("T")

_LIMITS = Limits()
_UNFINISHED = ".unfinished"
PACKAGE = Path(__file__).parents[2]
_PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": functools.partial(gzip.compress, mtime=0),  # the same record makes the same bytes
    ".xz": lzma.compress,
}


def sha256_of_file(path: Path) -> str:
    """Raises OSError where it cannot be read, or is no regular file."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def digest_of_sources(*parts: str, package: Path = PACKAGE) -> str:
    """sha256 of LoKA's own Python files and their names; `parts` are folders and files of the package."""
    digest = hashlib.sha256()
    paths = [package / part for part in parts]
    for file in sorted(file for path in paths for file in ([path] if path.suffix else path.rglob("*.py"))):
        digest.update(file.relative_to(package).as_posix().encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def write_atomic(path: Path, data: bytes) -> None:
    """Writes `data` so that a reader sees the old file or the new one, never a part. It is readable by whom
    the umask says. Of a link, the file that it points to is written.

    Raises:
        NotWritten: the disk is full or refuses, or `path` is no regular file; it is as it was.
    """
    with writing(path):
        path = file_behind(path)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(6)}{_UNFINISHED}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        _forget(temporary)
        if isinstance(error, OSError):
            raise _not_written(path, error) from error
        raise
    sync_folder(path.parent)


def real_path(path: Path) -> Path:
    """Where a link leads in the end; another path stays as it is written."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def file_behind(path: Path) -> Path:
    """What to rename a finished file to, for it to be written to `path`: a rename to a link would replace the link,
    and one to /dev/null the device, for every process of the machine.

    Raises OSError where a folder, a device, a pipe or a loop of links stands there.
    """
    real = real_path(path)
    try:
        mode = real.stat().st_mode
    except FileNotFoundError:
        return real
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return real


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system refuses inside is of `path`: for writes that `write_atomic` does not make.

    Raises NotWritten in the place of OSError; other errors of LoKA pass.
    """
    try:
        yield
    except LokaError:
        raise
    except OSError as error:
        raise _not_written(path, error) from error


def require_writable(folder: Path) -> None:
    """Makes `folder`, and writes to it and takes that back: for long work whose result it is to hold.

    Raises NotWritten where the disk is full or refuses.
    """
    trial = folder / f".{secrets.token_hex(6)}{_UNFINISHED}"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            trial.write_bytes(b"0")
        finally:
            trial.unlink(missing_ok=True)


def remove_unfinished(folder: Path, name: str | None = None) -> None:
    """Temporary files that killed processes left in `folder`, or of the file of that name; nobody else writes
    there now."""
    for left in folder.glob(f".{'*' if name is None else glob.escape(name) + '.*'}{_UNFINISHED}"):
        left.unlink(missing_ok=True)


def _forget(temporary: Path) -> None:
    with contextlib.suppress(OSError):  # such as a folder that is a file: why it failed is said already
        temporary.unlink(missing_ok=True)


def _not_written(path: Path, error: OSError) -> NotWritten:
    there = os.path.lexists(path)
    standing = f"{path} is as it was before" if there else f"there is no {path}, nor a part of it"
    no_file = error.errno in (errno.EISDIR, errno.EINVAL, errno.ELOOP)
    other = "name another file" if no_file else "free space, or choose another folder"
    return NotWritten(
        f"cannot write {path}",
        why=[error.strerror or str(error), standing],
        way_out=f"{other}, then run the same again",
    )


def is_own_file(name: str) -> bool:
    """Whether a record may name a file of its folder so: not one elsewhere, nor what no file is called."""
    return Path(name).name == name and name not in ("", "..") and name.isprintable()


def sync_folder(folder: Path) -> None:
    """Makes a rename in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest_of(content: Any) -> str:
    """sha256 of JSON values, in any order of their names."""
    return hashlib.sha256(canonical(content)).hexdigest()


def write_record(path: Path, *, kind: str, version: int, content: Mapping[str, Any]) -> None:
    """Compressed where `path` ends in ".gz" or ".xz", as `read_record` takes it."""
    record = {"kind": kind, "version": version, "sha256": digest_of(content), "content": content}
    data = json.dumps(record, indent=1, allow_nan=False).encode() + b"\n"
    pack = _PACKERS.get(path.suffix)
    write_atomic(path, pack(data) if pack else data)


def read_json(path: Path, what: str, *, way_out: str, parse: Callable[[Any], T]) -> T:
    """`parse` applied to a JSON file that users write, `what` it is. Raises FileRefused, which names the field."""
    try:
        return parse(parse_json(read_bounded(path, _LIMITS), _LIMITS))
    except (OSError, ValueError, EOFError, RecursionError) as error:
        why = "there is no such file" if isinstance(error, FileNotFoundError) else error
        raise FileRefused(f"cannot use {path} as {what}", why=[str(why)], way_out=way_out) from error


def read_record(
    path: Path, *, kind: str, version: int, way_out: str, parse: Callable[[dict[str, Any]], T], limits: Limits = _LIMITS
) -> T:
    """`parse` applied to the content of a record file; one ending in ".gz" or ".xz" was compressed so.

    Raises:
        FileRefused: missing, truncated, edited, of another kind, from a newer LoKA, beyond `limits`, or
            `parse` raised.
    """

    def refuse(reason: str) -> FileRefused:
        return FileRefused(f"cannot use {path} as a {kind}", why=[reason], way_out=way_out)

    try:
        data = read_bounded(path, limits)
    except FileNotFoundError:
        raise refuse("there is no such file") from None
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
        packed = path.suffix.removeprefix(".")
        raise refuse(f"it is not whole {packed} data ({error}); it was truncated or overwritten") from error
    except OSError as error:
        raise refuse(f"it cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise refuse(f"{error}, and no record does") from error
    try:
        record = parse_json(data, limits)
        whole = data.endswith(b"\n") or path.suffix in _PACKERS
        del data
        if not isinstance(record, dict) or not {"kind", "version", "sha256", "content"} <= set(record):
            raise refuse("it lacks the fields kind, version, sha256 and content")
        if record["kind"] != kind:
            raise refuse(f"it is a {str(record['kind'])[:80]}")
        if type(found := record["version"]) is not int or found != version:  # true is 1 to Python
            raise refuse(f"it has format version {str(found)[:80]}, and this LoKA reads {version}")
        if digest_of(record["content"]) != record["sha256"]:
            raise refuse("its checksum differs: it was edited or damaged after LoKA wrote it")
        if not whole:
            raise refuse("it lacks its last newline: it was truncated")
    except RecursionError:
        raise refuse("its JSON is nested deeper than any record") from None
    except ValueError as error:
        raise refuse(f"it is not complete JSON ({error}); it was truncated or overwritten") from error
    try:
        return parse(record["content"])
    except (FileRefused, MissingLibrary):
        raise
    except Exception as error:  # what a reader of fields raises on values that nobody expects has no bounds
        why = str(error).splitlines()[0] if str(error) else ""
        raise refuse(f"its content is not that of a {kind} ({type(error).__name__}: {why[:200]})") from error


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes CPU copies of `tensors` as safetensors, atomically."""
    write_atomic(path, tensors_to_bytes(tensors))


def tensors_to_bytes(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Raises LokaError for dtypes that safetensors does not know."""
    flat = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        return bytes(_safetensors().save(flat))
    except KeyError as error:
        (dtype,) = error.args
        raise LokaError(
            f"safetensors stores no {dtype}",
            why=[name for name, tensor in flat.items() if tensor.dtype == dtype],
            way_out="cast these tensors to another dtype, such as complex128 to complex64",
        ) from error


def tensors_from_bytes(data: bytes) -> dict[str, torch.Tensor]:
    return dict(_safetensors().load(data))


def read_tensors(path: Path, *, sha256: str, way_out: str) -> dict[str, torch.Tensor]:
    """Reads a safetensors file whose checksum a record states."""

    def refuse(reason: str) -> FileRefused:
        return FileRefused(f"cannot use {path}", why=[reason], way_out=way_out)

    try:
        with open_regular(path) as file:
            data = file.read()
    except OSError as error:
        raise refuse(f"it cannot be read ({error.strerror})") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise refuse("its checksum differs from the one in the record beside it: truncated or damaged")
    library = _safetensors()
    try:
        return dict(library.load(data))
    except Exception as error:  # SafetensorError, which has no base but Exception; torch's on odd shapes
        raise refuse(f"it is not safetensors data ({error})") from error


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise MissingLibrary(
            "statistics are stored as safetensors, which is not installed", way_out="pip install safetensors"
        ) from error
    return safetensors.torch
