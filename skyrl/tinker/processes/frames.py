"""Encoding of frames: a pickle, followed by long arrays as raw memory.

A frame begins with the number of its parts (the pickle and the arrays) and the size of each, as 64-bit integers. A
large frame may be sent in pieces, with other frames in between. Each piece belongs to one part. It begins with a zero,
the number of the frame's parts, the size of each, the index of the piece's part, the offset in this part, and the size
of the piece. The sequences of a pass and its outputs are packed into one long array per
name (`Column`), so the number of objects does not depend on the number of tokens.
"""

import io
import pickle
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from skyrl.backends.operations import ForwardBackward
from skyrl.types import Datum, ForwardBackwardOutput

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


NUMBER = struct.Struct("<Q")

SEPARATE_BYTES = 16 * 1024
"""Shorter arrays are copied into the pickle."""

PIECE_BYTES = 2**18
"""Size of a piece of a large frame in bytes."""

TOKENS = "tokens"
"""Column name of a datum's tokens, beside the names of its loss inputs."""


def encode(frame: object) -> list[bytes | memoryview]:
    """Encode a frame as a list of buffers. All buffers after the first are the frame's arrays, which are not copied."""
    parts = _parts(frame)
    return [b"".join([*map(NUMBER.pack, [len(parts), *map(len, parts)]), parts[0]]), *parts[1:]]


def pieces(frame: object) -> Iterator[tuple[bytes, memoryview]]:
    """Encode a frame in pieces that can be sent between other frames, each with a header."""
    parts = [memoryview(part).cast("B") for part in _parts(frame)]
    head = b"".join(map(NUMBER.pack, [0, len(parts), *map(len, parts)]))
    for number, part in enumerate(parts):
        for begin in range(0, len(part), PIECE_BYTES):
            data = part[begin : begin + PIECE_BYTES]
            yield head + b"".join(map(NUMBER.pack, [number, begin, len(data)])), data


def _parts(frame: object) -> list[bytes | memoryview]:
    arrays: list[memoryview] = []

    def stays(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes >= SEPARATE_BYTES:
            arrays.append(view)
            return False
        return True

    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=stays).dump(frame)
    return [file.getvalue(), *arrays]


def decode(parts: Sequence[bytearray | bytes | memoryview]) -> Any:
    """Decode a frame from its pickle and arrays. The frame's arrays are views of the given buffers."""
    return pickle.loads(parts[0], buffers=parts[1:])


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ForwardBackward):
            rows = [{TOKENS: datum.tokens, **datum.loss_fn_inputs} for datum in obj.data]
            rest = {field.name: getattr(obj, field.name) for field in fields(obj) if field.name != "data"}
            build = _pass
        elif isinstance(obj, ForwardBackwardOutput):
            rows = obj.loss_fn_outputs
            rest = {"metrics": obj.metrics, "loss_fn_output_type": obj.loss_fn_output_type}
            build = _output
        else:
            return NotImplemented
        columns = pack(rows)
        return NotImplemented if columns is None else (build, (columns, len(rows), rest))


def _pass(columns: dict[str, Column], count: int, rest: dict[str, Any]) -> ForwardBackward:
    data = [Datum(inputs.pop(TOKENS), inputs) for inputs in unpack(columns, count)]
    return ForwardBackward(data=data, **rest)


def _output(columns: dict[str, Column], count: int, rest: dict[str, Any]) -> ForwardBackwardOutput:
    return ForwardBackwardOutput(unpack(columns, count), **rest)
