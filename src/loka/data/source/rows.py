"""Row ranges of a table that may span files and formats, streamed in bounded memory, or in pieces."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from loka.core.exceptions import DataRefused
from loka.data.files import COPY_AGAIN, TableFile
from loka.data.schema import Schema
from loka.data.source.text import Chunk, text_chunks

PARQUET_ROWS = 32768


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a file that can be read by itself: rows [first, last) of parquet, or the lines of text that
    begin in those bytes. `last` None is a compressed text, which has no parts.
    """

    file: TableFile
    first: int
    last: int | None


def pieces_of(file: TableFile, schema: Schema, *, target: int) -> list[Piece]:
    """The file in pieces of about `target` bytes as stored; parquet is cut between row groups."""
    if file.format != "parquet":
        if file.compressed:
            return [Piece(file=file, first=0, last=None)]
        bounds = [*range(0, file.size, target), file.size]
        return [Piece(file=file, first=a, last=b) for a, b in pairwise(bounds)]
    count_rows(file, schema)  # refuses what does not fit the schema before the work begins
    with _parquet(file) as parquet:
        groups = [parquet.metadata.row_group(g) for g in range(parquet.num_row_groups)]
        rows = np.cumsum([0] + [group.num_rows for group in groups])
        sizes = np.cumsum([0] + [max(group.total_byte_size, 1) for group in groups])
    cuts = [0, *(np.flatnonzero(np.diff(sizes[:-1] // target)) + 1), len(groups)]
    bounds = sorted({int(rows[cut]) for cut in cuts})
    return [Piece(file=file, first=a, last=b) for a, b in pairwise(bounds)]


def piece_chunks(piece: Piece, schema: Schema) -> Iterator[Chunk]:
    """The rows of a piece in order."""
    if piece.file.format == "parquet":
        assert piece.last is not None
        return _parquet_rows(piece.file, schema, piece.first, piece.last)
    return text_chunks(piece.file, schema, span=None if piece.last is None else (piece.first, piece.last))


@lru_cache(maxsize=65536)
def count_piece(piece: Piece, schema: Schema) -> int:
    """Rows of a piece."""
    if piece.file.format == "parquet":
        assert piece.last is not None
        return piece.last - piece.first
    span = None if piece.last is None else (piece.first, piece.last)
    return sum(len(chunk) for chunk in text_chunks(piece.file, schema, label_only=True, span=span))


@lru_cache(maxsize=1024)
def count_rows(file: TableFile, schema: Schema) -> int:
    """Rows of a file: from the footer of a parquet file, by one parse of the lines of a text file."""
    if file.format == "parquet":
        with _parquet(file) as parquet:
            schema.locate(parquet.schema_arrow.names, where=str(file.path))
            rows = parquet.metadata.num_rows
        if not rows:
            raise DataRefused(f"{file.path}: the file has no rows", way_out="leave it out")
        return rows
    return sum(len(chunk) for chunk in text_chunks(file, schema, label_only=True))


def read_rows(
    files: tuple[TableFile, ...], schema: Schema, *, first: int, last: int
) -> Iterator[tuple[TableFile, Chunk]]:
    """Rows [first, last) of the files taken one after the other, with the file that they are of.

    Parquet row groups before `first` are not read; lines of a text file are parsed and left.
    """
    position = 0
    for file in files:
        rows = count_rows(file, schema)
        low, high = max(first - position, 0), min(last - position, rows)
        if low < high:
            yield from ((file, chunk) for chunk in _file_rows(file, schema, low, high))
        position += rows


def _file_rows(file: TableFile, schema: Schema, first: int, last: int) -> Iterator[Chunk]:
    if file.format == "parquet":
        yield from _parquet_rows(file, schema, first, last)
        return
    position = 0
    for chunk in text_chunks(file, schema):
        low, high = max(first - position, 0), min(last - position, len(chunk))
        position += len(chunk)
        if low < high:
            yield chunk.rows(low, high)
        if position >= last:
            return


def _parquet_rows(file: TableFile, schema: Schema, first: int, last: int) -> Iterator[Chunk]:
    import pyarrow as pa

    with _parquet(file) as parquet:
        present = parquet.schema_arrow.names
        names = [present[place] for place in schema.locate(present, where=str(file.path))]
        ends = np.cumsum([parquet.metadata.row_group(g).num_rows for g in range(parquet.num_row_groups)])
        starts = np.concatenate([[0], ends[:-1]])
        groups = [int(g) for g in np.flatnonzero((ends > first) & (starts < last))]
        position = int(starts[groups[0]])
        batches = parquet.iter_batches(batch_size=PARQUET_ROWS, row_groups=groups, columns=names)
        for batch in _read(batches, file):
            low, high = max(first - position, 0), min(last - position, batch.num_rows)
            position += batch.num_rows
            if low < high:
                # Selecting again: pyarrow returns columns in file order, not in the order asked for.
                table = pa.Table.from_batches([batch]).select(names).rename_columns(list(schema.columns))
                yield Chunk(table=table, skipped=np.zeros(len(table), np.int64)).rows(low, high)


def _read(batches: Iterator[Any], file: TableFile) -> Iterator[Any]:
    try:
        yield from batches
    except NotImplementedError as error:  # of lists of dictionaries, in several row groups
        raise DataRefused(
            f"{file.path}: pyarrow cannot read a column as it is stored",
            why=[str(error)],
            way_out="store lists of plain strings or integers",
        ) from error
    except (OSError, ValueError) as error:  # pyarrow's errors are of these two
        raise DataRefused(f"{file.path}: the parquet file is damaged", why=[str(error)], way_out=COPY_AGAIN) from error


def _parquet(file: TableFile) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(file.path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataRefused(f"{file.path}: not a readable parquet file", why=[str(error)], way_out=COPY_AGAIN) from error
