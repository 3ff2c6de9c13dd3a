"""Criteo-shaped rows, fast: 13 logarithms of counts, 26 Zipf ids in tables of MLPerf's sizes, 3 % clicks.

    id = floor(((V^(1-a) - 1) u + 1)^(1 / (1-a))),  u uniform: a bounded Pareto draw, Zipf's law at its tail

Shards are drawn and written by threads, each from its own stream (seed, shard).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from loka.data.block import Block
from loka.data.formats.shard_writer import ShardWriter
from loka.data.formats.shards import GROUP_ROWS, Manifest, Shard, write_manifest
from loka.data.workers import in_order

# MLPerf's DLRM-DCNv2, num_embeddings_per_feature.
TABLES = (
    *(40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10),
    *(2209, 11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36),
)
ALPHA = 1.05
SHARD_ROWS = 524_288
BLOCK_ROWS = 65_536
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)


def draw(rng: np.random.Generator, rows: int) -> Block:
    """Rows as a model takes them, ids int32."""
    power = 1.0 - ALPHA
    top = np.array([table**power - 1.0 for table in TABLES], np.float32)
    ids = (top * rng.random((rows, len(TABLES)), np.float32) + 1.0) ** np.float32(1.0 / power)
    counts = np.exp(1.0 + 1.5 * rng.standard_normal((rows, 13), np.float32))
    return Block(
        dense=np.log1p(np.floor(counts)),
        sparse=np.minimum(ids, np.array(TABLES, np.float32) - 1).astype(np.int32),
        label=(rng.random(rows) < 0.03).astype(np.float32),
        counts=np.empty((rows, 0), np.int32),
    )


def write_shards(folder: Path, rows: int, *, workers: int) -> Manifest:
    """A prepared folder of about `rows` rows, in whole shards."""
    folder.mkdir(parents=True, exist_ok=True)

    def one(number: int) -> Shard:
        rng = np.random.default_rng([0, number])
        writer = ShardWriter(folder, f"shard-{number:05d}.parquet", group_rows=GROUP_ROWS)
        for _ in range(SHARD_ROWS // BLOCK_ROWS):
            writer.add(draw(rng, BLOCK_ROWS))
        return Shard(file=writer.name, bytes=writer.finish(), rows=writer.rows, counts={})

    shards = range(max(rows // SHARD_ROWS, 4))
    found = dict(enumerate(in_order(one, shards, workers=workers, ahead=workers)))
    manifest = _manifest(found)
    write_manifest(folder, manifest)
    return manifest


def link_part(folder: Path, whole: Path, manifest: Manifest, *, shards: int) -> Manifest:
    """A folder with the first shards of another."""
    folder.mkdir()
    for number in range(shards):
        os.link(whole / manifest.shards[number].file, folder / manifest.shards[number].file)
    part = _manifest({number: manifest.shards[number] for number in range(shards)})
    write_manifest(folder, part)
    return part


def write_tsv(folder: Path, rows: int, *, workers: int) -> list[Path]:
    """Raw lines of the 1TB format in 8 files: label, 13 counts, 26 categories in hex, a tenth missing."""
    folder.mkdir(parents=True, exist_ok=True)

    def one(number: int) -> Path:
        import pyarrow as pa
        from pyarrow import csv

        rng = np.random.default_rng([1, number])
        path = folder / f"day_{number}.tsv"
        block = draw(rng, rows // 8)
        columns = [pa.array(block.label.astype(np.int8))]
        for column in np.expm1(block.dense).round().astype(np.int32).T:
            columns.append(pa.array(column, mask=rng.random(len(block)) < 0.1))
        for place, ids in enumerate(block.sparse.T):
            columns.append(_hexadecimal(ids, place, rng.random(len(block)) < 0.1))
        table = pa.table(columns, names=[f"{place}" for place in range(len(columns))])
        options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
        csv.write_csv(table, path, options)
        return path

    return list(in_order(one, range(8), workers=workers, ahead=workers))


def total_bytes(paths: Iterable[Path]) -> int:
    """Their sizes together."""
    return sum(path.stat().st_size for path in paths)


def _hexadecimal(ids: np.ndarray, column: int, missing: np.ndarray) -> object:
    import pyarrow as pa
    import pyarrow.compute as pc

    mixed = (ids.astype(np.uint64) + np.uint64(column << 32)) * np.uint64(0x9E3779B97F4A7C15)
    nibbles = (mixed >> np.uint64(32))[:, None] >> np.arange(28, -4, -4, dtype=np.uint64) & np.uint64(15)
    text = _HEX[nibbles.astype(np.int64)]
    offsets = np.arange(0, 8 * len(ids) + 1, 8, dtype=np.int32)
    strings = pa.StringArray.from_buffers(
        len(ids), pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(text))
    )
    return pc.if_else(pa.array(missing), None, strings)


def _manifest(shards: dict[int, Shard]) -> Manifest:
    return Manifest(
        settings={"rows": "benchmarks/reader"},
        digest=f"benchmarks/reader {len(shards)}",
        pieces=len(shards),
        dense=tuple(f"I{number}" for number in range(1, 14)),
        sparse=tuple(f"C{number}" for number in range(1, 27)),
        vocab_sizes=TABLES,
        history=None,
        group_rows=GROUP_ROWS,
        shards=shards,
    )
