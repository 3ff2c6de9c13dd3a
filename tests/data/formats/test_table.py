import gzip
import json
import os
import sys
from datetime import datetime, time, timedelta
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch
from click_files import assert_same, gather, made_up, write_csv, write_tsv
from sweeps import sweep
from with_pyarrow import pa, parquet

from loka.core.exceptions import DataRefused, MissingLibrary, UnknownName
from loka.data import CRITEO, Schema, TableClicks, build_vocabulary, hashed_vocabulary, open_table
from loka.data.categories.columns import category_strings

REAL = Path(__file__).parents[4] / "shared" / "data" / "criteo_80k.parquet"
TINY = Schema(label="y", dense=("d",), sparse=("c",))


def write_parquet(path, rows, group=50):
    columns = dict(zip(CRITEO.columns, zip(*rows, strict=True), strict=True))
    table = pa.table({name.lower(): list(values) for name, values in reversed(columns.items())})
    parquet.write_table(table.append_column("extra", pa.array(range(len(rows)))), path, row_group_size=group)
    return path


def tiny(path, text, **options):
    path.write_text(text)
    return TableClicks(path, schema=TINY, vocabulary=hashed_vocabulary(10), **options)


def test_parquet_csv_and_tsv_of_the_same_rows_give_the_same_batches(tmp_path):
    rows = made_up(230)
    files = [
        write_parquet(tmp_path / "t.parquet", rows),
        write_csv(tmp_path / "t.csv", rows),
        write_tsv(tmp_path / "t.tsv", rows),
    ]
    packed = tmp_path / "t.txt.gz"
    packed.write_bytes(gzip.compress(files[2].read_bytes()))
    vocabularies = [build_vocabulary(file) for file in [*files, packed]]
    assert len({vocabulary.digest for vocabulary in vocabularies}) == 1
    sources = [TableClicks(file, vocabulary=vocabularies[0]) for file in [*files, packed]]
    for source in sources[1:]:
        assert_same(gather(sources[0]), gather(source))
    accounts = [source.account() for source in sources[1:]]
    assert accounts[0] == accounts[1] == accounts[2]
    empty = [sum(value is None for row in rows for value in row[part]) for part in (slice(14), slice(14, 40))]
    assert [accounts[0][key] for key in ("missing dense values", "missing categories")] == empty


def test_values_are_encoded_as_documented(tmp_path):
    text = "y,d,c\n1,-3,b\n0,,a\n0,inf,b\n1,nan,zz\n0,7.5,\n1,NA,NA\n"
    path = tmp_path / "t.csv"
    path.write_text(text)
    vocabulary = build_vocabulary(path, schema=TINY, min_count=1, rows=3)
    source = TableClicks(path, schema=TINY, vocabulary=vocabulary)
    dense, sparse, label = gather(source)
    expected = torch.tensor([-np.log(4.0), 0, 0, 0, np.log(8.5), 0], dtype=torch.float32)
    torch.testing.assert_close(dense[:, 0], expected)
    assert sparse[:, 0].tolist() == [2, 1, 2, 0, 0, 0]
    assert label.tolist() == [1, 0, 0, 1, 0, 1]
    assert source.vocab_sizes == (3,)
    assert source.account() == {
        "missing dense values": 3,
        "infinite dense values": 1,
        "missing categories": 1,
        "unknown categories": 2,  # zz, and NA, which is a name and not a missing value
        "malformed lines": 0,
    }


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("block_bytes", [4 << 20, 16])
def test_malformed_lines_are_skipped_and_counted(tmp_path, monkeypatch, ending, block_bytes):
    monkeypatch.setattr("loka.data.source.text.BLOCK_BYTES", block_bytes)
    text = ["short", "1\t1\ta", "0\t2", "", "0\t2\ta", "1\t3\tb", "1\t2\t3\t4", "\t\t", "0\t4\tb", "x", ""]
    source = tiny(tmp_path / "t.tsv", ending.join(text))
    assert source.rows == 4
    counts = []
    for batch in source.batches(1):
        assert len(batch) == 1
        counts.append(source.account()["malformed lines"])
    # Each is charged to the good row after it, and what ends the file to the last row.
    assert counts == [1, 3, 3, 6]
    late = tiny(tmp_path / "t.tsv", ending.join(text), first_row=1, rows=2)
    gather(late, 1, start=1)
    assert late.account()["malformed lines"] == 0


