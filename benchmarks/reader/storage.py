"""How fast one thread decodes Criteo-shaped rows, by layout and compression, checksums verified.

python benchmarks/reader/storage.py [--rows 1000000]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet
from rows import draw

from loka.core.table import format_table
from loka.data.block import Block
from loka.data.formats.shard_writer import shard_table

COMPRESSIONS = ("none", "lz4", "zstd", "snappy")
GROUP_ROWS = 16_384
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    block = draw(np.random.default_rng(0), parser.parse_args().rows)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for layout, table in _layouts(block):
            for compression in COMPRESSIONS:
                path = Path(folder) / "rows.parquet"
                _write(path, table, compression)
                rate = max(_rate(path, columns=layout == "40 columns") for _ in range(ROUNDS))
                lines.append(
                    (layout, compression, f"{rate / 1e6:.2f}", f"{path.stat().st_size / len(block):.0f}")
                )
                print(lines[-1], flush=True)
    print(format_table(("layout", "compression", "M rows/s", "bytes a row"), lines))


def _layouts(block: Block) -> Iterator[tuple[str, pa.Table]]:
    label = pa.array(block.label)
    columns = [label, *(pa.array(np.ascontiguousarray(c)) for c in (*block.dense.T, *block.sparse.T))]
    yield "40 columns", _without_nulls([f"{place}" for place in range(len(columns))], columns)
    yield "lists of fixed size", shard_table(block)
    binaries = [
        pa.Array.from_buffers(pa.binary(4 * part.shape[1]), len(block), [None, pa.py_buffer(part)])
        for part in (block.dense, block.sparse)
    ]
    yield "binaries of fixed size", _without_nulls(["label", "dense", "sparse"], [label, *binaries])


def _without_nulls(names: list[str], columns: list[pa.Array]) -> pa.Table:
    fields = [
        pa.field(name, column.type, nullable=False) for name, column in zip(names, columns, strict=True)
    ]
    return pa.table(columns, schema=pa.schema(fields))


def _write(path: Path, table: pa.Table, compression: str) -> None:
    parquet.write_table(
        table,
        path,
        row_group_size=GROUP_ROWS,
        compression=compression,
        compression_level=1 if compression == "zstd" else None,
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
    )


def _rate(path: Path, *, columns: bool) -> float:
    """Rows per second; columns are put side by side, as a batch needs them."""
    rows, started = 0, time.perf_counter()
    with parquet.ParquetFile(path, page_checksum_verification=True) as file:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, use_threads=False)
            rows += len(table)
            if columns:
                parts = [np.empty((len(table), width), np.float32) for width in (13, 26)]
                for part, first in zip(parts, (1, 14), strict=True):
                    for place in range(part.shape[1]):
                        part[:, place] = table.column(first + place).to_numpy()
    return rows / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
