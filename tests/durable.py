"""What reaches the disk in which order: a power cut loses renames and bytes that were not flushed."""

import errno
import os


def full(handle):
    """In the place of a flush."""
    raise OSError(errno.ENOSPC, "No space left on device")


def watch_disk(monkeypatch):
    """("flush", path) and ("rename", new path) as they come, of this process."""
    seen = []
    fsync, replace, rename = os.fsync, os.replace, os.rename

    def flushed(handle):
        seen.append(("flush", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def replaced(old, new):
        replace(old, new)
        seen.append(("rename", str(new)))

    def renamed(old, new):
        rename(old, new)
        seen.append(("rename", str(new)))

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(os, "rename", renamed)
    return seen


def flushed_before(seen, new, suffix):
    """Whether a file whose name ends so was flushed before `new` got its name."""
    before = seen[: seen.index(("rename", str(new)))]
    return any(what == "flush" and path.endswith(suffix) for what, path in before)


def folder_flushed_after(seen, new):
    """Whether the folder that holds `new` was flushed after it got its name."""
    return ("flush", str(new.parent)) in seen[seen.index(("rename", str(new))) :]
