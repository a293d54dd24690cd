"""Protobuf encoding of large arrays in pieces.

`SerializeToString` copies the arrays of a message several times and holds the interpreter lock meanwhile. For 128 MiB,
this takes a quarter of a second.
"""

from collections.abc import Iterable, Sequence
from io import BytesIO

import numpy as np

from skyrl.tinker.wire.pace import Pace

PIECE_BYTES = 2**20
"""Bytes copied at once."""

Part = bytes | memoryview


def field(number: int, parts: Sequence[Part]) -> list[Part]:
    """Encode a length-delimited field. `parts` are the bytes of a message or of an array."""
    return [_varint(number << 3 | 2) + _varint(sum(map(len, parts))), *parts]


def array(values: np.ndarray, dtype: str) -> memoryview:
    """Return the bytes of an array, converted to `dtype`. `dtype` includes the byte order."""
    return np.ascontiguousarray(values, dtype).reshape(-1).view(np.uint8).data


def joined(parts: Iterable[Part]) -> bytes:
    """Concatenate parts."""
    whole, pace = BytesIO(), Pace()
    for part in parts:
        view = memoryview(part)
        for begin in range(0, len(view), PIECE_BYTES):
            whole.write(view[begin : begin + PIECE_BYTES])
            pace()
    return whole.getvalue()


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])
