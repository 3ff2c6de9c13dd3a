"""What a file of data is, for the identity of runs and conversions: its name, its size and its content.

    up to 16 MiB    sha256 of all of it; copying or touching it changes nothing
    above           sha256 of 16 blocks of 1 MiB, the first, the last and those evenly between; and its mtime

So a file that was replaced is another file, whatever its mtime says. An edit in place of a large one that
keeps size and mtime and lies between the blocks is not seen: reading a terabyte would take an hour.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from loka.core.exceptions import DataRefused
from loka.core.storage.untrusted import open_regular
from loka.data.files import COPY_AGAIN

BLOCK, BLOCKS = 1 << 20, 16


def identity_of(content: Mapping[str, Any]) -> str:
    """sha256 of JSON values: equal ones mean the same rows, or ids."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def content_of(path: Path) -> list[str | int]:
    """JSON values; equal ones mean the same data.

    Raises:
        DataRefused: it cannot be read.
    """
    status = path.stat()
    digest = _digest(path, status.st_size, (status.st_dev, status.st_ino, status.st_ctime_ns))
    whole = status.st_size <= BLOCK * BLOCKS
    return [path.name, status.st_size, digest, *([] if whole else [status.st_mtime_ns])]


@lru_cache(maxsize=65536)
def _digest(path: Path, size: int, state: tuple[int, ...]) -> str:
    """`state` changes with every write, so that the answer may be kept."""
    digest = hashlib.sha256()
    step = max(size - BLOCK, 0) / (BLOCKS - 1) if size > BLOCK * BLOCKS else BLOCK
    try:
        with open_regular(path) as file:
            for index in range(BLOCKS):
                file.seek(int(index * step))
                digest.update(file.read(BLOCK))
    except OSError as error:
        raise DataRefused(f"{path}: cannot be read", why=[str(error)], way_out=COPY_AGAIN) from error
    return digest.hexdigest()
