"""From columns of a table to what a model takes: labels, dense numbers, category strings.

    dense = sign(x) * log1p(|x|), missing or infinite -> 0

Categories become strings whatever their storage, so the same rows get the same ids from parquet integers
and from text. A value that has no such meaning is refused with its column and the value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from loka.core.exceptions import DataRefused

if TYPE_CHECKING:
    import pyarrow as pa


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
    """Categories as strings; null, NaN and the empty string are null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)
    try:
        strings = column.cast(pa.string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataRefused(
            f"column {name} of type {column.type} cannot be read as categories",
            why=[str(error)],
            way_out="name another column in the schema, or store this one as strings or integers",
        ) from error
    return pc.if_else(pc.equal(strings, ""), None, strings)


def _numbers(column: pa.ChunkedArray, name: str) -> np.ndarray:
    """A private copy of the column as float64 [n], null -> NaN."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = pc.if_else(pc.equal(column, ""), None, column)
    try:
        numbers = column.cast(pa.float64(), safe=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataRefused(
            f"column {name} of type {column.type} cannot be read as numbers",
            why=[str(error)],
            way_out="correct the value, or give the column its right role in the schema",
        ) from error
    return np.array(numbers.to_numpy(), np.float64)
