"""Prepared clicks: a folder of parquet shards with encoded rows, and a manifest.

    manifest.json         a record: settings, what the columns are, and of each shard rows, bytes and counts
    vocabulary.json       a record: from categories to ids
    shard-00000.parquet   label float32, dense list<float32>[D], sparse list<int32>[F]
                          of several tasks label list<float32>[T]; with a history also sequence
                          list<int32>[L], lengths int32; no list without features

Lists of fixed size decode twice as fast as a column per feature and any parquet reader knows them; LZ4 halves
the bytes and costs less than reading them (`reader` in benchmarks/README.md). Pages carry checksums, so a flipped
bit is an error and not a feature. Every row group but a shard's last has `group_rows` rows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from loka.core.exceptions import DataRefused
from loka.core.storage.codec import decode
from loka.core.storage.files import is_own_file, read_record, write_record
from loka.data.batch import ONE_TASK, History
from loka.data.block import Block
from loka.data.files import require_pyarrow
from loka.data.order import Shuffle
from loka.data.reader import Groups, Reader, split

if TYPE_CHECKING:
    import pyarrow as pa

GROUP_ROWS = 8192
MANIFEST = "manifest.json"
_KIND, _VERSION = "manifest of prepared clicks", 1
_MOST_ROWS = 1 << 60
_FOLD = 64


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A file of the folder, and what was replaced or skipped on the way into it; without rows, no file."""

    file: str
    rows: int
    bytes: int
    counts: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a folder holds. `shards` are by piece of the input; all `pieces` of them when it is whole."""

    settings: dict[str, Any]
    digest: str
    pieces: int
    dense: tuple[str, ...]
    sparse: tuple[str, ...]
    vocab_sizes: tuple[int, ...]
    history: History | None
    group_rows: int
    shards: dict[int, Shard]

    @property
    def whole(self) -> bool:
        return len(self.shards) == self.pieces

    @property
    def tasks(self) -> tuple[str, ...]:
        """The label columns that were converted."""
        label = self.settings.get("schema", {}).get("label", ONE_TASK)
        return (label,) if isinstance(label, str) else tuple(label)

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards.values())

    @property
    def counts(self) -> dict[str, int]:
        """What was replaced or skipped in all shards, by reason."""
        found = [shard.counts for shard in self.shards.values()]
        return {reason: sum(counts[reason] for counts in found) for reason in (found[0] if found else ())}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Atomically; the same shards give the same bytes in whatever order they were finished."""
    shards = {f"{number}": asdict(shard) for number, shard in sorted(manifest.shards.items())}
    content = {**asdict(manifest), "shards": shards}
    write_record(folder / MANIFEST, kind=_KIND, version=_VERSION, content=content)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder, whole or not.

    Raises:
        FileRefused: there is none, or it is damaged.
    """
    return read_record(
        folder / MANIFEST,
        kind=_KIND,
        version=_VERSION,
        way_out=f"prepare the folder again: loka data convert FILES --out {folder}",
        parse=_parsed,
    )


class ShardStore:
    """The rows of a prepared folder, for a `Reader`.

    Raises:
        FileRefused: the manifest is missing or damaged.
        DataRefused: the folder is not whole, or a shard is missing or has another size than was written.
    """

    def __init__(self, folder: Path) -> None:
        require_pyarrow()
        self._folder = folder
        self._manifest = manifest = read_manifest(folder)
        if not manifest.whole:
            raise DataRefused(
                f"{folder} is not complete",
                why=[f"{len(manifest.shards)} of {manifest.pieces} pieces are converted"],
                way_out="run the conversion again: it goes on where it stopped",
            )
        self._shards = [shard for _, shard in sorted(manifest.shards.items()) if shard.rows]
        if not self._shards:
            raise DataRefused(f"{folder} has no rows", way_out="convert files that have some")
        for shard in self._shards:
            check_size(folder, shard)
        self._groups = Groups([shard.rows for shard in self._shards], manifest.group_rows)
        self.group_rows = self._groups.rows_of
        self.columns = (*manifest.dense, *manifest.sparse)  # names, in their order
        self.dense_features, self.vocab_sizes = len(manifest.dense), manifest.vocab_sizes
        self.history, self.tasks, self.identity = manifest.history, manifest.tasks, manifest.digest

    def account(self) -> dict[str, int]:
        """Counts of the conversion, over the whole folder."""
        return {f"{reason} (whole folder, when converted)": n for reason, n in self._manifest.counts.items()}

    def load(self, group: int, first: int, last: int) -> Block:
        index, inside = self._groups.locate(group)
        path = self._folder / self._shards[index].file
        table = _read_group(path, inside, int(self.group_rows[group]))
        if wrong := [name for name, kind in self._columns.items() if not _is(table, name, *kind)]:
            raise DataRefused(
                f"{path}: the column {wrong[0]} is not there, or of another type than a conversion writes",
                why=[f"it has {str(table.schema)[:300]}"],
                way_out=f"delete the file; {_redo(self._folder)}",
            )
        nothing = np.empty((last - first, 0), np.float32)
        columns = {name: _array(table[name])[first:last] for name in self._columns}
        none = {"dense": nothing, "sparse": nothing.astype(np.int32), "counts": nothing}
        block = Block(**{**none, **columns})
        self._check(block, path)
        return block

    @cached_property
    def _columns(self) -> dict[str, tuple[str, int]]:
        """Of a shard, with the type of their values and the length of their lists, 0 where they are none."""
        dense, sparse, history = self.dense_features, len(self.vocab_sizes), self.history
        found = {"label": ("float", len(self.tasks) if len(self.tasks) > 1 else 0)}
        found |= {"dense": ("float", dense)} if dense else {}
        found |= {"sparse": ("int32", sparse)} if sparse else {}
        if history is not None:
            found |= {"sequence": ("int32", history.length), "lengths": ("int32", 0)}
        return found

    def _check(self, block: Block, path: Path) -> None:
        """A shard of another folder, or one that somebody made. Ids beyond a table stop a GPU for good, and
        the pages' checksums say only that they are as they were written. Some 3 % of the time of reading."""
        ids = [("sparse", block.sparse, np.array(self.vocab_sizes))]
        if self.history is not None and block.sequence is not None and block.lengths is not None:
            ids.append(("sequence", block.sequence, np.array(self.history.vocab_size)))
            ids.append(("lengths", block.lengths, np.array(self.history.length + 1)))
        wrong = [name for name, found, limit in ids if found.size and not _within(found, limit)]
        wrong += ["label"] if not ((block.label == 0) | (block.label == 1)).all() else []
        # Encoded values are logarithms, whose squares add up to no infinity; one pass without a copy.
        wrong += ["dense"] if not np.isfinite(np.vdot(block.dense, block.dense)) else []
        if wrong:
            raise DataRefused(
                f"{path}: {wrong[0]} has values that no conversion writes",
                why=["ids lie below their vocab_sizes, labels are 0 and 1, dense values are finite"],
                way_out=f"delete the file; {_redo(path.parent)}",
            )


