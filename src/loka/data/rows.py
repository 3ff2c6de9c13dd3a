"""Row ranges of a table that may span files and formats, streamed in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from loka.core.exceptions import DataRefused
from loka.data.files import TableFile
from loka.data.schema import Schema
from loka.data.text import Chunk, text_chunks

PARQUET_ROWS = 32768


@lru_cache(maxsize=1024)
def count_rows(file: TableFile, schema: Schema) -> int:
    """Rows of a file: from the footer of a parquet file, by one parse of the lines of a text file."""
    if file.format == "parquet":
        with _parquet(file) as parquet:
            schema.locate(parquet.schema_arrow.names, where=str(file.path))
            rows = parquet.metadata.num_rows
        if not rows:
            raise DataRefused(f"{file.path}: the file has no rows")
        return rows
    return sum(len(chunk) for chunk in text_chunks(file, schema, label_only=True))


def read_rows(files: tuple[TableFile, ...], schema: Schema, *, first: int, last: int) -> Iterator[Chunk]:
    """Rows [first, last) of the files taken one after the other.

    Parquet row groups before `first` are not read; lines of a text file are parsed and left.
    """
    position = 0
    for file in files:
        rows = count_rows(file, schema)
        low, high = max(first - position, 0), min(last - position, rows)
        if low < high:
            yield from _file_rows(file, schema, low, high)
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
        for batch in batches:
            low, high = max(first - position, 0), min(last - position, batch.num_rows)
            position += batch.num_rows
            if low < high:
                # Selecting again: pyarrow returns columns in file order, not in the order asked for.
                table = pa.Table.from_batches([batch]).select(names).rename_columns(list(schema.columns))
                yield Chunk(table=table, skipped=np.zeros(len(table), np.int64)).rows(low, high)


def _parquet(file: TableFile) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(file.path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataRefused(f"{file.path}: not a readable parquet file", why=[str(error)]) from error
