"""CSV and TSV files as a stream of chunks, with every line that is not a row accounted for.

A file is read in blocks of whole lines and each block is parsed by pyarrow on its own, in one thread: then
the parser says where in the block a bad line was, so it can be charged to a definite row however far the
reader has read ahead. The cost against pyarrow's own streaming reader is its parallelism.

A line is *malformed* when it has too few or too many fields, nothing in any field, or a quoted value that
does not end on it (data/source/quotes.py). It is skipped and charged to the good row after it; those after
the last good row of a file are charged to that row.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from loka.core.exceptions import DataRefused
from loka.data.files import COPY_AGAIN, NAME_THE_FORMAT, TableFile
from loka.data.schema import Schema
from loka.data.source.quotes import ends_open, line_count, without_open_quotes

if TYPE_CHECKING:
    import pyarrow as pa

BLOCK_BYTES = 4 << 20
LONGEST_LINE = 64 << 20
_LINE_END = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """`table` has the schema's columns under its names; `skipped` [n] counts the lines skipped per row.

    `lost` counts the lines skipped in a part of a file that has no row to charge them to.
    """

    table: pa.Table
    skipped: np.ndarray
    lost: int = 0

    def __len__(self) -> int:
        return self.table.num_rows

    def rows(self, first: int, last: int) -> Chunk:
        """Rows [first, last)."""
        return Chunk(table=self.table.slice(first, last - first), skipped=self.skipped[first:last])


@dataclass(frozen=True, kw_only=True)
class _Layout:
    file: TableFile
    schema: Schema
    separator: str
    quote: str | bool
    fields: int
    places: tuple[int, ...]


def text_chunks(
    file: TableFile, schema: Schema, *, label_only: bool = False, span: tuple[int, int] | None = None
) -> Iterator[Chunk]:
    """The rows of a text file in order; `label_only` skips converting the features, to count rows fast.

    With `span` only the lines that begin in those bytes [first, last) of an uncompressed file, of which there
    may be none.
    """
    import pyarrow as pa

    if schema.sequence is not None:
        raise DataRefused(
            f"{file.path}: column {schema.sequence} cannot be read as a sequence",
            why=["text files have no list columns"],
            way_out="store the rows as parquet, or leave `sequence` out of the schema",
        )
    after = span[0] if span else 0
    blocks = _whole_lines(file, span)
    # A header line is the file's, whichever part of it is read.
    head = next(_whole_lines(file, None) if after else blocks, b"").removeprefix(b"\xef\xbb\xbf")
    layout, first = _layout(file, schema, head)
    held: Chunk | None = None
    carried = rows = 0
    for block in blocks if after else _with_first(first, blocks):
        try:
            chunk, trailing = _parse(block, layout, label_only=label_only)
        except pa.ArrowInvalid as error:
            raise _refusal(error, layout, f"row {rows}" + f" after byte {after}" * bool(after)) from error
        if not len(chunk):
            carried += trailing
            continue
        chunk.skipped[0] += carried
        carried = trailing
        rows += len(chunk)
        if held is not None:
            yield held
        held = chunk
    if held is None and span is not None:
        empty = pa.table({name: pa.array([], pa.string()) for name in schema.columns})
        yield Chunk(table=empty, skipped=np.empty(0, np.int64), lost=carried)
        return
    if held is None:
        raise DataRefused(
            f"{file.path}: no readable row",
            why=[f"{carried} lines are empty or lack the {layout.fields} fields between {layout.separator!r}"],
            way_out=NAME_THE_FORMAT,
        )
    held.skipped[-1] += carried
    yield held


def _parse(block: bytes, layout: _Layout, *, label_only: bool) -> tuple[Chunk, int]:
    """The good rows of a block of lines, and how many bad lines follow the last of them."""
    import pyarrow as pa

    table, bad = _table(block, layout, label_only=label_only)
    good = np.ones(table.num_rows + len(bad), bool)
    good[bad] = False
    blank = _blank(table)
    if label_only and blank.any():
        return _parse(block, layout, label_only=False)
    if blank.any():
        good[np.flatnonzero(good)[blank]] = False
        table = table.filter(pa.array(~blank))
    places = np.flatnonzero(good)
    bad_before = places - np.arange(len(places))
    skipped = np.diff(bad_before, prepend=0)
    trailing = int(len(good) - len(places) - (bad_before[-1] if len(places) else 0))
    columns = layout.schema.columns[:1] if label_only else layout.schema.columns
    return Chunk(table=table.rename_columns(list(columns)), skipped=skipped), trailing


def _table(block: bytes, layout: _Layout, *, label_only: bool) -> tuple[pa.Table, list[int]]:
    """What pyarrow makes of a block of lines, and the places of those it skipped.

    It is parsed again, without the lines whose quotes stay open, where they took in others: then there are
    fewer rows than lines. Looking for such lines first would halve the speed of every file with quotes.
    """
    import pyarrow as pa

    if not layout.quote or b'"' not in block:
        return _arrow_table(block, layout, label_only=label_only)
    try:
        table, bad = _arrow_table(block, layout, label_only=label_only)
        if table.num_rows + len(bad) == line_count(block) and not ends_open(block, layout.separator):
            return table, bad
    except pa.ArrowInvalid:  # raised again below where quotes are not why
        pass
    return _arrow_table(without_open_quotes(block, layout.separator), layout, label_only=label_only)


def _arrow_table(block: bytes, layout: _Layout, *, label_only: bool) -> tuple[pa.Table, list[int]]:
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    bad: list[int] = []

    def skip(row: Any) -> str:
        bad.append(row.number - 1)
        return "skip"

    # Places, not names: a file may repeat the name of a column that nobody reads.
    names = [f"{place}" for place in layout.places]
    roles = [pa.string()] * len(layout.schema.labels) + [pa.float64()] * len(layout.schema.dense)
    roles += [pa.string()] * len(layout.schema.sparse)
    table = arrow_csv.read_csv(
        pa.BufferReader(block),
        read_options=arrow_csv.ReadOptions(
            use_threads=False, block_size=len(block) + 1, column_names=[f"{place}" for place in range(layout.fields)]
        ),
        parse_options=arrow_csv.ParseOptions(
            delimiter=layout.separator, quote_char=layout.quote, ignore_empty_lines=False, invalid_row_handler=skip
        ),
        convert_options=arrow_csv.ConvertOptions(
            column_types=dict(zip(names, roles, strict=True)),
            include_columns=names[:1] if label_only else names,
            # A category may be called "NA"; only an empty field is missing. Numbers do know "NA" and "nan".
            strings_can_be_null=False,
        ),
    )
    return table, bad


def _blank(table: pa.Table) -> np.ndarray:
    """Rows [n] without a value in any column: pyarrow reads an empty line as such a row."""
    import pyarrow as pa
    import pyarrow.compute as pc

    blank = np.ones(table.num_rows, bool)
    for column in table.columns:
        if not blank.any():
            break
        empty = pc.equal(column, "") if pa.types.is_string(column.type) else pc.is_null(column)
        blank &= empty.to_numpy()
    return blank


def _layout(file: TableFile, schema: Schema, first: bytes) -> tuple[_Layout, bytes]:
    """How to read the file, and its first block without the header line."""
    plain = file.format == "tsv"
    separator = schema.separator or ("\t" if plain else ",")
    # Quotes have no meaning in Criteo's TSV; a lone one in a hashed category must not swallow lines.
    quote: str | bool = False if plain else '"'
    fields, places = len(schema.columns), tuple(range(len(schema.columns)))
    if schema.header if schema.header is not None else not plain:
        line, *rest = _LINE_END.split(first, maxsplit=1)
        first = rest[0] if rest else b""
        present = _names(line.decode("utf-8", errors="replace"), separator, quote=bool(quote), file=file)
        fields, places = len(present), schema.locate(present, where=str(file.path))
    return _Layout(file=file, schema=schema, separator=separator, quote=quote, fields=fields, places=places), first


def _names(line: str, separator: str, *, quote: bool, file: TableFile) -> list[str]:
    if not quote:
        return line.split(separator)
    try:
        return next(csv.reader([line], delimiter=separator), [])
    except csv.Error as error:  # a name of 128 KiB
        raise DataRefused(
            f"{file.path}: the header line cannot be read", why=[str(error)], way_out="correct its first line"
        ) from error


def _with_first(first: bytes, blocks: Iterator[bytes]) -> Iterator[bytes]:
    if first:
        yield first
    yield from blocks


def _whole_lines(file: TableFile, span: tuple[int, int] | None) -> Iterator[bytes]:
    """The lines of the file, or those that begin in a span of it, in blocks that end where a line ends."""
    try:
        rest = b""
        for data in _decompressed(file) if span is None else _between(file, *span):
            cut = data.rfind(b"\n") + 1
            if cut:
                yield rest + data[:cut]
                rest = data[cut:]
            else:
                rest += data
            if len(rest) > LONGEST_LINE:
                raise DataRefused(
                    f"{file.path}: no line end within {LONGEST_LINE >> 20} MiB",
                    way_out="check that this is a text table",
                )
        if rest:
            yield rest
    except OSError as error:
        raise DataRefused(f"{file.path}: cannot be read", why=[str(error)], way_out=COPY_AGAIN) from error


def _decompressed(file: TableFile) -> Iterator[bytes]:
    import pyarrow as pa

    with pa.input_stream(str(file.path), compression="detect") as stream:
        while data := stream.read(BLOCK_BYTES):
            yield data


def _between(file: TableFile, first: int, last: int) -> Iterator[bytes]:
    """The bytes of the lines that begin in [first, last)."""
    with file.path.open("rb") as stream:
        end = _line_start(stream, last)
        position = _line_start(stream, first)
        stream.seek(position)
        while position < end and (data := stream.read(min(BLOCK_BYTES, end - position))):
            position += len(data)
            yield data


def _line_start(stream: BinaryIO, byte: int) -> int:
    if not byte:
        return 0
    stream.seek(byte - 1)
    stream.readline(LONGEST_LINE)
    return stream.tell()


def _refusal(error: Exception, layout: _Layout, where: str) -> DataRefused:
    """Name the column and the value that pyarrow could not convert."""
    found = re.search(r"In CSV column #(\d+): (?:Row #(\d+): )?(.*)", str(error), re.DOTALL)
    if found is None or int(found[1]) not in layout.places:
        return DataRefused(f"{layout.file.path}: cannot be parsed after {where}", why=[str(error)])
    name = layout.schema.columns[layout.places.index(int(found[1]))]
    headed = any(f"'{column}'" in found[3] for column in layout.schema.columns)
    return DataRefused(
        f"{layout.file.path}: column {name} (field {int(found[1]) + 1}) holds a value of the wrong kind",
        why=[found[3].strip(), f"about line {int(found[2] or 0)} of the block that starts at {where}"],
        way_out='say "header": true in the schema: a line names the columns'
        if headed
        else "correct the line, or give the column its right role in the schema",
    )