@pytest.mark.parametrize("write", [write_parquet, write_csv, write_tsv])
@pytest.mark.parametrize("batch_size", sweep([1, 37, 500], [37]))
def test_rows_depend_on_neither_batch_size_nor_start(tmp_path, write, batch_size):
    suffix = write.__name__.removeprefix("write_")
    path = write(tmp_path / f"t.{suffix}", made_up(180))
    source = TableClicks(path, vocabulary=hashed_vocabulary(99), first_row=20, rows=130)  # ends with a row group
    whole = gather(source)
    assert len(whole[2]) == source.rows == 130
    for start in (0, 1, 3):
        batches = list(source.batches(batch_size, start=start))
        first = min(start * batch_size, 130)
        assert len(batches) == -(-(130 - first) // batch_size)
        if batches:
            assert_same(gather(source, batch_size, start), [part[first:] for part in whole])


@pytest.mark.slow
def test_files_follow_each_other_and_shards_cover_them_once(tmp_path):
    rows = made_up(100)
    parts = [
        write_tsv(tmp_path / "a.tsv", rows[:30]),
        write_parquet(tmp_path / "b.parquet", rows[30:70], 7),
        write_csv(tmp_path / "c.csv", rows[70:]),
    ]
    vocabulary = hashed_vocabulary(99)
    whole = gather(TableClicks(write_tsv(tmp_path / "all.tsv", rows), vocabulary=vocabulary))
    assert_same(gather(TableClicks(parts, vocabulary=vocabulary)), whole)
    shards = [TableClicks(parts, vocabulary=vocabulary, shard=s, shards=3) for s in range(3)]
    joined = [torch.cat(tensors) for tensors in zip(*map(gather, shards), strict=True)]
    assert_same(joined, whole)


def test_holdout_is_the_tail_and_the_vocabulary_never_saw_it(tmp_path):
    rows = made_up(100)
    late = [(*row[:14], "only-late", *row[15:]) for row in rows[80:]]
    path = write_tsv(tmp_path / "t.tsv", [*rows[:80], *late])
    train, test = open_table(path, holdout=0.2, min_count=1)
    assert (train.rows, test.rows) == (80, 20)
    vocabulary = build_vocabulary(path, rows=80, min_count=1)
    both = TableClicks(path, vocabulary=vocabulary)
    assert_same([torch.cat(pair) for pair in zip(gather(train), gather(test), strict=True)], gather(both))
    assert (gather(test)[1][:, 0] == 0).all()
    assert train.account()["unknown categories"] == 0
    assert test.account()["unknown categories"] >= 20
    assert train.identity != test.identity


def test_a_missing_column_is_refused_with_both_lists(tmp_path):
    header = tuple(name for name in CRITEO.columns if name not in ("I5", "C26"))
    path = write_csv(tmp_path / "t.csv", [(0,) * len(header)], header)
    with pytest.raises(DataRefused, match="missing: I5, C26\n") as refusal:
        TableClicks(path, vocabulary=hashed_vocabulary(9))
    assert "present: label, I1, I2" in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("2\t1\ta\n", "label column y must hold 0 and 1 only\n  found '2'"),
        ("\t1\ta\n", "label column y"),
        ("click\t1\ta\n", "column y .* cannot be read as numbers\n.*'click'"),
        ("1\t1\ta\n0\tmany\ta\n", "column d .field 2.*\n.*'many'\n.*line 2 .*\n.*correct the line"),
        ("y\td\tc\n1\t1\ta\n", "column d .field 2.*\n.*'d'\n.*\n.*\"header\": true"),
        ("1,2,3\n", "no readable row\n  1 lines"),
        ("\n\n", "no readable row"),
        ("", "the file is empty"),
    ],
)
def test_rows_without_a_meaning_are_refused(tmp_path, text, says):
    with pytest.raises(DataRefused, match=says):
        gather(tiny(tmp_path / "t.tsv", text))


