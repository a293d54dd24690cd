"""Packing of rows of named arrays into one long array per name, so that thousands of sequences become a few objects."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

NONE = -1
"""Length of an array that a row does not have, and width of an array without a second dimension."""

Row = Mapping[str, np.ndarray]


class Column(NamedTuple):
    """All arrays of one name, concatenated over rows."""

    values: np.ndarray
    """`[elements of all arrays]`: the flattened arrays, concatenated."""
    lengths: np.ndarray
    """int64 `[rows]`: first dimension of each array."""
    widths: np.ndarray | None
    """int64 `[rows]`: second dimension of each array. None: all rows have the array, and all arrays have one dimension.
    """


def pack(rows: Sequence[Row]) -> dict[str, Column] | None:
    """Pack rows into columns by name.

    Returns None if an array has more than two dimensions, or if a name has several dtypes.
    """
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        arrays = [row.get(name) for row in rows]
        there = [array for array in arrays if array is not None]
        if len({array.dtype for array in there}) > 1 or not {array.ndim for array in there} <= {1, 2}:
            return None
        values = np.concatenate([array.reshape(-1) for array in there])
        lengths = np.asarray([NONE if array is None else len(array) for array in arrays], np.int64)
        widths = None
        if len(there) < len(rows) or any(array.ndim == 2 for array in there):
            shapes = [() if array is None else array.shape for array in arrays]
            widths = np.asarray([shape[1] if len(shape) == 2 else NONE for shape in shapes], np.int64)
        columns[name] = Column(values, lengths, widths)
    return columns


def unpack(columns: Mapping[str, Column], count: int) -> list[dict[str, np.ndarray]]:
    """Return the `count` rows that were packed. The arrays in the rows are views of the columns."""
    rows: list[dict[str, np.ndarray]] = [{} for _ in range(count)]
    for name, column in columns.items():
        values, lengths, widths = column
        if widths is None:
            sizes = lengths
        else:
            sizes = np.where(lengths == NONE, 0, lengths * np.where(widths == NONE, 1, widths))
        ends = np.cumsum(sizes).tolist()
        start = 0
        for row, end in zip(rows, ends, strict=True):
            row[name] = values[start:end]
            start = end
        if widths is not None:
            for row, length, width in zip(rows, lengths.tolist(), widths.tolist(), strict=True):
                if length == NONE:
                    del row[name]
                elif width != NONE:
                    row[name] = row[name].reshape(length, width)
    return rows
