"""Bytes and JSON out of files that nobody vouches for: regular files, bounded, with finite numbers.

A record is read before its checksum is known to hold, and a checksum that holds says nothing about who wrote
it. So whatever the bytes are, reading them ends, in bounded memory, in a value or in an error.
"""

import errno
import gzip
import io
import json
import lzma
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_PART = 1 << 20
_DICTIONARY = 80 << 20  # bytes that unpacking xz may take: its largest preset takes 65 MiB
_DIGITS = 20  # of 2^64; int() of a text takes time that grows with the square of its length


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a file may hold: bytes, unpacked, and values.

    Two million values are some 600 MB of Python objects at worst, the keys of one object, and the largest report
    that was ever written had a hundred thousand.
    """

    bytes: int = 64 << 20
    values: int = 2_000_000


def open_regular(path: Path) -> BinaryIO:
    """`path` for reading; OSError for a pipe, which would wait for a writer, a device or a folder."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(handle, "rb")


def read_bounded(path: Path, limits: Limits) -> bytes | bytearray:
    """The bytes of a regular file; of one ending in ".gz" or ".xz" those that gzip or xz compressed.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError: it holds more than the limit.
        EOFError, zlib.error, lzma.LZMAError: compressed data are not whole, or ask for too much memory.
    """
    with open_regular(path) as file:
        data: bytes | bytearray = _at_most(file, limits.bytes + 1)
    if path.suffix == ".gz" and len(data) <= limits.bytes:
        with gzip.open(io.BytesIO(data)) as unpacked:
            data = _at_most(unpacked, limits.bytes + 1)
    if path.suffix == ".xz" and len(data) <= limits.bytes:
        data = _unpacked(data, limits.bytes + 1)
    if len(data) > limits.bytes:
        raise ValueError(f"it holds more than {limits.bytes >> 20} MiB")
    return data


def _unpacked(data: bytes | bytearray, most: int) -> bytes:
    """At most so many of the bytes that one stream of xz holds."""
    unpacker = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=_DICTIONARY)
    found = unpacker.decompress(data, most)
    if len(found) < most and not unpacker.eof:
        raise EOFError("it ends within a stream")
    if unpacker.unused_data:
        raise lzma.LZMAError("something follows the stream")
    return found


def _at_most(file: BinaryIO | gzip.GzipFile, most: int) -> bytearray:
    """By parts: `read` sets aside all that it may return, and a limit may be more than there is memory. Grown in
    its place: parts and what they are joined to would take twice as much."""
    found = bytearray()
    while most > len(found) and (part := file.read(min(most - len(found), _PART))):
        found += part
    return found


def parse_json(data: bytes | bytearray, limits: Limits) -> Any:
    """Raises ValueError or RecursionError for what is in no record: NaN, 1e999, integers of 400 digits, a
    name twice in one object, too many values, too deep a nesting."""
    if data.count(b",") + data.count(b"[") + data.count(b"{") > limits.values:
        raise ValueError(f"it holds more than {limits.values} values")
    return json.loads(
        data, parse_constant=_no_constant, parse_float=_finite, parse_int=_whole, object_pairs_hook=_each_once
    )


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Readers differ on which of two values counts; one of them may be what a person saw."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a name twice")
    return found


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is beyond the largest number")
    return value


def _whole(text: str) -> int:
    if len(text.lstrip("-")) > _DIGITS:
        raise ValueError(f"{text[:40]}... has {len(text)} digits")
    return int(text)
