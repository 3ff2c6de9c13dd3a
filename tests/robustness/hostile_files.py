"""Files of rows that somebody made to be wrong, and what may become of them: refused, or read and counted.

Each case writes something into an empty folder and says how it is opened. Text says how many lines of rows it
has: every one of them has to come back as a row or as a malformed line.
"""

import gzip
import io
import os
import struct
from decimal import Decimal

import numpy as np
import pyarrow as pa
import torch
from hostile_folders import GOOD, SCHEMA, Case, npy_folders, shard_folders
from pyarrow import parquet

from loka.core.exceptions import LokaError
from loka.data import Schema, convert, hashed_vocabulary, open_rows, open_shards

LARGEST = 2**31 + 1  # ids that a table of a model may have


def read(path, lines):
    """ "counted", where all is well; raises LokaError where it is refused.

    A file is read as a table, and converted to a folder, which is read too.
    """
    if path.suffix == ".json":
        Schema.from_json(path)
        return "counted"
    if path.is_dir():
        return "counted" if _sound(open_rows(path, holdout=0.5)) else "unsound rows"
    out = path.parent / "out"
    try:
        found = _sound(open_rows(path, schema=SCHEMA, holdout=0.5))
    except LokaError:
        # It is refused in both ways, or read in both; but for files too short to be divided.
        convert(path, out, schema=SCHEMA, vocabulary=hashed_vocabulary(99), workers=1)
        _sound([open_shards(out, workers=1)])
        raise
    manifest = convert(path, out, schema=SCHEMA, vocabulary=hashed_vocabulary(99), workers=1)
    rows = _sound([open_shards(out, workers=1)])
    if not rows or rows != found or manifest.rows != rows:
        return f"{found} rows as a table, {rows} when converted"
    lost = manifest.counts["malformed lines"]
    return "counted" if lines in (None, rows + lost) else f"{lines} lines, {rows} rows and {lost} malformed"


def _sound(sources):
    """How many rows; 0 where one of them is none that a model may get."""
    rows = 0
    for source in sources:
        sizes = torch.tensor(source.vocab_sizes)
        if sizes.min() < 1 or sizes.max() > LARGEST:
            return 0
        for batch in source.batches(64):
            ids = (batch.sparse >= 0) & (batch.sparse < sizes)
            labels = (batch.label == 0) | (batch.label == 1)
            if not (ids.all() and labels.all() and batch.dense.isfinite().all()):
                return 0
            rows += len(batch)
    return rows


def cases():
    return [*_csv(), *_tsv(), *_odd_files(), *_parquet(), *npy_folders(), *shard_folders(), *_schemas()]


def _text(name, lines, *, ending="\n", head="y,d,c", rows=None, **how):
    def write(path):
        text = ending.join([head, *lines]) if name.endswith("csv") else ending.join(lines)
        path.write_bytes((text + ending).encode(**how))

    return Case(name, write, len(lines) if rows is None else rows)


def _among(*bad, separator=","):
    lines = list(GOOD)
    for place, line in enumerate(bad):
        lines.insert(7 + 5 * place, line)
    return [line.replace(",", separator) if line in GOOD else line for line in lines]