def check_size(folder: Path, shard: Shard) -> None:
    """Raise DataRefused when a shard is missing or has another size than the manifest says."""
    path = folder / shard.file
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataRefused(f"{path}: the shard is missing", why=[str(error)], way_out=_redo(folder)) from error
    if size != shard.bytes:
        raise DataRefused(
            f"{path}: the shard was truncated or overwritten",
            why=[f"it has {size} bytes, and {shard.bytes} were written"],
            way_out=_redo(folder),
        )


def _read_group(path: Path, group: int, rows: int) -> pa.Table:
    from pyarrow import parquet

    try:
        footer = _footer(path, path.stat().st_mtime_ns)
        with parquet.ParquetFile(path, metadata=footer, page_checksum_verification=True) as file:
            table = file.read_row_group(group, use_threads=False)
    except (OSError, ValueError) as error:  # pyarrow's errors are of these two
        raise DataRefused(
            f"{path}: row group {group} cannot be read",
            why=[str(error)],
            way_out=f"delete the file; {_redo(path.parent)}",
        ) from error
    if table.num_rows != rows:
        raise DataRefused(
            f"{path}: row group {group} has {table.num_rows} rows, and {rows} were written",
            way_out=f"delete the file; {_redo(path.parent)}",
        )
    return table


@lru_cache(maxsize=256)
def _footer(path: Path, mtime_ns: int) -> Any:
    """The footer of a shard: parsing it takes as long as reading a group."""
    from pyarrow import parquet

    return parquet.read_metadata(path)


