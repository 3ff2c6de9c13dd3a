import gzip
import json
import threading

import numpy as np
import pytest
import torch
from click_files import assert_same, gather, lines, write_csv, write_tsv
from conversions import ALL, HASHED, ROWS, contents, criteo_parquet
from forked import run_script
from sweeps import sweep
from with_pyarrow import pa, parquet

from loka.core.exceptions import DataRefused
from loka.data import (
    Frequency,
    Schema,
    Shuffle,
    TableClicks,
    build_vocabulary,
    convert,
    hashed_vocabulary,
    open_rows,
    open_shards,
    open_table,
    read_vocabulary,
    split_shards,
)
from loka.data.categories.encoding import REASONS

pytestmark = pytest.mark.usefixtures("small_pieces")


@pytest.mark.parametrize(
    "schema", [Schema(label="y", dense=("d",), sparse=()), Schema(label="y", dense=(), sparse=("d",))]
)
def test_rows_of_one_kind_of_feature(tmp_path, schema):
    (tmp_path / "t.csv").write_text("y,d\n" + "".join(f"{row % 2},{row}\n" for row in range(50)))
    convert(tmp_path / "t.csv", tmp_path / "out", schema=schema, vocabulary=HASHED)
    table = TableClicks(tmp_path / "t.csv", schema=schema, vocabulary=HASHED)
    assert_same(gather(open_shards(tmp_path / "out")), gather(table))


@pytest.mark.parametrize("kind", sweep(["csv", "parquet", "gz"], ["parquet"]))  # of TSV
def test_shards_hold_the_rows_of_the_table_in_its_order(tmp_path, kind):
    if kind == "parquet":
        path = criteo_parquet(tmp_path / "t.parquet")
    elif kind == "csv":
        path = write_csv(tmp_path / "t.csv", ROWS)
    else:
        path = write_tsv(tmp_path / "t.tsv", ROWS)
    if kind == "gz":
        packed = tmp_path / "t.tsv.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        path = packed
    manifest = convert(path, tmp_path / "out", vocabulary=HASHED, workers=2)
    assert manifest.pieces == 1 if kind == "gz" else manifest.pieces > 3
    table = TableClicks(path, vocabulary=HASHED)
    prepared = open_shards(tmp_path / "out")
    assert prepared.rows == ALL
    assert (prepared.dense_features, prepared.vocab_sizes) == (table.dense_features, table.vocab_sizes)
    assert_same(gather(prepared), gather(table))
    assert manifest.counts == table.account()
    assert list(prepared.account().values())[: len(REASONS)] == list(manifest.counts.values())


