"""A folder, or a file, that one process writes to at a time.

The lock is the kernel's (flock), on a file `.lock` that says who holds it. It ends with the process, however
that ends, so a file that a killed process left is no lock. Where a file system knows no locks, as some that
are shared over a network, nothing is refused, and a warning says so once.
"""

import errno
import fcntl
import json
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from loka.core.exceptions import LokaError
from loka.core.storage.files import real_path, remove_unfinished, writing

LOCK = ".lock"


class InUse(LokaError):
    """Another process writes to a folder, or a file."""


@contextmanager
def alone_in(folder: Path, doing: str) -> Iterator[None]:
    """Inside, this process is the only one that is `doing` that (such as "training") in `folder`.

    Raises:
        InUse: another one is, or this one already.
        NotWritten: there can be no such folder, as where a file stands in its place.
    """
    with _alone(folder / LOCK, f"{doing} in {folder}", of=None, chosen="folder"):
        yield


@contextmanager
def alone_with(file: Path, doing: str, *, chosen: str = "file") -> Iterator[None]:
    """Inside, this process is the only one that is `doing` that to `file`, which need not be there. A link and the
    file that it points to are one. `chosen`: what the user gave, such as the folder of the file.

    Raises:
        InUse: as `alone_in`.
    """
    file = real_path(file)
    with _alone(file.with_name(f".{file.name}{LOCK}"), f"{doing} {file}", of=file.name, chosen=chosen):
        yield


@contextmanager
def _alone(path: Path, doing: str, *, of: str | None, chosen: str) -> Iterator[None]:
    """`of`: the file whose unfinished writes are removed, or None for all in the folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _locked(path, doing, chosen)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EROFS):
            with writing(path.parent):
                raise
        handle = None  # nobody writes where nobody may
    else:
        remove_unfinished(path.parent, of)
    try:
        yield
    finally:
        if handle is not None:
            # Still held: whoever opened this file meanwhile sees below that the name is another file's.
            with suppress(OSError):  # the folder may be gone, or be a file now; what locks is the handle
                path.unlink()
            os.close(handle)


def _locked(path: Path, doing: str, chosen: str) -> int | None:
    while True:
        handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(handle)
            os.close(handle)
            raise InUse(
                f"another process is {doing}",
                why=[holder] if holder else (),
                way_out=f"wait for it, stop it, or choose another {chosen}",
            ) from None
        except OSError as error:
            os.close(handle)
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            path.unlink(missing_ok=True)
            warnings.warn(
                f"the file system of {path.parent} has no locks ({error.strerror}): nothing keeps a "
                f"second process from {doing}",
                RuntimeWarning,
                stacklevel=6,
            )
            return None
        if _is_named(path, handle):
            os.ftruncate(handle, 0)
            os.write(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
            return handle
        os.close(handle)  # of a holder that has just removed it


def _is_named(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _holder(handle: int) -> str:
    try:
        found = json.loads(os.pread(handle, 4096, 0))
        pid, host = int(found["pid"]), str(found["host"])[:80]
        own = ", which is this one" if (pid, host) == (os.getpid(), socket.gethostname()[:80]) else ""
        return f"process {pid} on {host}{own} holds it"
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
