"""From category strings to ids: a table of known categories, or a hash.

Id 0 is a missing or unknown category; known ones are 1..V in sorted order. `build_vocabulary` reads the
training rows once. `hashed_vocabulary` needs no pass and knows no unknowns, at the price of collisions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from loka.core.exceptions import DataRefused
from loka.data.encoding import category_strings
from loka.data.files import Paths, open_files
from loka.data.rows import count_rows, read_rows
from loka.data.schema import CRITEO, Schema

if TYPE_CHECKING:
    import pyarrow as pa

# Distinct values that wait to be merged into a column's counts: bounds memory at a few MB per column.
PENDING = 1 << 18


@dataclass(frozen=True)
class Vocabulary:
    """The known categories of each sparse column, sorted."""

    categories: Mapping[str, tuple[str, ...]]

    def size(self, column: str) -> int:
        """How many ids the column has, id 0 included."""
        return len(self._known(column)) + 1

    def encode(self, column: str, values: pa.ChunkedArray) -> np.ndarray:
        """Ids [n] int64 of strings [n]; null and unknown -> 0."""
        import pyarrow.compute as pc

        index = pc.index_in(values, value_set=self._value_sets[column], skip_nulls=True)
        return pc.add(pc.fill_null(index, -1), 1).to_numpy().astype(np.int64)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `vocabulary_from_dict` reads it back."""
        return {"kind": "known", "categories": {c: list(known) for c, known in self.categories.items()}}

    @cached_property
    def digest(self) -> str:
        """sha256 of the content; equal digests encode equally."""
        return _digest(self.to_dict())

    @cached_property
    def _value_sets(self) -> dict[str, pa.Array]:
        import pyarrow as pa

        return {column: pa.array(known, pa.string()) for column, known in self.categories.items()}

    def _known(self, column: str) -> tuple[str, ...]:
        if column not in self.categories:
            raise DataRefused(
                f"the vocabulary has no column {column}",
                why=[f"known: {', '.join(self.categories)}"],
                way_out="build it with the schema that reads the rows",
            )
        return self.categories[column]


@dataclass(frozen=True)
class HashedVocabulary:
    """Ids by hash: 1 + hash(category) mod buckets, the same in every process; missing -> 0."""

    buckets: int

    def size(self, column: str) -> int:
        """How many ids the column has, id 0 included."""
        return self.buckets + 1

    def encode(self, column: str, values: pa.ChunkedArray) -> np.ndarray:
        """Ids [n] int64 of strings [n]; null -> 0."""
        coded = values.combine_chunks().dictionary_encode()
        ids = 1 + (_fnv1a(coded.dictionary) % np.uint64(self.buckets)).astype(np.int64)
        index = coded.indices.fill_null(-1).to_numpy()
        return np.append(ids, 0)[index]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `vocabulary_from_dict` reads it back."""
        return {"kind": "hashed", "buckets": self.buckets}

    @property
    def digest(self) -> str:
        """sha256 of the content; equal digests encode equally."""
        return _digest(self.to_dict())


def hashed_vocabulary(buckets: int) -> HashedVocabulary:
    """Ids by hash into `buckets` buckets per column, plus id 0."""
    if buckets < 1:
        raise ValueError(f"buckets={buckets}: need at least one")
    return HashedVocabulary(buckets)


def build_vocabulary(
    files: Paths,
    *,
    schema: Schema = CRITEO,
    first_row: int = 0,
    rows: int | None = None,
    min_count: int = 2,
    max_size: int | None = None,
    format: str | None = None,
) -> Vocabulary:
    """The categories seen at least `min_count` times in rows [first_row, first_row + rows) of the files.

    Pass the training rows only. `max_size` keeps the most frequent of a column; equal counts go by name.
    """
    opened = open_files(files, format=format)
    total = sum(count_rows(file, schema) for file in opened)
    last = total if rows is None else min(first_row + rows, total)
    counts = {column: _Counts() for column in schema.sparse}
    for chunk in read_rows(opened, schema, first=first_row, last=last):
        for column in schema.sparse:
            counts[column].add(category_strings(chunk.table[column], name=column))
    return Vocabulary({column: counts[column].known(min_count, max_size) for column in schema.sparse})


def vocabulary_from_dict(content: Mapping[str, Any]) -> Vocabulary | HashedVocabulary:
    """What `to_dict` of either vocabulary wrote."""
    if content.get("kind") == "known":
        return Vocabulary({column: tuple(known) for column, known in content["categories"].items()})
    if content.get("kind") == "hashed":
        return hashed_vocabulary(content["buckets"])
    raise DataRefused("not a vocabulary", why=[f"kind is {content.get('kind')!r}, known: 'known', 'hashed'"])


class _Counts:
    """How often each string occurred; new chunks wait until merging them is worth a pass."""

    def __init__(self) -> None:
        self._tables: list[pa.Table] = []
        self._waiting = 0

    def add(self, strings: pa.ChunkedArray) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        values, counts = pc.value_counts(pc.drop_null(strings)).flatten()
        self._tables.append(pa.table({"value": values, "count": counts}))
        self._waiting += len(values)
        if self._waiting > PENDING:
            self._tables, self._waiting = [self._merged()], 0

    def known(self, min_count: int, max_size: int | None) -> tuple[str, ...]:
        import pyarrow.compute as pc

        if not self._tables:
            return ()
        merged = self._merged()
        kept = merged.filter(pc.greater_equal(merged["count"], min_count))
        if max_size is not None:
            kept = kept.sort_by([("count", "descending"), ("value", "ascending")]).slice(0, max_size)
        return tuple(sorted(kept["value"].to_pylist()))

    def _merged(self) -> pa.Table:
        import pyarrow as pa

        summed = pa.concat_tables(self._tables).group_by("value").aggregate([("count", "sum")])
        return pa.table({"value": summed["value"], "count": summed["count_sum"]})


def _fnv1a(strings: pa.Array) -> np.ndarray:
    """64-bit FNV-1a of the UTF-8 bytes of each string [n], with a final mix so that any modulus is fair."""
    import pyarrow as pa

    strings = strings.cast(pa.string())
    count = len(strings)
    hashes = np.full(count, 0xCBF29CE484222325, np.uint64)
    if not count:
        return hashes
    _, offset_buffer, data_buffer = strings.buffers()
    offsets = np.frombuffer(offset_buffer, np.int32)[strings.offset : strings.offset + count + 1]
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.empty(0, np.uint8)
    starts, lengths = offsets[:-1].astype(np.int64), np.diff(offsets)
    rows = np.flatnonzero(lengths > 0)
    step = 0
    while len(rows):
        hashes[rows] = (hashes[rows] ^ data[starts[rows] + step]) * np.uint64(0x100000001B3)
        step += 1
        rows = rows[lengths[rows] > step]
    hashes ^= hashes >> np.uint64(33)
    hashes *= np.uint64(0xFF51AFD7ED558CCD)
    return hashes ^ (hashes >> np.uint64(33))


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
