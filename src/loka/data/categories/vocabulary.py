"""From category strings to ids: a table of known categories, or a hash.

Id 0 is a missing or unknown category; known ones are 1..V in sorted order. `build_vocabulary` reads the
training rows once. `hashed_vocabulary` needs no pass and knows no unknowns, at the price of collisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from loka.core.exceptions import DataRefused
from loka.core.progress import Track, untracked
from loka.core.storage.codec import decode
from loka.core.storage.files import read_record, write_record
from loka.core.storage.untrusted import Limits
from loka.data.categories.columns import category_strings, sequence_strings
from loka.data.categories.hashing import hashes_of
from loka.data.content import identity_of
from loka.data.files import Paths, named, open_files
from loka.data.schema import CRITEO, Schema
from loka.data.source.rows import Piece, count_piece, piece_chunks, pieces_of
from loka.data.workers import as_done, in_order, processors

if TYPE_CHECKING:
    import pyarrow as pa

# Distinct values that wait to be merged into a column's counts: bounds memory at a few MB per column.
PENDING = 1 << 18
# Text that one thread counts at a time.
PIECE_BYTES = 64 << 20
_KIND, _VERSION = "vocabulary", 1
_LIMITS = Limits(bytes=16 << 30, values=1 << 31)  # it has as many categories as the rows had


@dataclass(frozen=True)
class Vocabulary:
    """The known categories of each sparse column, sorted."""

    categories: Mapping[str, tuple[str, ...]]

    def size(self, column: str) -> int:
        """How many ids the column has, id 0 included."""
        return len(self._known(column)) + 1

    def encode(self, column: str, values: pa.ChunkedArray) -> np.ndarray:
        """Ids [n] int64 of strings [n]; null and unknown -> 0."""
        return _by_distinct(values, self._tables[column].ids)

    def prepare(self) -> None:
        """Make the tables that `encode` looks up; threads that encode at once would each make their own."""
        _ = self._tables

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `vocabulary_from_dict` reads it back."""
        return {"kind": "known", "categories": {c: list(known) for c, known in self.categories.items()}}

    @cached_property
    def digest(self) -> str:
        """sha256 of the content; equal digests encode equally."""
        return identity_of(self.to_dict())

    @cached_property
    def _tables(self) -> dict[str, _Table]:
        return {column: _Table(known) for column, known in self.categories.items()}

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
        return _by_distinct(values, self._ids)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `vocabulary_from_dict` reads it back."""
        return {"kind": "hashed", "buckets": self.buckets}

    @property
    def digest(self) -> str:
        """sha256 of the content; equal digests encode equally."""
        return identity_of(self.to_dict())

    def _ids(self, strings: pa.Array) -> np.ndarray:
        return 1 + (hashes_of(strings) % np.uint64(self.buckets)).astype(np.int64)


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
    workers: int | None = None,
    track: Track = untracked,
) -> Vocabulary:
    """The categories seen at least `min_count` times in rows [first_row, first_row + rows) of the files.

    Pass the training rows only. `max_size` keeps the most frequent of a column; equal counts go by name.
    Pieces of the files are counted by `workers` threads, one per CPU if None. Memory grows with the number of
    distinct categories, rare ones included; hash where they do not fit.
    """
    opened = open_files(files, format=format)
    columns = (*schema.sparse, *schema.sequences)
    counts = {column: _Counts() for column in columns}

    def count(part: tuple[Piece, int, int | None]) -> dict[str, pa.Table]:
        piece, first, last = part
        found = {column: _Counts() for column in columns}
        position = 0
        for chunk in piece_chunks(piece, schema):
            low, high = (max(first - position, 0), min(len(chunk), len(chunk) if last is None else last - position))
            position += len(chunk)
            if low < high:
                table = chunk.rows(low, high).table
                with named(piece.file.path):
                    for column in columns:
                        found[column].add(_strings(table[column], column, schema))
            if last is not None and position >= last:
                break
        return {column: partial.merged() for column, partial in found.items()}

    pieces = [piece for file in opened for piece in pieces_of(file, schema, target=PIECE_BYTES)]
    workers = workers or processors()
    parts = _parts(pieces, schema, first_row, rows, workers)
    for tables in track(as_done(count, parts, workers=workers), "vocabulary", len(parts)):
        for column, table in tables.items():
            counts[column].merge(table)
    return Vocabulary({column: counts[column].known(min_count, max_size) for column in columns})


def vocabulary_from_dict(content: Mapping[str, Any]) -> Vocabulary | HashedVocabulary:
    """What `to_dict` of either vocabulary wrote."""
    if content.get("kind") == "known":
        return Vocabulary(decode(Mapping[str, tuple[str, ...]], content["categories"], at="categories"))
    if content.get("kind") == "hashed":
        return hashed_vocabulary(decode(int, content["buckets"], at="buckets"))
    raise DataRefused(
        "this is not a vocabulary",
        why=[f"its kind is {content.get('kind')!r}, and 'known' and 'hashed' are known"],
        way_out="give what to_dict of a vocabulary returned",
    )


def write_vocabulary(path: Path, vocabulary: Vocabulary | HashedVocabulary, *, made_for: str = "") -> None:
    """A record file; `made_for` names what it belongs to."""
    content = {"made_for": made_for, "vocabulary": vocabulary.to_dict()}
    write_record(path, kind=_KIND, version=_VERSION, content=content)


def read_vocabulary(path: str | Path, *, made_for: str | None = None) -> Vocabulary | HashedVocabulary:
    """What `write_vocabulary` wrote.

    Raises:
        FileRefused: missing, damaged, or not `made_for` that.
    """

    def parse(content: dict[str, Any]) -> Vocabulary | HashedVocabulary:
        if made_for not in (None, content["made_for"]):
            raise ValueError("it was made for something else")
        return vocabulary_from_dict(content["vocabulary"])

    return read_record(Path(path), kind=_KIND, version=_VERSION, way_out="build it again", parse=parse, limits=_LIMITS)


class _Table:
    """Ids of known categories, found by hash and then compared.

    pyarrow's `index_in` builds its table anew at every call, which for a million categories takes far longer
    than looking up the few thousand distinct strings of a chunk.
    """

    def __init__(self, known: tuple[str, ...]) -> None:
        import pyarrow as pa

        self._known = pa.array(known, pa.string())
        hashes = hashes_of(self._known)
        self._places = np.argsort(hashes)
        self._hashes = hashes[self._places]

    def ids(self, strings: pa.Array) -> np.ndarray:
        """Ids [n] int64 of strings [n] without nulls; unknown -> 0."""
        import pyarrow as pa
        import pyarrow.compute as pc

        ids = np.zeros(len(strings), np.int64)
        if not len(self._hashes):
            return ids
        hashes = hashes_of(strings)
        found = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        hit = np.flatnonzero(self._hashes[found] == hashes)
        places = self._places[found[hit]]
        same = pc.equal(self._known.take(pa.array(places)), strings.take(pa.array(hit))).to_numpy(False)
        ids[hit[same]] = places[same] + 1
        if not same.all():  # two strings of one hash
            rest = hit[~same]
            index = pc.index_in(strings.take(pa.array(rest)), value_set=self._known)
            ids[rest] = pc.add(pc.fill_null(index, -1), 1).to_numpy()
        return ids


def _by_distinct(values: pa.ChunkedArray, ids: Callable[[pa.Array], np.ndarray]) -> np.ndarray:
    """`ids` of strings [n], computed once for each distinct one; null -> 0."""
    coded = values.combine_chunks().dictionary_encode()
    index = coded.indices.fill_null(-1).to_numpy()
    return np.append(ids(coded.dictionary), 0)[index]


class _Counts:
    """How often each string occurred; new chunks wait until merging them is worth a pass."""

    def __init__(self) -> None:
        self._tables: list[pa.Table] = []
        self._waiting = 0
        self._settled = 0  # distinct values merged so far

    def add(self, strings: pa.ChunkedArray) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        values, counts = pc.value_counts(pc.drop_null(strings)).flatten()
        self.merge(pa.table({"value": values, "count": counts}))

    def merge(self, table: pa.Table) -> None:
        """Add the counts of another table."""
        self._tables.append(table)
        self._waiting += len(table)
        if self._waiting > max(PENDING, self._settled):
            self._tables = [self.merged()]
            self._settled, self._waiting = len(self._tables[0]), 0

    def known(self, min_count: int, max_size: int | None) -> tuple[str, ...]:
        import pyarrow.compute as pc

        merged = self.merged()
        kept = merged.filter(pc.greater_equal(merged["count"], min_count))
        if max_size is not None:
            kept = kept.sort_by([("count", "descending"), ("value", "ascending")]).slice(0, max_size)
        return tuple(sorted(kept["value"].to_pylist()))

    def merged(self) -> pa.Table:
        """`value` and `count`, each value once."""
        import pyarrow as pa

        if not self._tables:
            return pa.table({"value": pa.array([], pa.string()), "count": pa.array([], pa.int64())})
        summed = pa.concat_tables(self._tables).group_by("value").aggregate([("count", "sum")])
        return pa.table({"value": summed["value"], "count": summed["count_sum"]})


def _strings(column: pa.ChunkedArray, name: str, schema: Schema) -> pa.ChunkedArray:
    if name in schema.sequences:
        return sequence_strings(column, name=name, length=schema.sequence_length)[0]
    return category_strings(column, name=name)


def _parts(
    pieces: list[Piece], schema: Schema, first_row: int, rows: int | None, workers: int
) -> list[tuple[Piece, int, int | None]]:
    """The pieces that hold the rows asked for, and which rows of each; None: to the end, uncounted."""
    if not first_row and rows is None:
        return [(piece, 0, None) for piece in pieces]
    counted = in_order(lambda piece: count_piece(piece, schema), pieces, workers=workers, ahead=workers)
    parts: list[tuple[Piece, int, int | None]] = []
    position = 0
    for piece, present in zip(pieces, counted, strict=True):
        low = max(first_row - position, 0)
        high = present if rows is None else min(first_row + rows - position, present)
        if low < high:
            parts.append((piece, low, high))
        position += present
    return parts
