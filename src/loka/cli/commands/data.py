"""`loka data`: prepare rows once, look at what was prepared, and see how fast it reads."""

import re
import time
from pathlib import Path
from typing import Annotated

import typer

from loka.cli.terminal import say
from loka.core.exceptions import LokaError
from loka.data import CRITEO, Frequency, Schema, Shuffle, hashed_vocabulary, open_shards, read_manifest
from loka.data import convert as convert_files
from loka.data.categories.vocabulary import HashedVocabulary, Vocabulary, read_vocabulary
from loka.data.conversion import VOCABULARY
from loka.report.progress import ProgressBars

data_app = typer.Typer(help="Prepare rows for fast reading.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(help="Folder written by `loka data convert`.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Threads; one per CPU if left out.")]


@data_app.command()
def convert(
    files: Annotated[list[Path], typer.Argument(help="Criteo TSV, parquet or CSV, in the order of time.")],
    out: Annotated[Path, typer.Option(help="Folder for the shards; an unfinished one is continued.")],
    schema: Annotated[Path | None, typer.Option(help="JSON naming the columns; Criteo's if left out.")] = None,
    buckets: Annotated[int | None, typer.Option(min=1, help="Hash categories into so many ids.")] = None,
    min_count: Annotated[
        int | None, typer.Option(min=1, help="Keep the categories seen so often, counted in a first pass.")
    ] = None,
    max_size: Annotated[int | None, typer.Option(min=1, help="At most so many per column.")] = None,
    holdout: Annotated[
        float, typer.Option(min=0, max=0.99, help="Leave the last share of the rows out of that pass.")
    ] = 0.0,
    vocabulary: Annotated[
        Path | None, typer.Option(help="Prepared folder whose ids to use, as for a test set.")
    ] = None,
    format: Annotated[str | None, typer.Option(help="tsv, csv or parquet, where a suffix does not say.")] = None,
    workers: Workers = None,
) -> None:
    """Tables to parquet shards of encoded rows, once; the same command goes on after a kill."""
    _require_order_of_time(files)
    known = _vocabulary(buckets, min_count, max_size, holdout, vocabulary)
    started = time.perf_counter()
    manifest = convert_files(
        files,
        out,
        vocabulary=known,
        schema=Schema.from_json(schema) if schema else CRITEO,
        format=format,
        workers=workers,
        track=ProgressBars(),
    )
    seconds = time.perf_counter() - started
    say(f"{manifest.rows} rows in {out} after {seconds:.1f} s")
    _print_counts(manifest.counts)


@data_app.command()
def info(folder: Folder) -> None:
    """What a prepared folder holds, and what was replaced or skipped on the way into it."""
    manifest = read_manifest(folder)
    say(f"{manifest.rows} rows in {len(manifest.shards)} of {manifest.pieces} shards")
    say(f"{len(manifest.dense)} dense and {len(manifest.sparse)} sparse features")
    if len(manifest.tasks) > 1:
        say(f"{len(manifest.tasks)} tasks: {', '.join(manifest.tasks)}")
    for name, size in zip(manifest.sparse, manifest.vocab_sizes, strict=True):
        say(f"{name}: {size} ids")
    if manifest.history:
        say(f"history: {manifest.history.length} of {manifest.history.vocab_size} ids")
    _print_counts(manifest.counts)


@data_app.command()
def check(folder: Folder, workers: Workers = None) -> None:
    """Read every page of every shard against its checksum."""
    source = open_shards(folder, workers=workers)
    total = -(-source.rows // 65_536)
    rows = sum(map(len, ProgressBars()(source.batches(65_536), "check", total)))
    say(f"{rows} rows read, all as written")


@data_app.command()
def speed(
    folder: Folder,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows in a batch.")] = 8192,
    seconds: Annotated[float, typer.Option(min=0.1, help="Stop after so long.")] = 10.0,
    shuffle: Annotated[bool, typer.Option(help="Read in a shuffled order.")] = True,
    workers: Workers = None,
) -> None:
    """Rows per second of the reader on this machine, without a model."""
    source = open_shards(folder, shuffle=Shuffle(seed=0 if shuffle else None), workers=workers)
    rows, started = 0, time.perf_counter()
    for batch in source.batches(batch_size):
        rows += len(batch)
        if time.perf_counter() - started > seconds:
            break
    say(f"{rows / (time.perf_counter() - started):.0f} rows/s over {rows} rows")


def _require_order_of_time(files: list[Path]) -> None:
    """A shell writes day_*.tsv out with day_10 before day_2, and the rows held out would be those of day 9."""
    names = [str(file) for file in files]
    by_number = sorted(names, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
    if len({re.sub(r"\d+", "#", name) for name in names}) == 1 and names == sorted(names) != by_number:
        raise LokaError(
            "these files are in the order of the alphabet, which is not that of their numbers",
            why=[next(f"{a} stands where {b} should" for a, b in zip(names, by_number, strict=True) if a != b)],
            way_out="rows are read in the order of files, as that of time: give them by number, $(ls -v day_*.tsv)",
        )


def _vocabulary(
    buckets: int | None, min_count: int | None, max_size: int | None, holdout: float, folder: Path | None
) -> Vocabulary | HashedVocabulary | Frequency:
    if sum(choice is not None for choice in (buckets, min_count, folder)) != 1:
        raise LokaError(
            "one way from categories to ids has to be chosen",
            way_out="--buckets N hashes, --min-count N counts in a first pass, --vocabulary FOLDER takes "
            "those of a folder converted before",
        )
    if min_count is None and (max_size is not None or holdout):
        raise LokaError("--max-size and --holdout belong to --min-count", way_out="leave them out")
    if folder is not None:
        return read_vocabulary(folder / VOCABULARY)
    if buckets is not None:
        return hashed_vocabulary(buckets)
    return Frequency(min_count=min_count or 1, max_size=max_size, holdout=holdout)


def _print_counts(counts: dict[str, int]) -> None:
    for reason, number in counts.items():
        if number:
            say(f"{number} {reason}")
