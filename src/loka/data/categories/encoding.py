"""Chunks of a table, encoded: what `TableClicks` hands out and what the conversion to shards stores."""

from pathlib import Path

import numpy as np

from loka.data.batch import History
from loka.data.block import Block
from loka.data.categories.columns import category_strings, dense_values, label_values, sequence_strings
from loka.data.categories.vocabulary import HashedVocabulary, Vocabulary
from loka.data.files import named
from loka.data.schema import Schema
from loka.data.source.text import Chunk

REASONS = (
    "missing dense values",
    "infinite dense values",
    "missing categories",
    "unknown categories",
    "malformed lines",
)
# Part of the identity of sources and shards: raise it whenever the same file gives other batches.
# 2: categories above 256 bytes hash by their digest; 3: whole floats are categories as integers are;
# 4: decimals and times are categories without zeros behind.
ENCODING = 4


def encoded(chunk: Chunk, schema: Schema, vocabulary: Vocabulary | HashedVocabulary) -> Block:
    """The rows of a chunk, with the counts of `REASONS`."""
    rows = len(chunk)
    dense = np.empty((rows, len(schema.dense)), np.float32)
    sparse = np.empty((rows, len(schema.sparse)), np.int64)
    counts = np.zeros((rows, len(REASONS)), np.int32)
    for index, name in enumerate(schema.dense):
        dense[:, index], missing, infinite = dense_values(chunk.table[name], name=name)
        counts[:, 0] += missing
        counts[:, 1] += infinite
    for index, name in enumerate(schema.sparse):
        strings = category_strings(chunk.table[name], name=name)
        absent = strings.is_null().to_numpy()
        ids = vocabulary.encode(name, strings)
        sparse[:, index] = ids
        counts[:, 2] += absent
        counts[:, 3] += (ids == 0) & ~absent
    counts[:, 4] = chunk.skipped
    labels = [label_values(chunk.table[name], name=name) for name in schema.labels]
    label = labels[0] if len(labels) == 1 else np.stack(labels, axis=1)
    block = Block(dense=dense, sparse=sparse, label=label, counts=counts)
    return block if schema.sequence is None else _with_sequence(block, chunk, schema, vocabulary)


def encoded_of(path: Path, chunk: Chunk, schema: Schema, vocabulary: Vocabulary | HashedVocabulary) -> Block:
    """`encoded`, with the file's name in what it refuses."""
    with named(path):
        return encoded(chunk, schema, vocabulary)


def history_in(schema: Schema, vocabulary: Vocabulary | HashedVocabulary) -> History | None:
    """The sequence feature that rows of the schema have."""
    if schema.sequence is None:
        return None
    return History(length=schema.sequence_length, vocab_size=vocabulary.size(schema.sequence))


def _with_sequence(block: Block, chunk: Chunk, schema: Schema, vocabulary: Vocabulary | HashedVocabulary) -> Block:
    name, length = schema.sequences[0], schema.sequence_length
    strings, row, place = sequence_strings(chunk.table[name], name=name, length=length)
    ids = vocabulary.encode(name, strings)
    absent = strings.is_null().to_numpy()
    rows = len(block)
    sequence = np.zeros((rows, length), np.int64)
    sequence[row, place] = ids
    block.counts[:, 2] += np.bincount(row[absent], minlength=rows).astype(np.int32)
    block.counts[:, 3] += np.bincount(row[(ids == 0) & ~absent], minlength=rows).astype(np.int32)
    return Block(**block.arrays(), sequence=sequence, lengths=np.bincount(row, minlength=rows).astype(np.int64))
