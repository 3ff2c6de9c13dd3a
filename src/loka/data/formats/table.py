"""Click rows from parquet, CSV and Criteo TSV files, in file order and in bounded memory."""

from collections.abc import Iterator

import numpy as np

from loka.core.exceptions import DataRefused
from loka.data.batch import Batch
from loka.data.block import check_batching, check_holdout, into_batches, shard_range, training_rows
from loka.data.categories.encoding import ENCODING, REASONS, encoded_of, history_in
from loka.data.categories.vocabulary import HashedVocabulary, Vocabulary, build_vocabulary
from loka.data.content import content_of, identity_of
from loka.data.files import Paths, open_files
from loka.data.schema import CRITEO, Schema
from loka.data.source.rows import count_rows, read_rows


class TableClicks:
    """A `Source` over rows [first_row, first_row + rows) of one or more files taken one after the other.

    Replaced and counted: missing or infinite dense values (0), missing or unknown categories (id 0).
    Skipped and counted: malformed lines of text files. Refused with a `DataRefused`: a missing column, an
    empty file, a label that is not 0 or 1, a dense value that is not a number.

    Rows are counted when the source is made: free for parquet, one fast pass for text. `shards` splits the
    range into contiguous parts of which this source is number `shard`.
    """

    def __init__(
        self,
        files: Paths,
        *,
        vocabulary: Vocabulary | HashedVocabulary,
        schema: Schema = CRITEO,
        first_row: int = 0,
        rows: int | None = None,
        shard: int = 0,
        shards: int = 1,
        format: str | None = None,
    ) -> None:
        self._files = open_files(files, format=format)
        self._schema = schema
        self._vocabulary = vocabulary
        self.dense_features = len(schema.dense)
        self.vocab_sizes = tuple(vocabulary.size(column) for column in schema.sparse)
        self.history, self.tasks = history_in(schema, vocabulary), schema.labels
        present = sum(count_rows(file, schema) for file in self._files)
        rows = present - first_row if rows is None else rows
        if first_row < 0 or rows < 1 or first_row + rows > present:
            raise DataRefused(
                f"{self._files[0].path}: rows [{first_row}, {first_row + rows}) were asked for",
                why=[f"the table has {present} rows"],
                way_out="choose first_row and rows inside the table",
            )
        first, last = shard_range(rows, shard=shard, shards=shards)
        self._first, self._last = first_row + first, first_row + last
        self.rows = last - first
        self._totals = np.zeros(len(REASONS), np.int64)

    @property
    def identity(self) -> str:
        config = {
            "source": "TableClicks",
            "encoding": ENCODING,
            "files": [[file.format, *content_of(file.path)] for file in self._files],
            "schema": self._schema.to_dict(),
            "vocabulary": self._vocabulary.digest,
            "range": [self._first, self._last],
        }
        return identity_of(config)

    def batches(self, batch_size: int, *, start: int = 0) -> Iterator[Batch]:
        """Batches `start`, `start` + 1, ...; parquet row groups before `start` are not read."""
        check_batching(batch_size, start)
        first = min(self._first + start * batch_size, self._last)
        chunks = read_rows(self._files, self._schema, first=first, last=self._last)
        blocks = (encoded_of(file.path, chunk, self._schema, self._vocabulary) for file, chunk in chunks)
        return into_batches(blocks, batch_size=batch_size, totals=self._totals)

    def account(self) -> dict[str, int]:
        """Counts over all rows handed out by `batches` since this object was made, repeats included.

        A malformed line counts with the good row after it, or with the last row of its file.
        """
        return dict(zip(REASONS, map(int, self._totals), strict=True))


def open_table(
    path: Paths, *, schema: Schema = CRITEO, holdout: float = 0.2, min_count: int = 2
) -> tuple[TableClicks, TableClicks]:
    """A training and a held-out source: the last `holdout` share of the rows is held out.

    The order of the rows is taken for the order in time. The vocabulary is built on the training rows only.
    """
    check_holdout(holdout)  # before the rows are counted
    files = open_files(path)
    rows = sum(count_rows(file, schema) for file in files)
    train = training_rows(rows, holdout=holdout)
    if not 0 < train < rows:
        raise DataRefused(
            f"{files[0].path}: {rows} rows cannot be split at holdout={holdout}",
            way_out="give more rows or another holdout",
        )
    vocabulary = build_vocabulary(path, schema=schema, rows=train, min_count=min_count)
    return (
        TableClicks(path, vocabulary=vocabulary, schema=schema, rows=train),
        TableClicks(path, vocabulary=vocabulary, schema=schema, first_row=train),
    )


def open_tables(train: Paths, test: Paths, *, schema: Schema = CRITEO) -> tuple[TableClicks, TableClicks]:
    """Two tables as a training and a held-out source. The vocabulary is built on the first one only."""
    vocabulary = build_vocabulary(train, schema=schema)
    return (
        TableClicks(train, vocabulary=vocabulary, schema=schema),
        TableClicks(test, vocabulary=vocabulary, schema=schema),
    )
