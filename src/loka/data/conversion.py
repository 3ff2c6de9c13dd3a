"""Any table to prepared clicks, once: in parallel, resumable, in bounded memory.

Files are cut into pieces (byte ranges of text, row groups of parquet) that depend on the files alone. A
thread turns one piece into one shard; the manifest is rewritten after each, so a killed run loses the pieces
that were under way and no others. Shards follow the pieces, so the rows keep their order. A thread holds a
few tens of MB.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any

from loka.core.exceptions import DataRefused, FileRefused, LokaError, NotWritten, differing
from loka.core.progress import Track, untracked
from loka.core.storage.alone import alone_in
from loka.core.storage.files import digest_of
from loka.data.block import MOST_IDS, training_rows
from loka.data.categories.encoding import ENCODING, REASONS, encoded_of, history_in
from loka.data.categories.vocabulary import (
    HashedVocabulary,
    Vocabulary,
    build_vocabulary,
    read_vocabulary,
    write_vocabulary,
)
from loka.data.content import content_of
from loka.data.files import NAME_THE_FORMAT, Paths, TableFile, open_files
from loka.data.formats.shard_writer import UNFINISHED, ShardWriter
from loka.data.formats.shards import GROUP_ROWS, MANIFEST, Manifest, Shard, check_size, read_manifest, write_manifest
from loka.data.schema import CRITEO, Schema
from loka.data.source.rows import Piece, count_piece, piece_chunks, pieces_of
from loka.data.workers import as_done, in_order, processors

VOCABULARY = "vocabulary.json"
# A shard is made of that much input: small inputs still give every core some, large ones few files.
LEAST_SHARD, MOST_SHARD, SHARDS = 4 << 20, 256 << 20, 64


class ConversionStopped(LokaError):
    """The disk is full or refuses; what was converted so far is kept."""


@dataclass(frozen=True, kw_only=True)
class Frequency:
    """A vocabulary of the categories seen `min_count` times in all rows but the last `holdout` share.

    `max_size` keeps the most frequent of a column. It is built in a first pass over the files.
    """

    min_count: int = 2
    max_size: int | None = None
    holdout: float = 0.0

    def __post_init__(self) -> None:
        if self.min_count < 1 or (self.max_size is not None and self.max_size < 1):
            raise ValueError(f"min_count={self.min_count}, max_size={self.max_size}: need at least 1")
        if not 0.0 <= self.holdout < 1.0:
            raise ValueError(f"holdout={self.holdout}: a share of the rows, below 1")


def convert(
    files: Paths,
    folder: str | Path,
    *,
    vocabulary: Vocabulary | HashedVocabulary | Frequency,
    schema: Schema = CRITEO,
    format: str | None = None,
    workers: int | None = None,
    track: Track = untracked,
) -> Manifest:
    """Write the rows of `files`, in their order, as prepared clicks; `open_shards` reads them.

    The same call after a kill goes on where it stopped: shards that fit the manifest are kept. What is
    replaced or skipped is counted as by `TableClicks`, and in the manifest's `counts`. `workers` threads, one
    per CPU if None, do not change the result.

    Raises:
        DataRefused: rows that cannot be read, or the folder holds a conversion of something else.
        InUse: another process is converting into it.
        ConversionStopped: the disk is full or refuses.
    """
    opened, folder = open_files(files, format=format), Path(folder)
    if folder.exists() and not folder.is_dir():
        raise DataRefused(f"{folder} is a file, and shards go to a folder", way_out="name another one (--out)")
    workers = workers or processors()
    settings = _settings(opened, schema, vocabulary)
    digest = digest_of(settings)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with alone_in(folder, "converting"):
            found = _earlier(folder, settings, digest)
            for left in folder.glob(f"{UNFINISHED}*"):
                left.unlink()
            pieces = [p for file in opened for p in pieces_of(file, schema, target=_shard_bytes(opened))]
            known = _vocabulary(folder, opened, schema, vocabulary, digest, workers, track)
            sizes = {column: known.size(column) for column in (*schema.sparse, *schema.sequences)}
            if max(sizes.values(), default=0) > MOST_IDS:
                raise DataRefused(
                    f"{max(sizes, key=sizes.__getitem__)} has {max(sizes.values())} ids",
                    why=[f"shards hold ids of 32 bits, up to {MOST_IDS}"],
                    way_out="fewer buckets, or a vocabulary with max_size",
                )
            manifest = Manifest(
                settings=settings,
                digest=digest,
                pieces=len(pieces),
                dense=schema.dense,
                sparse=schema.sparse,
                vocab_sizes=tuple(sizes[column] for column in schema.sparse),
                history=history_in(schema, known),
                group_rows=GROUP_ROWS,
                shards=found,
            )
            write_manifest(folder, manifest)
            return _converted(folder, manifest, pieces, schema, known, workers, track)
    except OSError as error:
        raise ConversionStopped(
            f"cannot write to {folder}",
            why=error.why if isinstance(error, NotWritten) else [str(error)],
            way_out="free space, then run the same conversion again: it goes on where this one stopped",
        ) from error


def _converted(
    folder: Path,
    manifest: Manifest,
    pieces: list[Piece],
    schema: Schema,
    vocabulary: Vocabulary | HashedVocabulary,
    workers: int,
    track: Track,
) -> Manifest:
    stop = Event()
    if isinstance(vocabulary, Vocabulary):
        vocabulary.prepare()

    def one(number: int) -> tuple[int, Shard] | None:
        writer = ShardWriter(folder, f"shard-{number:05d}.parquet", group_rows=manifest.group_rows)
        shard = _shard(writer, pieces[number], schema, vocabulary, stop)
        return None if shard is None else (number, shard)

    missing = [number for number in range(len(pieces)) if number not in manifest.shards]
    results = as_done(one, missing, workers=workers, stop=stop)
    try:
        for done in track(results, "convert", len(missing)):
            assert done is not None  # a stopped piece belongs to a run that failed
            manifest = replace(manifest, shards={**manifest.shards, done[0]: done[1]})
            write_manifest(folder, manifest)
    finally:
        results.close()
    if not manifest.rows:
        raise DataRefused(
            f"{pieces[0].file.path}: no readable row",
            why=[f"{number} {reason}" for reason, number in manifest.counts.items() if number],
            way_out=NAME_THE_FORMAT,
        )
    return manifest


def _shard(
    writer: ShardWriter, piece: Piece, schema: Schema, vocabulary: Vocabulary | HashedVocabulary, stop: Event
) -> Shard | None:
    """One piece as a shard; None when told to stop."""
    counts = dict.fromkeys(REASONS, 0)
    try:
        for chunk in piece_chunks(piece, schema):
            if stop.is_set():
                writer.abandon()
                return None
            counts["malformed lines"] += chunk.lost
            if len(chunk):
                block = encoded_of(piece.file.path, chunk, schema, vocabulary)
                for reason, total in zip(REASONS, block.counts.sum(axis=0).tolist(), strict=True):
                    counts[reason] += total
                writer.add(block)
        size = writer.finish()
    except BaseException:
        writer.abandon()
        raise
    return Shard(file=writer.name, rows=writer.rows, bytes=size, counts=counts)


def _earlier(folder: Path, settings: dict[str, Any], digest: str) -> dict[int, Shard]:
    """The shards of an earlier run of the same conversion that are as they were written."""
    if not (folder / MANIFEST).exists():
        if any(folder.glob("*.parquet")):
            raise DataRefused(
                f"{folder} holds parquet files and no manifest",
                why=["a conversion writes shard-00000.parquet and so on over what is there"],
                way_out="choose an empty folder",
            )
        return {}
    try:
        manifest = read_manifest(folder)
    except FileRefused as error:
        raise FileRefused(error.what, why=error.why, way_out=f"delete {folder} and convert again") from error
    if manifest.digest != digest:
        raise DataRefused(
            f"{folder} holds another conversion",
            why=differing(manifest.settings, settings),
            way_out="choose another folder, or delete this one",
        )
    return {number: shard for number, shard in manifest.shards.items() if _as_written(folder, shard)}


def _as_written(folder: Path, shard: Shard) -> bool:
    from pyarrow import parquet

    if not shard.rows:
        return True
    try:
        check_size(folder, shard)
        return bool(parquet.read_metadata(folder / shard.file).num_rows == shard.rows)
    except (DataRefused, OSError, ValueError):
        return False


def _vocabulary(
    folder: Path,
    files: tuple[TableFile, ...],
    schema: Schema,
    wanted: Vocabulary | HashedVocabulary | Frequency,
    digest: str,
    workers: int,
    track: Track,
) -> Vocabulary | HashedVocabulary:
    """The vocabulary, kept in the folder, where a later run finds the result of the first pass."""
    path = folder / VOCABULARY
    if isinstance(wanted, Frequency):
        if path.exists():
            try:
                return read_vocabulary(path, made_for=digest)
            except FileRefused:
                pass  # of another conversion, or cut short: built again
        rows = None
        if wanted.holdout:
            pieces = [p for file in files for p in pieces_of(file, schema, target=_shard_bytes(files))]
            counted = in_order(lambda p: count_piece(p, schema), pieces, workers=workers, ahead=workers)
            total = sum(track(counted, "count rows", len(pieces)))
            rows = training_rows(total, holdout=wanted.holdout)
        wanted = build_vocabulary(
            [file.path for file in files],
            schema=schema,
            rows=rows,
            min_count=wanted.min_count,
            max_size=wanted.max_size,
            format=files[0].format if len({file.format for file in files}) == 1 else None,
            workers=workers,
            track=track,
        )
    write_vocabulary(path, wanted, made_for=digest)
    return wanted


def _settings(
    files: tuple[TableFile, ...], schema: Schema, vocabulary: Vocabulary | HashedVocabulary | Frequency
) -> dict[str, Any]:
    """What the shards follow from; JSON values as they are read back."""
    if isinstance(vocabulary, Frequency):
        described = {"kind": "frequency", **asdict(vocabulary)}
    elif isinstance(vocabulary, HashedVocabulary):
        described = vocabulary.to_dict()
    else:
        described = {"kind": "known", "digest": vocabulary.digest}
    schema_dict = {k: list(v) if isinstance(v, tuple) else v for k, v in schema.to_dict().items()}
    return {
        "encoding": ENCODING,
        "files": [[file.format, *content_of(file.path)] for file in files],
        "schema": schema_dict,
        "vocabulary": described,
        "shard_bytes": _shard_bytes(files),
        "group_rows": GROUP_ROWS,
    }


def _shard_bytes(files: tuple[TableFile, ...]) -> int:
    return min(max(sum(file.size for file in files) // SHARDS, LEAST_SHARD), MOST_SHARD)