def _csv():
    yield _text("well.csv", GOOD)
    for number, bad in enumerate(
        (
            ('1,2,"open',),
            ('"1,2,open', '0,3,"'),
            ('1,"2,c', '1,2",c', '"'),
            ('1,2,"a""b"c"', '1,2,""""'),
            ('"' * 1001,),
            ('1,2,"' + "x\\" * 50 + '"',),
            ("1,2,3,4", "1,2", ",,", ",", ""),
            ("," * 5000,),
            ("1,2,a\0b", "\0,2,c", "1,\0,c"),
            ("1,2," + "m" * (1 << 20),),
            tuple("0,1," + chr(97 + n) * (1 << 20) for n in range(8)),
            ("1,2,\u202eevil\u2066", "1,2,\x1b[2J", "1,2,\ufeff", "1,2,é🙂中文"),
            ("1,2,=cmd|' /C calc'!A0", "1,2,../../etc/passwd", "1,2,${HOME}"),
            ("1," + "9" * 400 + ",c", "1,-" + "9" * 5000 + ",c"),
            ("1,1e999,c", "1,-1e999,c", "1,inf,c", "1,nan,c", "1,1e-999,c"),
            ("1,0x1F,c",),
            ("1,1_000,c",),
            ("1,2026-11-22,c",),
            ("1,12:30:00,c",),
            ("1,true,c",),
            ("1,٣,c",),
            ("2,1,c",),
            ("-1,1,c",),
            ("0.5,1,c",),
            ("yes,1,c",),
            ("true,1,c",),
            (" 1,1,c", "1 ,1,c"),
            (" ",),
            ("1,2,c\r",),
        )
    ):
        yield _text(f"{number}.csv", _among(*bad))
    yield _text("head-twice.csv", GOOD, head="y,d,c,c")
    yield _text("head-case.csv", GOOD, head="Y,D,C")
    yield _text("head-none.csv", GOOD, head="1,2,c")
    yield _text("head-evil.csv", GOOD, head="y\x1b[2J,d,c")
    yield _text("head-quote.csv", GOOD, head='"y,d,c')
    yield _text("head-wide.csv", GOOD, head=",".join(["y", "d", "c", *map(str, range(20_000))]), rows=40)
    yield _text("mark.csv", GOOD, head="\ufeffy,d,c")
    yield _text("utf16.csv", GOOD, encoding="utf-16")
    yield _text("latin1.csv", _among("1,2,caf\xe9"), encoding="latin-1")
    yield _text("return.csv", GOOD, ending="\r")
    yield _text("both.csv", _among("1,2,c"), ending="\r\n")
    yield _text("breaks.csv", _among("1,2,a\x0bb\x0cc\x85d\u2028e"))
    yield _text("head-alone.csv", [])


def _tsv():
    yield _text("well.tsv", _among(separator="\t"))
    for number, bad in enumerate(
        (('1\t2\t"open',), ("1\t2", "1\t2\t3\t4", "\t\t", "\t" * 9), ("1 2 c",), ("1\t2\t" + "m" * (4 << 20),))
    ):
        yield _text(f"{number}.tsv", _among(*bad, separator="\t"))
    yield _text("commas.tsv", GOOD)
    yield _text("newlines.tsv", [""] * 1000)


