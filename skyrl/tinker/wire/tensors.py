"""Decoding of a request's tensors (bytes or numbers, dense or CSR) to NumPy arrays of bounded total size.

Declared shapes are not trusted: an inconsistent tensor raises `RequestError` before memory of its declared size is
allocated.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import numpy as np

from skyrl.errors import RequestError
from skyrl.types import TokenMatrix


class Budget:
    """Memory budget of a request's arrays in bytes. `left` is the unused part."""

    def __init__(self, max_bytes: int):
        self.max_bytes = self.left = max_bytes

    def take(self, name: str, shape: Sequence[int], dtype: np.dtype) -> None:
        """Reserve memory for an array. Raises `RequestError` if the budget is exceeded."""
        values = 1
        for size in shape:
            values *= size or 1
        self.left -= values * dtype.itemsize
        if self.left < 0:
            raise RequestError(
                f"{name}: shape={list(shape)} makes the arrays of the request larger than {self.max_bytes} bytes; "
                "send fewer sequences per request"
            )


def from_bytes(name: str, data: bytes, dtype: np.dtype) -> np.ndarray:
    """View `data` as an array `[n]` without a copy. Raises `RequestError` unless the size of `data` is a multiple of
    the item size."""
    if len(data) % dtype.itemsize:
        raise RequestError(
            f"{name}: {len(data)} bytes is not a multiple of the size of {dtype.name}; send every value whole"
        )
    return np.frombuffer(data, dtype)


def check_dimensions(name: str, shape: Sequence[int]) -> None:
    """Raise `RequestError` for a shape of more than two dimensions, without reading a very long shape."""
    if len(shape) > 2:
        shown = f"[{', '.join(map(str, shape[:3]))}{', ...' if len(shape) > 3 else ''}]"
        raise RequestError(f"{name}: shape={shown} has {len(shape)} dimensions; send [tokens] or [tokens, K]")


def dense(name: str, values: np.ndarray, shape: list[int], budget: Budget) -> np.ndarray:
    """Reshape flat values to `shape`. An empty shape means one dimension. Raises `RequestError` if the number of values
    does not match."""
    check_dimensions(name, shape)
    if shape == [values.size]:
        budget.take(name, shape, values.dtype)
        return values
    shape = shape or [values.size]
    if min(shape) < 0 or prod(shape) != values.size:
        raise RequestError(f"{name}: shape={shape} does not fit {values.size} values; send the shape of the data")
    budget.take(name, shape, values.dtype)
    return values.reshape(shape)


def densified(
    name: str, values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: list[int], budget: Budget
) -> np.ndarray:
    """Convert a CSR matrix to a dense array `shape`, with 0 where it has no entry. `rows` are the crow_indices.

    Raises `RequestError` for invalid indices.
    """
    _check_matrix(name, shape)
    budget.take(name, shape, values.dtype)
    matrix = sparse(name, values, rows, columns, shape)
    result = np.zeros(prod(shape), values.dtype)
    result[matrix.rows * shape[1] + columns] = values
    return result.reshape(shape)


def sparse(name: str, values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: list[int]) -> TokenMatrix:
    """Validate a CSR matrix and return it as a `TokenMatrix`. Raises `RequestError` for invalid indices.

    `rows` are the crow_indices: int64 `[shape[0] + 1]` offsets into `values` and `columns`. Row i has the entries from
    rows[i] up to, but not including, rows[i + 1].
    """
    _check_matrix(name, shape)
    ascending = rows.min(initial=0) >= 0 and np.diff(rows).min(initial=0) >= 0
    if len(rows) != shape[0] + 1 or rows[0] != 0 or rows[-1] != values.size or not ascending:
        raise RequestError(
            f"{name}: crow_indices do not divide {values.size} values over {shape[0]} rows; "
            f"send {shape[0] + 1} ascending offsets from 0 to {values.size}"
        )
    if columns.size != values.size or columns.min(initial=0) < 0 or columns.max(initial=-1) >= shape[1]:
        raise RequestError(
            f"{name}: col_indices do not place {values.size} values in {shape[1]} columns; send one each"
        )
    matrix = TokenMatrix(values, (shape[0], shape[1]), rows, columns)
    order = np.lexsort((columns, matrix.rows))
    same = (np.diff(matrix.rows[order]) == 0) & (np.diff(columns[order]) == 0)
    if same.any():
        raise RequestError(f"{name}: duplicate entries in col_indices; send each (row, column) pair once")
    return matrix


def _check_matrix(name: str, shape: list[int]) -> None:
    check_dimensions(name, shape)
    if len(shape) != 2 or min(shape) < 0:
        raise RequestError(f"{name}: shape={shape} of a sparse tensor; send [tokens, K]")


def int64s(name: str, values: Iterable[Any]) -> np.ndarray:
    """Convert a JSON list of integers to int64. Raises `RequestError` for larger integers."""
    try:
        return np.array(values, np.int64)
    except OverflowError:
        raise RequestError(f"{name}: an integer does not fit into 64 bits; send token ids of this model") from None


def float32s(name: str, values: Iterable[Any]) -> np.ndarray:
    """Convert a JSON list of numbers to float32. Raises `RequestError` for integers that do not fit into float64."""
    try:
        with np.errstate(over="ignore"):
            return np.array(values, np.float64).astype(np.float32)
    except OverflowError:
        raise RequestError(f"{name}: a number does not fit into float32; send smaller ones") from None
