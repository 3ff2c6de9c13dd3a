"""Writing a shard of prepared clicks; `loka.data.formats.shards` says what is in it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from loka.core.storage.files import sync_folder
from loka.data.block import Block, merged

if TYPE_CHECKING:
    import pyarrow as pa

UNFINISHED = ".unfinished-"


class ShardWriter:
    """Writes blocks as one shard; the file has its name only once it is whole and on the disk."""

    def __init__(self, folder: Path, name: str, *, group_rows: int) -> None:
        self._target, self._unfinished = folder / name, folder / f"{UNFINISHED}{name}"
        self._group_rows = group_rows
        self.name = name
        self._held: list[Block] = []
        self._writer: Any = None
        self.rows = 0

    def add(self, block: Block) -> None:
        """Append rows; ids must be below 2**31."""
        self._held.append(block)
        self.rows += len(block)
        waiting = sum(map(len, self._held))
        if waiting >= self._group_rows:
            self._flush(waiting - waiting % self._group_rows)

    def finish(self) -> int:
        """Put the shard in place and return its size in bytes; without rows there is no file, and 0."""
        if not self.rows:
            return 0
        self._flush(sum(map(len, self._held)))
        self._writer.close()
        with self._unfinished.open("rb") as file:
            os.fsync(file.fileno())
        size = self._unfinished.stat().st_size
        os.replace(self._unfinished, self._target)
        sync_folder(self._target.parent)
        return size

    def abandon(self) -> None:
        """Remove what was written."""
        if self._writer is not None:
            with contextlib.suppress(OSError, ValueError):  # the disk that was full when it was written to
                self._writer.close()
        self._unfinished.unlink(missing_ok=True)

    def _flush(self, rows: int) -> None:
        if not rows:
            return
        whole = merged(self._held)
        table = shard_table(whole.rows(0, rows))
        if self._writer is None:
            self._writer = shard_file(self._unfinished, table.schema)
        self._writer.write_table(table, row_group_size=self._group_rows)
        self._held = [whole.rows(rows, len(whole))] if rows < len(whole) else []


def shard_table(block: Block) -> pa.Table:
    """The rows of a block in a shard's columns; no value is null."""
    import pyarrow as pa

    columns = {}
    for name, array in block.arrays().items():
        if name != "counts" and array.shape[1:] != (0,):  # Arrow divides by the size of a list
            kind = np.float32 if name in ("dense", "label") else np.int32
            values = pa.array(np.ascontiguousarray(array, kind).reshape(-1))
            if array.ndim == 2:
                item = pa.field("item", values.type, nullable=False)
                values = pa.FixedSizeListArray.from_arrays(values, type=pa.list_(item, array.shape[1]))
            columns[name] = values
    fields = [pa.field(name, values.type, nullable=False) for name, values in columns.items()]
    return pa.table(list(columns.values()), schema=pa.schema(fields))


def shard_file(path: Path, schema: pa.Schema) -> Any:
    """A parquet writer with a shard's settings."""
    from pyarrow import parquet

    # Nobody filters by hashed ids and logarithms: no dictionary, no statistics.
    return parquet.ParquetWriter(
        path, schema, compression="lz4", use_dictionary=False, write_statistics=False, write_page_checksum=True
    )