def _odd_files():
    good = ("\n".join(["y,d,c", *GOOD]) + "\n").encode()
    packed = gzip.compress(good)
    for name, data in {
        "empty.csv": b"",
        "bytes.csv": bytes(range(256)) * 64,
        "zeros.tsv": bytes(4 << 20),
        "packed.csv": packed,
        "plain.csv.gz": good,
        "half.csv.gz": packed[: len(packed) // 2],
        "after.csv.gz": packed + b"junk",
        "magic.parquet": b"PAR1PAR1",
        "secret.parquet": b"PARE" + bytes(60) + b"PARE",
        "text.parquet": good,
        "parquet.csv": b"PAR1" + bytes(400) + b"PAR1",
        "noise.parquet": b"PAR1" + np.random.default_rng(0).bytes(5000) + struct.pack("<I", 4000) + b"PAR1",
        "long-foot.parquet": b"PAR1" + bytes(50) + struct.pack("<I", 2**31 - 1) + b"PAR1",
        "name.xlsx": good,
    }.items():
        yield Case(name, lambda path, data=data: path.write_bytes(data))
    yield Case("bomb.csv.gz", lambda path: path.write_bytes(gzip.compress(bytes(1 << 20)) * 128))
    yield Case("sparse.tsv", lambda path: _sized(path, 1 << 40))
    yield Case("pipe.csv", os.mkfifo)
    yield Case("device.csv", lambda path: path.symlink_to("/dev/zero"))
    yield Case("loop.csv", lambda path: path.symlink_to(path.name))
    yield Case("absent.csv", lambda path: None)


def _sized(path, size):
    with path.open("wb") as file:
        file.truncate(size)


def _parquet():
    rows = 40
    plain = {"y": [n % 2 for n in range(rows)], "d": [1.5] * rows, "c": [f"c{n % 7}" for n in range(rows)]}
    changed = {
        "well": {},
        "label-null": {"y": [None] * rows},
        "label-text": {"y": ["1"] * rows},
        "label-words": {"y": ["one"] * rows},
        "label-date": {"y": pa.array([0] * rows, pa.date32())},
        "dense-date": {"d": pa.array([10**15] * rows, pa.timestamp("us"))},
        "dense-decimal": {"d": [Decimal("1e30")] * rows},
        "dense-large": {"d": pa.array([2**64 - 1] * rows, pa.uint64())},
        "dense-half": {"d": pa.array(np.full(rows, 6e4, np.float16))},
        "dense-inf": {"d": [float("inf"), float("nan")] * (rows // 2)},
        "dense-list": {"d": [[1.0]] * rows},
        "dense-nothing": {"d": pa.nulls(rows)},
        "category-bytes": {"c": [b"\xff\xfe"] * rows},
        "category-large": {"c": ["m" * (1 << 20)] * 30 + ["x"] * (rows - 30)},
        "category-struct": {"c": [{"a": 1}] * rows},
        "category-map": {"c": pa.array([[("a", 1)]] * rows, pa.map_(pa.string(), pa.int64()))},
        "category-nothing": {"c": pa.nulls(rows)},
        "category-bool": {"c": [True, None] * (rows // 2)},
        "category-time": {"c": pa.array([1] * rows, pa.time64("ns"))},
    }

    def table(name):
        return pa.table({**plain, **changed.get(name, {})})

    for name in changed:
        yield Case(f"{name}.parquet", lambda path, name=name: parquet.write_table(table(name), path), rows)
    twice = pa.Table.from_arrays([pa.array(plain[name]) for name in "ydcc"], names=["y", "d", "c", "c"])
    yield Case("twice.parquet", lambda path: parquet.write_table(twice, path))
    yield Case("none.parquet", lambda path: parquet.write_table(pa.table(plain).slice(0, 0), path))
    whole = io.BytesIO()
    parquet.write_table(pa.table(plain), whole)
    data = whole.getvalue()
    for share in (0.1, 0.5, 0.9, 0.99):
        cut = data[: int(len(data) * share)]
        yield Case(f"cut-{share}.parquet", lambda path, cut=cut: path.write_bytes(cut))
    for seed in range(8):
        flipped = bytearray(data)
        place = int(np.random.default_rng(seed).integers(4, len(data) - 8))
        flipped[place] ^= 0x55
        yield Case(f"flipped-{seed}.parquet", lambda path, flipped=bytes(flipped): path.write_bytes(flipped))
    zipped = pa.table({**plain, "c": ["m" * 100_000] * rows})
    yield Case("zipped.parquet", lambda path: parquet.write_table(zipped, path, compression="zstd"), rows)


def _schemas():
    for name, text in {
        "deep": "[" * 100_000,
        "number": '{"label": 1e999, "dense": ["d"], "sparse": []}',
        "length": '{"label": "y", "dense": ["d"], "sparse": [], "sequence": "s", "sequence_length": "x"}',
        "list": "[1, 2]",
        "text": '"feature_cols"',
        "null": "null",
        "unknown": '{"label": "y", "dense": ["d"], "colour": 1}',
        "separator": '{"label": "y", "dense": ["d"], "separator": "\\n"}',
        "header": '{"label": "y", "dense": ["d"], "header": "no"}',
        "bars": '{"feature_cols": [{"name": 1, "type": "numeric"}], "label_col": {}}',
        "bars-list": '{"feature_cols": {"a": 1}, "label_col": []}',
    }.items():
        yield Case(f"schema-{name}.json", lambda path, text=text: path.write_text(text))
    yield Case("schema-pipe.json", os.mkfifo)
    yield Case("schema-zero.json", lambda path: path.symlink_to("/dev/zero"))
    yield Case("schema-sparse.json", lambda path: _sized(path, 1 << 40))
    yield Case("schema-bytes.json", lambda path: path.write_bytes(b"\xff\xfe{}"))
