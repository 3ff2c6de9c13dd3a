"""Folders of npy files and of prepared rows that somebody made to be wrong."""

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from loka.core.storage.files import write_record
from loka.data import Schema, convert, hashed_vocabulary

SCHEMA = Schema(label="y", dense=("d",), sparse=("c",))
GOOD = [f"{n % 2},{n},c{n % 7}" for n in range(40)]


@dataclass(frozen=True)
class Case:
    """`write` makes the file, or folder, of that name. `lines` of rows, where it is known how many. With
    "well" in its name nothing is wrong with it."""

    name: str
    write: Callable[[Path], object]
    lines: int | None = None


def npy_folders():
    whole = {"dense": np.ones((8, 3), np.float32), "sparse": np.ones((8, 2), np.int64), "labels": np.arange(8) % 2}

    def lying(header, *, version=(1, 0)):
        text = header.encode() + b"\n"
        size = struct.pack("<H" if version == (1, 0) else "<I", len(text))
        return b"\x93NUMPY" + bytes(version) + size + text + bytes(96)

    def described(descr, shape, order="False"):
        return lying(f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}")

    def changed(**parts):
        def write(path):
            path.mkdir()
            for name, part in {**whole, **parts}.items():
                file = path / f"day_0_{name}.npy"
                if isinstance(part, bytes):
                    file.write_bytes(part)
                elif part is True:
                    os.mkfifo(path / "day_0_dense.npy")
                elif part is not None:
                    np.save(file, part, allow_pickle=True)

        return write

    dense, sparse = whole["dense"], whole["sparse"]
    for name, parts in {
        "well": {},
        "shape-huge": {"dense": described("'<f4'", "(1000000000000, 3)")},
        "shape-overflow": {"dense": described("'<f4'", "(9223372036854775807, 9223372036854775807)")},
        "shape-negative": {"dense": described("'<f4'", "(-8, 3)")},
        "shape-digits": {"dense": described("'<f4'", "(" + "9" * 400 + ", 3)")},
        "shape-none": {"dense": described("'<f4'", "()")},
        "objects": {"dense": np.array([[{}] * 3] * 8, object)},
        "fields": {"dense": described("[('a', '<f4')]", "(8, 3)")},
        "texts": {"dense": described("'<U4'", "(2, 3)")},
        "complex": {"dense": np.ones((8, 3), np.complex64)},
        "dates": {"dense": np.zeros((8, 3), "datetime64[s]")},
        "big-endian": {"dense": dense.astype(">f4")},
        "half": {"dense": dense.astype(np.float16)},
        "columns-first": {"dense": np.asfortranarray(dense)},
        "code": {"dense": lying("__import__('os').system('true')")},
        "deep": {"dense": lying("(" * 5000)},
        "version": {"dense": lying("{}", version=(9, 0))},
        "long-header": {"dense": lying(" " * 60_000 + "{}")},
        "cut": {"dense": described("'<f4'", "(800, 3)")},
        "empty": {"dense": b""},
        "pipe": {"dense": None, "pipe": True},
        "nan": {"dense": np.full((8, 3), np.nan, np.float32)},
        "inf": {"dense": np.full((8, 3), np.inf)},
        "ids-negative": {"sparse": -sparse},
        "ids-huge": {"sparse": np.full((8, 2), 2**62)},
        "ids-real": {"sparse": sparse.astype(np.float32)},
        "ids-unsigned": {"sparse": np.full((8, 2), 2**64 - 1, np.uint64)},
        "label-2": {"labels": np.arange(8)},
        "label-wide": {"labels": np.zeros((8, 2), np.int64)},
        "label-text": {"labels": np.array(["1"] * 8)},
        "rows-differ": {"labels": np.zeros(7, np.int64)},
        "rows-none": {"dense": dense[:0], "sparse": sparse[:0], "labels": whole["labels"][:0]},
        "no-labels": {"labels": None},
    }.items():
        yield Case(f"npy-{name}", changed(**parts))


def shard_folders():
    """Folders of prepared rows whose manifest fits its checksum, and lies."""

    def made(path):
        rows = path.parent / "rows.csv"
        rows.write_text("\n".join(["y,d,c", *GOOD]) + "\n")
        convert(rows, path, schema=SCHEMA, vocabulary=hashed_vocabulary(9), workers=1)
        return json.loads((path / "manifest.json").read_text())["content"]

    def forged(**fields):
        def write(path):
            content = made(path)
            shard = {**content["shards"]["0"], **fields.pop("shard", {})}
            content = {**content, "shards": {"0": shard}, **fields}
            write_record(path / "manifest.json", kind="manifest of prepared clicks", version=1, content=content)

        return write

    def replaced(columns):
        """A shard of the size that the manifest says, and of other columns."""

        def write(path):
            content = made(path)
            parquet.write_table(pa.table(columns), path / "shard-00000.parquet")
            size = (path / "shard-00000.parquet").stat().st_size
            content["shards"]["0"]["bytes"] = size
            write_record(path / "manifest.json", kind="manifest of prepared clicks", version=1, content=content)

        return write

    def vectors(values, width, kind):
        flat = np.full(40 * width, values, kind)
        return pa.FixedSizeListArray.from_arrays(pa.array(flat), width)

    label = pa.array(np.zeros(40, np.float32))
    dense, sparse = vectors(1.0, 1, np.float32), vectors(1, 1, np.int32)
    for name, write in {
        "well": made,
        "outside": forged(shard={"file": "../rows.csv"}),
        "absolute": forged(shard={"file": "/etc/passwd"}),
        "nul": forged(shard={"file": "a\0b"}),
        "surrogate": forged(shard={"file": "\ud800"}),
        "rows": forged(shard={"rows": 41}),
        "rows-huge": forged(shard={"rows": 2**59}),
        "group": forged(group_rows=1),
        "sizes": forged(vocab_sizes=[2**40]),
        "columns": forged(sparse=["c", "e"]),
        "fewer-ids": forged(vocab_sizes=[2]),
        "no-dense": replaced({"label": label, "sparse": sparse}),
        "no-label": replaced({"dense": dense, "sparse": sparse}),
        "wider": replaced({"label": label, "dense": vectors(1.0, 3, np.float32), "sparse": sparse}),
        "texts": replaced({"label": label, "dense": dense, "sparse": pa.array(["x"] * 40)}),
        "ids": replaced({"label": label, "dense": dense, "sparse": vectors(7000, 1, np.int32)}),
        "negative": replaced({"label": label, "dense": dense, "sparse": vectors(-7, 1, np.int32)}),
        "nan": replaced({"label": label, "dense": vectors(np.nan, 1, np.float32), "sparse": sparse}),
        "label": replaced({"label": pa.array(np.full(40, 7, np.float32)), "dense": dense, "sparse": sparse}),
        "nulls": replaced({"label": pa.nulls(40, pa.float32()), "dense": dense, "sparse": sparse}),
    }.items():
        yield Case(f"shards-{name}", write)
