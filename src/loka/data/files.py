"""Which files a table consists of, and what kind each is."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loka.core.exceptions import DataRefused, MissingLibrary, UnknownName

COPY_AGAIN = "copy it again, or leave it out"
NAME_THE_FORMAT = "name the format, or pass a schema (--schema FILE) with the file's separator and header"

FORMATS = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "tsv", ".txt": "tsv"}
# What pyarrow's input streams decompress, by suffix.
COMPRESSIONS = (".gz", ".bz2", ".zst", ".lz4")

Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True, kw_only=True)
class TableFile:
    """One file as it was when opened; size and mtime tell an edited file from the one that was counted."""

    path: Path
    format: str
    size: int
    mtime_ns: int

    @property
    def compressed(self) -> bool:
        """Whether a text file has to be read from its beginning."""
        return self.path.suffix.lower() in COMPRESSIONS


def open_files(paths: Paths, *, format: str | None = None) -> tuple[TableFile, ...]:
    """The files in the order given, their format from the suffix unless `format` names it."""
    require_pyarrow()
    if format is not None and format not in FORMATS.values():
        raise UnknownName(f"format {format!r}", why=[f"known: {', '.join(sorted(set(FORMATS.values())))}"])
    many = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not many:
        raise DataRefused("no files given", way_out="pass one path or a sequence of paths")
    return tuple(_open(Path(path), format) for path in many)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Puts the file's name before what is refused of it."""
    try:
        yield
    except DataRefused as error:
        raise DataRefused(f"{path}: {error.what}", why=error.why, way_out=error.way_out) from error


def require_pyarrow() -> None:
    """Raise `MissingLibrary` unless pyarrow can be imported."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise MissingLibrary(
            "reading tables needs pyarrow", why=[str(error)], way_out="pip install 'loka[data]'"
        ) from error


def _open(path: Path, format: str | None) -> TableFile:
    try:
        status = path.stat()
    except OSError as error:
        raise DataRefused(
            f"{path}: cannot be opened", why=[str(error)], way_out="check the path and who may read it"
        ) from error
    if not path.is_file():
        raise DataRefused(
            f"{path}: not a file", way_out="pass the files of a folder one by one, or open_shards for a prepared folder"
        )
    if status.st_size == 0:
        raise DataRefused(f"{path}: the file is empty", way_out=COPY_AGAIN)
    return TableFile(path=path, format=format or _format(path), size=status.st_size, mtime_ns=status.st_mtime_ns)


def _format(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    if not suffixes or suffixes[-1] not in FORMATS:
        raise DataRefused(
            f"{path}: the suffix does not say how to read it",
            why=[f"known: {', '.join(FORMATS)}, text also with {', '.join(COMPRESSIONS)}"],
            way_out="rename it, or pass format='parquet', 'csv' or 'tsv' (--format of `loka data convert`)",
        )
    return FORMATS[suffixes[-1]]