def _is(table: pa.Table, name: str, kind: str, length: int) -> bool:
    """Whether the column is of that type, and nothing is missing in it."""
    import pyarrow as pa

    if table.column_names.count(name) != 1 or table[name].null_count:
        return False
    column = table[name]
    if not length:
        return str(column.type) == kind
    if not pa.types.is_fixed_size_list(column.type) or column.type.list_size != length:
        return False
    whole = not any(chunk.flatten().null_count for chunk in column.chunks)
    return whole and str(column.type.value_type) == kind


def _within(ids: np.ndarray, limit: np.ndarray) -> bool:
    """Ids [n] or [n, F] of 32 bits; a negative one is a large one without its sign."""
    found = np.ascontiguousarray(ids).view(np.uint32)
    # Of long rows numpy takes the maximum six times as fast as of short ones.
    cut = len(found) - len(found) % _FOLD
    largest = found[:cut].reshape(_FOLD, -1, *found.shape[1:]).max(axis=0, initial=0).max(axis=0, initial=0)
    return bool((largest < limit).all() and (found[cut:] < limit).all())


def _array(column: pa.ChunkedArray) -> np.ndarray:
    """A column as [n] or [n, width], without a copy where it is one chunk."""
    import pyarrow as pa

    array = column.combine_chunks()
    if not pa.types.is_fixed_size_list(column.type):
        return array.to_numpy()
    return array.flatten().to_numpy().reshape(-1, column.type.list_size)


def _redo(folder: Path) -> str:
    return f"run the conversion into {folder} again: it redoes only the shards that do not fit the manifest"


def _parsed(content: dict[str, Any]) -> Manifest:
    """Without files beside the folder, and numbers that memory or arithmetic would be lost on. A group takes
    more than one byte of its shard."""
    manifest = decode(Manifest, content)
    if not manifest.tasks or not all(isinstance(name, str) for name in manifest.tasks):
        raise ValueError(f"its schema has the labels {manifest.tasks}, which name no column")
    size = manifest.group_rows
    for number, shard in manifest.shards.items():
        if not is_own_file(shard.file):
            raise ValueError(f"shard {number} names {shard.file!r}, which is no file of the folder")
        possible = 0 < size < _MOST_ROWS and 0 <= shard.rows < _MOST_ROWS
        if not possible or -(-shard.rows // size) > shard.bytes:
            raise ValueError(f"{shard.file} of {shard.bytes} bytes has {shard.rows} rows in groups of {size}")
    if len({frozenset(shard.counts) for shard in manifest.shards.values()}) > 1:
        raise ValueError("shards count other reasons than each other")
    if any(count < 0 for shard in manifest.shards.values() for count in shard.counts.values()):
        raise ValueError("a shard counts less than nothing")
    if len(manifest.vocab_sizes) != len(manifest.sparse):
        raise ValueError("there are not as many vocab_sizes as sparse columns")
    if any(not 0 < ids <= 2**31 + 1 for ids in manifest.vocab_sizes):
        raise ValueError("vocab_sizes that no column has")
    return manifest


def open_shards(
    folder: str | Path,
    *,
    shuffle: Shuffle | None = None,
    first_row: int = 0,
    rows: int | None = None,
    workers: int | None = None,
    pin: bool = False,
) -> Reader:
    """A `Source` over rows [first_row, first_row + rows) of a prepared folder; see `Reader`."""
    store = ShardStore(Path(folder))
    return Reader(store, shuffle=shuffle, first_row=first_row, rows=rows, workers=workers, pin=pin)


def split_shards(
    folder: str | Path,
    *,
    holdout: float = 0.2,
    shuffle: Shuffle | None = None,
    workers: int | None = None,
    pin: bool = False,
) -> tuple[Reader, Reader]:
    """A training and a held-out source: the last `holdout` share of the rows, in their order, is held out.

    The split is that of `open_table` on the files that were converted.
    """
    return split(ShardStore(Path(folder)), holdout=holdout, shuffle=shuffle, workers=workers, pin=pin)
