"""From columns of a table to what a model takes: labels, dense numbers, category strings.

    dense = sign(x) * log1p(|x|), missing or infinite -> 0

Categories become strings whatever their storage, so the same rows get the same ids from parquet integers
and from text. A value that has no such meaning is refused with its column and the value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from loka.core.exceptions import DataRefused

if TYPE_CHECKING:
    import pyarrow as pa

# Of decimals and times as pyarrow writes them: 7.00, 0E-8, 1.0E-8, 12:30:00.500000, 12:30:00.000Z
_ZEROS_BEHIND = ((r"^0E-\d+$", "0"), (r"(\.\d*[1-9])0+(E-\d+|Z)?$", r"\1\2"), (r"\.0+(E-\d+|Z)?$", r"\1"))


def label_values(column: pa.ChunkedArray, *, name: str) -> np.ndarray:
    """Labels [n] float32; anything but 0 and 1 is refused."""
    values = _numbers(column, name)
    wrong = ~((values == 0.0) | (values == 1.0))
    if wrong.any():
        found = column[int(np.argmax(wrong))].as_py()
        raise DataRefused(
            f"label column {name} must hold 0 and 1 only",
            why=[f"found {found!r}, and {int(wrong.sum())} such rows in this chunk"],
            way_out="filter or map the labels, or name another label column in the schema",
        )
    return values.astype(np.float32)


def dense_values(column: pa.ChunkedArray, *, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Encoded values [n] float32, and which rows were missing (null or NaN) and infinite [n] bool."""
    values = _numbers(column, name)
    missing, infinite = np.isnan(values), np.isinf(values)
    values[missing | infinite] = 0.0
    return (np.sign(values) * np.log1p(np.abs(values))).astype(np.float32), missing, infinite


def category_strings(column: pa.ChunkedArray, *, name: str) -> pa.ChunkedArray:
    """Categories as strings; null, NaN and the empty string are null.

    Whole floats are written as integers are: a column of integers is one of floats in the file where one is
    missing, and 1.2e+11 would be another category than 120000000000. Decimals and times have no zeros behind:
    7.00 of a file with two places is 7, and a moment is the same in microseconds and nanoseconds.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)
        wide = column.cast(pa.float64())
        whole = pc.and_(pc.equal(pc.floor(wide), wide), pc.less(pc.abs(wide), 2.0**63))
        integers = pc.if_else(whole, wide, None).cast(pa.int64(), safe=False).cast(pa.string())
        return pc.coalesce(integers, column.cast(pa.string()))
    way_out = "name another column in the schema, or store this one as strings or integers"
    with _read(column, name, "categories", way_out):
        if pa.types.is_duration(column.type):
            column = column.cast(pa.duration("ns"))
        strings = column.cast(pa.string())
    if pa.types.is_decimal(column.type) or pa.types.is_temporal(column.type):
        for pattern, kept in _ZEROS_BEHIND:
            strings = pc.replace_substring_regex(strings, pattern, kept)
    return pc.if_else(pc.equal(strings, ""), None, strings)


def sequence_strings(
    column: pa.ChunkedArray, *, name: str, length: int
) -> tuple[pa.ChunkedArray, np.ndarray, np.ndarray]:
    """The last `length` categories of each list: strings [m] in order, and of each its row and place [m].

    A null list is an empty one; null categories stay, as missing ones.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    array = column.combine_chunks()
    if not pa.types.is_list(array.type) and not pa.types.is_large_list(array.type):
        raise DataRefused(
            f"column {name} of type {column.type} cannot be read as a sequence",
            way_out="store it as a list column, or name another one as `sequence` in the schema",
        )
    counts = pc.fill_null(pc.list_value_length(array), 0).to_numpy().astype(np.int64)
    ends = np.cumsum(counts)
    row = np.repeat(np.arange(len(counts)), counts)
    # How many categories of the same list follow, and so where each lies among those that are kept.
    following = ends[row] - 1 - np.arange(len(row))
    kept = np.flatnonzero(following < length)
    row, place = row[kept], np.minimum(counts[row[kept]], length) - 1 - following[kept]
    values = array.flatten().take(pa.array(kept))
    return category_strings(pa.chunked_array([values]), name=name), row, place


def _numbers(column: pa.ChunkedArray, name: str) -> np.ndarray:
    """A private copy of the column as float64 [n], null -> NaN."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = pc.if_else(pc.equal(column, ""), None, column)
    with _read(column, name, "numbers", "correct the value, or give the column its right role in the schema"):
        numbers = column.cast(pa.float64(), safe=False)
    return np.array(numbers.to_numpy(), np.float64)


@contextmanager
def _read(column: pa.ChunkedArray, name: str, what: str, way_out: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataRefused(
            f"column {name} of type {column.type} cannot be read as {what}", why=[str(error)], way_out=way_out
        ) from error