def test_parquet_values_without_a_meaning_are_refused(tmp_path):
    path = tmp_path / "t.parquet"
    cases = [
        ({"y": [0, 3], "d": [1, 2], "c": ["a", "b"]}, "label column y.*\n  found 3"),
        ({"y": [0, None], "d": [1, 2], "c": ["a", "b"]}, "label column y.*\n  found None"),
        ({"y": [0, 1], "d": ["1", "two"], "c": ["a", "b"]}, "column d .*\n.*'two'"),
        ({"y": [0, 1], "d": [1, 2], "c": [["a"], ["b"]]}, "column c of type list"),
        ({"y": [], "d": [], "c": []}, "has no rows"),
    ]
    for columns, says in cases:
        parquet.write_table(pa.table(columns), path)
        with pytest.raises(DataRefused, match=rf"t\.parquet: (the file )?{says}"):
            gather(TableClicks(path, schema=TINY, vocabulary=hashed_vocabulary(9)))
    parquet.write_table(pa.table(cases[3][0]), path)
    with pytest.raises(DataRefused, match=r"t\.parquet: column c of type list"):
        build_vocabulary(path, schema=TINY)


def test_lists_that_pyarrow_cannot_read_are_refused(tmp_path):
    """Of dictionaries, in several row groups: an ArrowNotImplementedError, which is no ValueError."""
    seen = pa.array([["a", "b"]] * 20, pa.list_(pa.dictionary(pa.int32(), pa.string())))
    parquet.write_table(pa.table({"y": [0] * 20, "c": ["x"] * 20, "s": seen}), tmp_path / "t.parquet", row_group_size=5)
    schema = Schema(label="y", dense=(), sparse=("c",), sequence="s")
    with pytest.raises(DataRefused, match=r"t\.parquet: pyarrow cannot read a column(.|\n)*lists of plain strings"):
        gather(TableClicks(tmp_path / "t.parquet", schema=schema, vocabulary=hashed_vocabulary(9)))


def test_whole_floats_are_the_categories_that_integers_are(tmp_path):
    """One missing value makes a column of integers one of floats, and 2e10 was another category then."""
    ids = [7, 20_000_000_000, 1 << 52, -3]
    read = []
    for values in (ids, [str(one) for one in ids], [float(one) for one in ids]):
        path = tmp_path / "t.parquet"
        parquet.write_table(pa.table({"y": [0] * 5, "d": [0.0] * 5, "c": pa.array([*values, None])}), path)
        read.append(gather(TableClicks(path, schema=TINY, vocabulary=hashed_vocabulary(1 << 30)))[1].tolist())
    assert read[0] == read[1] == read[2]
    strings = category_strings(pa.chunked_array([pa.array([1.5, np.inf, 2.0**63, np.nan], pa.float32())]), name="c")
    assert strings.to_pylist() == ["1.5", "inf", "9.223372e+18", None]


@pytest.mark.parametrize(
    ("one", "types"),
    [
        ([7, 0, -30], [pa.int64(), pa.decimal128(19, 0), pa.decimal128(21, 2), pa.decimal256(40, 12)]),
        ([Decimal("7.5"), Decimal("-0.1")], [pa.float64(), pa.decimal128(12, 7), pa.decimal128(20, 9)]),
        ([Decimal("7"), Decimal("0.0000001")], [pa.decimal128(12, 7), pa.decimal128(20, 9)]),
        ([datetime(2026, 1, 2, 3, 4, 5, 500_000)], [pa.timestamp(unit) for unit in ("ms", "us", "ns")]),
        ([datetime(2026, 1, 2)], [pa.timestamp(unit) for unit in ("s", "ms", "us", "ns")]),
        ([datetime(2026, 1, 2)], [pa.timestamp(unit, tz="UTC") for unit in ("s", "us")]),
        ([time(12, 30)], [pa.time32("s"), pa.time32("ms"), pa.time64("us")]),
        ([timedelta(seconds=30)], [pa.duration("s"), pa.duration("us")]),
    ],
)
def test_decimals_and_times_are_one_category_in_any_unit(one, types):
    """A test set in nanoseconds had no category of a training set in microseconds."""
    first, *others = (category_strings(pa.chunked_array([pa.array(one).cast(kind)]), name="c") for kind in types)
    assert len(set(first.to_pylist())) == len(one)
    assert all(found.to_pylist() == first.to_pylist() for found in others)