@pytest.mark.slow
def test_pieces_end_where_lines_end_wherever_they_are_cut(tmp_path, monkeypatch):
    schema = Schema(label="y", dense=("d",), sparse=("c",), header=True)
    text = "c\td\ty\n" + "".join(f"{'x' * (n % 5)}\t{n}\t{n % 2}\r\n" for n in range(12)) + "last\t12\t1"
    path = tmp_path / "t.tsv"
    path.write_bytes(text.encode())
    whole = gather(TableClicks(path, schema=schema, vocabulary=HASHED))
    monkeypatch.setattr("loka.data.source.text.BLOCK_BYTES", 8)
    for size in (1, 2, 3, 7, 11, 200):
        monkeypatch.setattr("loka.data.conversion.LEAST_SHARD", size)
        folder = tmp_path / f"{size}"
        manifest = convert(path, folder, schema=schema, vocabulary=HASHED, workers=1)
        assert manifest.pieces == -(-len(text) // size)
        assert_same(gather(open_shards(folder)), whole)


@pytest.mark.slow
def test_threads_change_nothing(tmp_path, path):
    folders = [tmp_path / f"{workers}" for workers in (1, 4)]
    for folder, workers in zip(folders, (1, 4), strict=True):
        convert(path, folder, vocabulary=Frequency(min_count=3), workers=workers)
    assert contents(folders[0]) == contents(folders[1])


@pytest.mark.slow
@pytest.mark.parametrize("holdout", [0.0, 0.2])
def test_a_frequency_vocabulary_is_that_of_the_training_rows(tmp_path, holdout, path):
    convert(path, tmp_path / "out", vocabulary=Frequency(min_count=2, max_size=12, holdout=holdout))
    train = ALL - round(ALL * holdout)
    expected = build_vocabulary(path, rows=train, min_count=2, max_size=12)
    assert read_vocabulary(str(tmp_path / "out" / "vocabulary.json")) == expected
    assert max(map(len, expected.categories.values())) == 12


def test_the_split_is_that_of_the_table(tmp_path, path):
    convert(path, tmp_path / "out", vocabulary=Frequency(holdout=0.2))
    for prepared, table in zip(split_shards(tmp_path / "out"), open_table(path), strict=True):
        assert_same(gather(prepared), gather(table))
    for prepared, table in zip(open_rows(tmp_path / "out"), open_rows(path), strict=True):
        assert_same(gather(prepared), gather(table))
    with pytest.raises(DataRefused, match="a table is read in its own order"):
        open_rows(path, shuffle=Shuffle(seed=0))
    shuffled, kept = split_shards(tmp_path / "out", shuffle=Shuffle(seed=0))
    assert_same(gather(kept), gather(open_table(path)[1]))
    with pytest.raises(AssertionError):
        assert_same(gather(shuffled), gather(open_table(path)[0]))
    assert sorted(gather(shuffled)[0][:, 0].tolist()) == sorted(gather(open_table(path)[0])[0][:, 0].tolist())


def test_a_test_folder_has_the_ids_of_the_training_folder(tmp_path):
    """Of the four most frequent categories each, and of other columns that are as many."""
    swapped = Schema(label="y", dense=("e", "d"), sparse=("c",))
    for name, first in (("train", 0), ("test", 2)):
        rows = "".join(f"{row % 2},{row},{-row},k{first + row % 7}\n" for row in range(70))
        (tmp_path / f"{name}.csv").write_text("y,d,e,c\n" + rows)
    schema, frequent = Schema(label="y", dense=("d", "e"), sparse=("c",)), Frequency(max_size=4)
    for name in ("train", "test"):
        convert(tmp_path / f"{name}.csv", tmp_path / name, schema=schema, vocabulary=frequent)
    known = read_vocabulary(tmp_path / "train" / "vocabulary.json")
    convert(tmp_path / "test.csv", tmp_path / "same", schema=schema, vocabulary=known)
    convert(tmp_path / "test.csv", tmp_path / "swapped", schema=swapped, vocabulary=known)
    assert open_rows(tmp_path / "train", test=tmp_path / "same")[1].rows == 70
    for other, said in (
        ("test", "other categories have the same ids"),
        ("swapped", "columns: d, e, c\n  columns: e, d, c"),
    ):
        with pytest.raises(DataRefused, match=f"{said}(.|\n)*--vocabulary .*train"):
            open_rows(tmp_path / "train", test=tmp_path / other)


def test_malformed_lines_are_counted_wherever_they_lie(tmp_path):
    good = lines(ROWS, "\t")
    rng = np.random.default_rng(0)
    bad = {int(place): kind for place, kind in zip(rng.choice(ALL, 40, replace=False), "ab" * 20, strict=True)}
    text = [("short\t1\n" if bad[n] == "a" else "\n") if n in bad else line + "\n" for n, line in enumerate(good)]
    text[100:170] = ["junk" * 80 + "\n"] * 70  # pieces without a single row
    path = tmp_path / "t.tsv"
    path.write_text("".join(text))
    manifest = convert(path, tmp_path / "out", vocabulary=HASHED)
    skipped = 70 + sum(not 100 <= place < 170 for place in bad)
    assert manifest.counts["malformed lines"] == skipped
    assert manifest.rows == ALL - skipped
    assert any(shard.rows == 0 for shard in manifest.shards.values())
    assert_same(gather(open_shards(tmp_path / "out")), gather(TableClicks(path, vocabulary=HASHED)))


def test_a_file_without_rows_and_a_wrong_value_are_refused_by_name(tmp_path):
    path = tmp_path / "t.tsv"
    path.write_text("junk\n" * 20)
    with pytest.raises(DataRefused, match=r"t\.tsv: no readable row\n.*20 malformed lines"):
        convert(path, tmp_path / "out", vocabulary=HASHED)
    with pytest.raises(DataRefused, match="out has no rows"):
        open_shards(tmp_path / "out")
    rows = [*ROWS[:200], (3, *ROWS[200][1:]), *ROWS[201:]]
    with pytest.raises(DataRefused, match=r"u\.tsv: label column label must hold 0 and 1"):
        convert(write_tsv(tmp_path / "u.tsv", rows), tmp_path / "out2", vocabulary=HASHED, workers=2)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loka-data")]
    assert not list((tmp_path / "out2").glob(".unfinished*"))
    rows[200] = (1, "many", *ROWS[200][2:])
    with pytest.raises(DataRefused, match=r"column I1 .*\n.*'many'\n.*after byte"):
        convert(write_tsv(tmp_path / "u.tsv", rows), tmp_path / "out3", vocabulary=HASHED, workers=2)


def test_ids_beyond_32_bits_are_refused(tmp_path):
    path = write_tsv(tmp_path / "t.tsv", ROWS[:5])
    with pytest.raises(DataRefused, match=r"C1 has 2147483649 ids(.|\n)*fewer buckets"):
        convert(path, tmp_path / "out", vocabulary=hashed_vocabulary(2**31))


def test_any_parquet_reader_sees_the_rows(tmp_path, path):
    convert(path, tmp_path / "out", vocabulary=HASHED)
    table = parquet.read_table(sorted((tmp_path / "out").glob("*.parquet")))
    dense, sparse, label = gather(open_shards(tmp_path / "out"))
    assert table["dense"].to_pylist() == dense.tolist()
    assert table["sparse"].to_pylist() == sparse.tolist()
    assert table["label"].to_pylist() == label.tolist()
    assert not any(column.null_count for column in table.columns)


MEMORY = """
import json
from pathlib import Path
import numpy as np
from loka.data import Shuffle, open_shards
from loka.data.block import Block
from loka.data.formats.shard_writer import ShardWriter
from loka.data.formats.shards import Manifest, Shard, write_manifest
rows = 65_536
rng = np.random.default_rng(0)
block = Block(
    dense=rng.random((rows, 13), np.float32),
    sparse=rng.integers(0, 2**31, (rows, 26)).astype(np.int32),
    label=np.zeros(rows, np.float32),
    counts=np.empty((rows, 0), np.int32),
)
peaks = []
for shards in (6, 18):
    folder = Path(f"{shards}")
    folder.mkdir()
    writer = ShardWriter(folder, "one.parquet", group_rows=8192)
    writer.add(block)
    one = Shard(file="one.parquet", rows=rows, bytes=writer.finish(), counts={})
    names = {"dense": ("d",) * 13, "sparse": ("s",) * 26, "vocab_sizes": (2**31,) * 26, "history": None}
    files = {number: one for number in range(shards)}
    manifest = Manifest(settings={}, digest="", pieces=shards, group_rows=8192, shards=files, **names)
    write_manifest(folder, manifest)
    reader = open_shards(folder, shuffle=Shuffle(seed=0, window_rows=16_384), workers=2)
    assert sum(map(len, reader.batches(4096))) == shards * rows
    # Not getrusage: its maximum is inherited from the process that started this one.
    status = Path("/proc/self/status").read_text()
    peaks.append(int(status.split("VmHWM:")[1].split()[0]) * 1024)
print(json.dumps(peaks))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_folder(tmp_path):
    printed = run_script(MEMORY, name="memory", cwd=tmp_path, output=tmp_path / "printed")
    small, large = json.loads(printed)
    # 12 shards more are 126 MB as stored and 210 MB as batches; allocators breathe by some windows of 7 MB, six once.
    assert large - small < 70e6


def test_sequences_keep_the_latest_padded_on_the_right(tmp_path):
    schema = Schema(label="y", dense=(), sparse=("c",), sequence="seen", sequence_length=3)
    seen = [["a"], [], None, ["a", "b", "c", "d", "e"], ["b", None, "zz"], ["e", "d"]]
    columns = {"y": [0, 1] * 3, "c": ["u"] * 6, "seen": pa.array(seen, pa.list_(pa.string()))}
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table(columns), path, row_group_size=4)
    vocabulary = build_vocabulary(path, schema=schema, min_count=1, rows=4)
    assert vocabulary.categories["seen"] == ("a", "c", "d", "e")  # b is cut off in row 3
    table = TableClicks(path, schema=schema, vocabulary=vocabulary)
    convert(path, tmp_path / "out", schema=schema, vocabulary=vocabulary)
    for source in (table, open_shards(tmp_path / "out")):
        (batch,) = source.batches(10)
        assert batch.sequence.dtype == batch.lengths.dtype == torch.int64
        assert batch.lengths.tolist() == [1, 0, 0, 3, 3, 2]
        expected = [[1, 0, 0], [0, 0, 0], [0, 0, 0], [2, 3, 4], [0, 0, 0], [4, 3, 0]]
        assert batch.sequence.tolist() == expected
        assert (source.history.length, source.history.vocab_size) == (3, 5)
    account = table.account()
    assert (account["missing categories"], account["unknown categories"]) == (1, 2)


def test_sequences_need_a_list_column(tmp_path):
    schema = Schema(label="y", dense=(), sparse=("c",), sequence="c2")
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"y": [0], "c": ["u"], "c2": ["v"]}), path)
    with pytest.raises(DataRefused, match="column c2 of type string cannot be read as a sequence"):
        gather(TableClicks(path, schema=schema, vocabulary=HASHED))
    text = tmp_path / "t.csv"
    text.write_text("y,c,c2\n0,u,v\n")
    with pytest.raises(DataRefused, match="text files have no list columns"):
        TableClicks(text, schema=schema, vocabulary=HASHED)
