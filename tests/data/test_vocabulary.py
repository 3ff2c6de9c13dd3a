import json
import time

import numpy as np
import pytest
from with_pyarrow import pa, parquet

from loka.core.exceptions import DataRefused
from loka.data import Schema, build_vocabulary, hashed_vocabulary, vocabulary_from_dict
from loka.data.categories import vocabulary as vocabulary_module
from loka.data.categories.hashing import hashes_of

SCHEMA = Schema(label="y", dense=(), sparse=("a", "b"))


def strings(*values):
    return pa.chunked_array([pa.array(values, pa.string())])


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "t.parquet"
    columns = {"y": [0, 1, 0, 1, 0, 1], "a": ["x", "w", "x", None, "w", "q"], "b": [7, 7, 7, 30, 30, 5]}
    parquet.write_table(pa.table(columns), path)
    return path


def test_ids_are_the_sorted_categories_from_one(table):
    built = build_vocabulary(table, schema=SCHEMA, min_count=2)
    assert built.categories == {"a": ("w", "x"), "b": ("30", "7")}  # sorted as strings
    assert built.size("a") == 3
    ids = built.encode("a", strings("x", "w", None, "q", "x"))
    assert ids.dtype == np.int64
    assert ids.tolist() == [2, 1, 0, 0, 2]


def test_only_the_given_rows_are_counted(table):
    assert build_vocabulary(table, schema=SCHEMA, rows=3).categories == {"a": ("x",), "b": ("7",)}
    tail = build_vocabulary(table, schema=SCHEMA, first_row=3, min_count=1)
    assert tail.categories == {"a": ("q", "w"), "b": ("30", "5")}


def test_max_size_keeps_the_most_frequent_and_ties_go_by_name(table):
    built = build_vocabulary(table, schema=SCHEMA, min_count=1, max_size=1)
    assert built.categories == {"a": ("w",), "b": ("7",)}


def test_two_strings_of_one_hash_keep_their_own_ids(table, monkeypatch):
    """Rare among 64-bit hashes, so here all strings of one length collide."""
    lengths = lambda values: np.array([len(value) for value in values.to_pylist()], np.uint64)  # noqa: E731
    built = build_vocabulary(table, schema=SCHEMA, min_count=1)
    monkeypatch.setattr(vocabulary_module, "hashes_of", lengths)
    for column, known in built.categories.items():
        wanted = [known.index(value) + 1 for value in known]
        assert built.encode(column, strings(*known, "y", "", None)).tolist() == [*wanted, 0, 0, 0]


def test_hashes_stay_what_they_were():
    values = ["", "a", "68fd1e64", "z" * 256, "é" * 128, "z" * 257, "z" * 258, "y" + "z" * 257]
    before = [0xECBA3DF2C3383C52, 0xED8170DE1919A24D, 0xBE48B88315C6C721]
    found = hashes_of(pa.array(values)).tolist()
    assert found[:3] == before
    assert len(set(found)) == len(values)
    assert hashes_of(pa.array(["x", *values])[1:]).tolist() == found


def test_a_category_of_megabytes_is_hashed_at_once():
    """Milliseconds; with a numpy pass for each byte it was 20 s."""
    start = time.process_time()
    ids = hashed_vocabulary(1000).encode("a", strings("x" * (4 << 20), "x", "x" * (4 << 20)))
    assert time.process_time() - start < 2
    assert ids[0] == ids[2] != ids[1]


def test_merging_in_small_steps_changes_nothing(table, monkeypatch):
    whole = build_vocabulary(table, schema=SCHEMA)
    monkeypatch.setattr(vocabulary_module, "PENDING", 1)
    monkeypatch.setattr("loka.data.source.rows.PARQUET_ROWS", 1)
    assert build_vocabulary(table, schema=SCHEMA) == whole


def test_json_round_trip_keeps_ids_and_digest(table):
    built = build_vocabulary(table, schema=SCHEMA)
    for vocabulary in (built, hashed_vocabulary(50)):
        again = vocabulary_from_dict(json.loads(json.dumps(vocabulary.to_dict())))
        assert again == vocabulary
        assert again.digest == vocabulary.digest
    assert built.digest != build_vocabulary(table, schema=SCHEMA, min_count=1).digest
    with pytest.raises(DataRefused, match="kind is 'plan'"):
        vocabulary_from_dict({"kind": "plan"})


def test_a_column_it_was_not_built_for_is_refused(table):
    with pytest.raises(DataRefused, match="no column c"):
        build_vocabulary(table, schema=SCHEMA).size("c")


def fnv1a(text):
    """One string at a time, from the definition."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    value ^= value >> 33
    value = value * 0xFF51AFD7ED558CCD % 2**64
    return value ^ (value >> 33)


def test_hash_equals_its_definition_and_missing_is_zero():
    texts = ["", "a", "68fd1e64", "ünï", "a" * 40, "68fd1e64"]
    values = strings("drop", *texts, None).slice(1)  # an offset into the buffers
    ids = hashed_vocabulary(1000).encode("any", values)
    assert ids.tolist() == [1 + fnv1a(text) % 1000 for text in texts] + [0]


def test_hash_fills_its_buckets_evenly():
    ids = hashed_vocabulary(16).encode("c", strings(*(f"{n:08x}" for n in range(8000))))
    counts = np.bincount(ids, minlength=17)
    assert counts[0] == 0
    # 16 binomial cells of mean 500, deviation 21.7; 5 deviations.
    assert np.abs(counts[1:] - 500).max() < 110


def test_no_buckets_are_refused():
    with pytest.raises(ValueError, match="buckets=0"):
        hashed_vocabulary(0)


def test_a_digest_is_of_the_content_and_stays_what_it_was():
    """Shards and checkpoints name it. The order in which columns were counted is no content."""
    first = vocabulary_module.Vocabulary(categories={"a": ("x", "y"), "b": ("z",)})
    second = vocabulary_module.Vocabulary(categories={"b": ("z",), "a": ("x", "y")})
    other = vocabulary_module.Vocabulary(categories={"a": ("x",), "b": ("y", "z")})
    assert first.digest == second.digest != other.digest
    assert first.digest == "300a4277d6bbf3a69ec416415aeb49b6c716868ef62a653113cae288ced950e9"
    assert hashed_vocabulary(10).digest != hashed_vocabulary(11).digest