def test_parquet_column_types_that_mean_the_same_read_the_same(tmp_path):
    plain = pa.table({"y": [0, 1, 1], "d": [1.0, None, 3.0], "c": ["10", None, "12"]})
    others = [
        {"y": pa.array([False, True, True]), "d": pa.array([1, None, 3], pa.int64())},
        {"c": pa.array([10, None, 12], pa.int32())},
        {"c": pa.array([10.0, float("nan"), 12.0])},
        {"c": pa.array(["10", "", "12"]).dictionary_encode(), "d": pa.array(["1", "", "3"])},
        {"c": pa.array(["10", None, "12"], pa.large_string()), "d": pa.array([1, np.nan, 3], pa.float32())},
    ]
    path = tmp_path / "t.parquet"
    parquet.write_table(plain, path)
    vocabulary = build_vocabulary(path, schema=TINY, min_count=1)
    source = TableClicks(path, schema=TINY, vocabulary=vocabulary)
    expected = gather(source)
    assert expected[1].tolist() == [[1], [0], [2]]
    for number, other in enumerate(others):
        changed = tmp_path / f"{number}.parquet"
        columns = {name: other.get(name, plain[name]) for name in plain.column_names}
        parquet.write_table(pa.table(columns), changed)
        again = TableClicks(changed, schema=TINY, vocabulary=vocabulary)
        assert_same(gather(again), expected)
        assert again.account() == source.account()


def test_quotes_belong_to_csv_only(tmp_path):
    quoted = tiny(tmp_path / "t.csv", '"y","d","c"\n1,2,"a,b"\n')
    assert_same(gather(quoted), gather(tiny(tmp_path / "u.tsv", "1\t2\ta,b\n")))
    lone = tiny(tmp_path / "v.tsv", '1\t2\t"a\n0\t3\tb\n')
    assert lone.rows == 2


def test_a_schema_hint_overrides_the_suffix(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("\ufeffc|Y|d|junk|junk\na|1|2|.|.\n", encoding="utf-8")
    schema = Schema(label="y", dense=("d",), sparse=("c",), separator="|", header=True)
    dense, _, label = gather(TableClicks(path, schema=schema, vocabulary=hashed_vocabulary(9)))
    assert label.tolist() == [1.0]
    torch.testing.assert_close(dense, torch.tensor([[np.log(3.0)]], dtype=torch.float32))


def test_formats_paths_and_ranges_that_do_not_exist_are_refused(tmp_path):
    path = write_tsv(tmp_path / "t.dat", made_up(5))
    vocabulary = hashed_vocabulary(9)
    with pytest.raises(DataRefused, match="suffix does not say"):
        TableClicks(path, vocabulary=vocabulary)
    with pytest.raises(UnknownName, match="csv, parquet, tsv"):
        TableClicks(path, vocabulary=vocabulary, format="npy")
    assert TableClicks(path, vocabulary=vocabulary, format="tsv").rows == 5
    with pytest.raises(DataRefused, match="the table has 5 rows"):
        TableClicks(path, vocabulary=vocabulary, format="tsv", first_row=3, rows=3)
    with pytest.raises(DataRefused, match="not a readable parquet file"):
        TableClicks(path, vocabulary=vocabulary, format="parquet")
    with pytest.raises(DataRefused, match="cannot be opened"):
        TableClicks(tmp_path / "absent.tsv", vocabulary=vocabulary)
    with pytest.raises(ValueError, match="holdout=1"):
        open_table(path, holdout=1.0)


def test_a_column_without_any_value_is_all_missing(tmp_path):
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"y": [0, 1], "d": [None, None], "c": [None, None]}), path)
    source = TableClicks(path, schema=TINY, vocabulary=build_vocabulary(path, schema=TINY))
    dense, sparse, _ = gather(source)
    assert dense.tolist() == [[0.0], [0.0]]
    assert sparse.tolist() == [[0], [0]]
    assert source.vocab_sizes == (1,)
    assert source.account()["missing dense values"] == source.account()["missing categories"] == 2


def test_without_pyarrow_the_way_out_is_named(tmp_path, monkeypatch):
    path = write_tsv(tmp_path / "t.tsv", made_up(5))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for attempt in (open_table, build_vocabulary):
        with pytest.raises(MissingLibrary, match=r"pip install 'loka\[data\]'"):
            attempt(path)


def test_identity_follows_file_vocabulary_and_range(tmp_path):
    path = write_tsv(tmp_path / "t.tsv", made_up(20))
    sources = [
        TableClicks(path, vocabulary=hashed_vocabulary(9)),
        TableClicks(path, vocabulary=hashed_vocabulary(8)),
        TableClicks(path, vocabulary=hashed_vocabulary(9), rows=10),
    ]
    assert sources[0].identity == TableClicks(path, vocabulary=hashed_vocabulary(9)).identity
    write_tsv(path, made_up(21, seed=1))
    sources.append(TableClicks(path, vocabulary=hashed_vocabulary(9)))
    assert sources[-1].rows == 21
    assert len({source.identity for source in sources}) == 4


@pytest.mark.parametrize("large", [False, True])
def test_identity_follows_the_content(tmp_path, monkeypatch, large):
    """A large file is known by blocks: here three of 64 bytes, at both ends and in the middle."""
    if large:
        monkeypatch.setattr("loka.data.content.BLOCK", 64)
        monkeypatch.setattr("loka.data.content.BLOCKS", 3)
    path = write_tsv(tmp_path / "t.tsv", made_up(20))
    status, data = path.stat(), path.read_bytes()

    def identity(content, *, later=0):
        path.write_bytes(content)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + later))
        return TableClicks(path, vocabulary=hashed_vocabulary(9)).identity

    first = identity(data)
    assert identity(data) == first
    assert (identity(data, later=1) == first) != large, "a small file that was touched is the same"
    for place in (0, len(data) // 2, len(data) - 2):
        for digit in b"01234567\t":
            changed = data[:place] + bytes([digit]) + data[place + 1 :]
            if changed != data and (place or digit in b"01"):
                assert identity(changed) != first, "of the same size and mtime"


def test_schema_json_in_both_spellings(tmp_path):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps({"label": "y", "dense": ["d"], "sparse": ["c"], "separator": ";"}))
    assert Schema.from_json(path) == Schema(label="y", dense=("d",), sparse=("c",), separator=";")
    features = [
        {"name": ["d", "e"], "type": "numeric", "active": True},
        {"name": "c", "type": "categorical"},
        {"name": "off", "type": "categorical", "active": False},
    ]
    path.write_text(json.dumps({"label_col": {"name": "y"}, "feature_cols": features}))
    assert Schema.from_json(path) == Schema(label="y", dense=("d", "e"), sparse=("c",))
    for wrong in ('{"label": "y"', '{"label": "y", "dnse": []}', '{"feature_cols": []}', "[]", '{"label": "y"}'):
        path.write_text(wrong)
        with pytest.raises(DataRefused, match=r"schema"):
            Schema.from_json(path)


@pytest.mark.skipif(not REAL.exists(), reason="the real sample ../shared/data/criteo_80k.parquet is absent")
def test_the_real_sample_splits_and_reads():
    train, test = open_table(REAL)
    assert (train.rows, test.rows) == (64_000, 16_000)
    dense, sparse, label = gather(test, 4096)
    assert dense.shape == (16_000, 13)
    assert torch.isfinite(dense).all()
    assert (sparse < torch.tensor(test.vocab_sizes)).all()
    assert (sparse >= 0).all()
    assert 0.02 < label.mean() < 0.05
    account = test.account()
    assert account["unknown categories"] > 0
    assert account["malformed lines"] == 0
    column = parquet.read_table(REAL, columns=[f"i{n}" for n in range(1, 14)]).slice(64_000)
    assert account["missing dense values"] == sum(part.null_count for part in column.columns)
