"""Protobuf beside the generated code: limits of a body, checked before it is parsed, and encoding of large arrays.

A field takes two bytes on the wire, almost none if compressed, and a hundred bytes once parsed. A body of a few KB can
therefore expand to gigabytes of messages, and block the interpreter for seconds. All fields are counted, including
those of nested messages.

`SerializeToString` copies the arrays of a message several times and holds the interpreter lock meanwhile. For 128 MiB,
this takes a quarter of a second. Large arrays are therefore encoded in pieces.
"""

from collections.abc import Iterable, Sequence
from io import BytesIO
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from skyrl.errors import RequestError
from skyrl.tinker.wire.pace import Pace
from skyrl.tinker.wire.proto import skyrl_tinker_pb2 as pb
from skyrl.tinker.wire.schemas import MAX_DATUMS

MAX_PARTS = 2**17
"""Maximum number of fields of a request and its nested messages (datums, chunks, tensors, shapes). Clients send at most
1024 datums, so this allows 128 fields per datum. A datum with one chunk and five tensors has 34."""

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5

DATA = pb.ForwardBackwardRequest.DATA_FIELD_NUMBER
ADDRESS = (
    pb.ForwardBackwardRequest.MODEL_ID_FIELD_NUMBER,
    pb.ForwardBackwardRequest.SEQ_ID_FIELD_NUMBER,
    pb.ForwardBackwardRequest.FORWARD_ONLY_FIELD_NUMBER,
)

Table = dict[int, "Table | None"]
"""Fields that count as several parts, by field number. The value is a nested message's table, or None for numbers."""


def _table(message: Any) -> Table:
    """Build the table of a message's descriptor."""
    numbers = [field.number for field in message.fields if field.is_repeated and field.is_packed]
    inner = {field.number: _table(field.message_type) for field in message.fields if field.message_type}
    return {**dict.fromkeys(numbers), **inner}


REQUEST = _table(pb.ForwardBackwardRequest.DESCRIPTOR)
KNOWN = set(pb.ForwardBackwardRequest.DESCRIPTOR.fields_by_number)
PACKED_BYTES = 8
"""Bytes of packed numbers that count as one part."""


def address_of(body: bytes, whole: bool = True) -> bytes:
    """Return an encoded request with only the address fields of `body`. Raises `DecodeError` if it is not protobuf.

    Args:
        body: Encoded request, or its beginning.
        whole: False if `body` is only the beginning.
    """
    at, sent = 0, []
    for _ in range(MAX_PARTS):
        if at >= len(body):
            break
        begin = at
        try:
            key, _, at = _field(body, at, len(body))
        except DecodeError:
            if whole:
                raise
            break
        if key >> 3 in ADDRESS:
            sent.append(body[begin:at])
    return b"".join(sent)


def unknown_field(number: int, what: str) -> RequestError:
    """Return the error for a message with an unknown field."""
    return RequestError(
        f"field number {number} of the {what} is not known to this server; "
        "use the client version that this server's documentation names"
    )


def check_parts(body: bytes, most: int = MAX_PARTS) -> None:
    """Check the number of fields of a request.

    Raises `RequestError` for more than `most` parts or an unknown field, and `DecodeError` for malformed protobuf.
    """
    datums = parts = at = 0
    while at < len(body):
        key, content, at = _field(body, at, len(body))
        if key >> 3 not in KNOWN:  # rejected before it is parsed, as it may be large
            raise unknown_field(key >> 3, "request")
        parts += 1 + _parts_within(body, key, content, at, REQUEST, most - parts)
        datums += key >> 3 == DATA
        if datums > MAX_DATUMS:
            raise RequestError(f"data has more than {MAX_DATUMS} datums; send fewer per request")
        if parts > most:
            raise RequestError(f"the request has more than {most} parts; send fewer sequences per request")


def _parts_within(data: bytes, key: int, at: int, end: int, table: Table, most: int) -> int:
    """Count the parts of a field. Stops soon after the count exceeds `most`."""
    if key & 7 != LENGTH or at == end or (inner := table.get(key >> 3, ABSENT)) is ABSENT:
        return 0
    if inner is None:
        return (end - at) // PACKED_BYTES
    parts = 0
    while at < end and parts <= most:
        key, content, at = _field(data, at, end)
        parts += 1
        if inner:
            parts += _parts_within(data, key, content, at, inner, most - parts)
    return parts


ABSENT: Table = {}


def _field(data: bytes, at: int, end: int) -> tuple[int, int, int]:
    """Read a field: (key, offset of its content, offset of the next field). Raises `DecodeError`.

    The key has the field number and the wire type. A body may have very many fields, so common encodings are decoded in
    few steps.
    """
    key, at = (data[at], at + 1) if data[at] < 0x80 else _varint(data, at, end)
    content, encoding = at, key & 7
    if encoding == LENGTH:
        length, content = (data[at], at + 1) if at < end and data[at] < 0x80 else _varint(data, at, end)
        at = content + length
    elif encoding == VARINT:
        _, at = _varint(data, at, end)
    elif encoding in (FIXED32, FIXED64):
        at += 4 if encoding == FIXED32 else 8
    else:
        raise DecodeError(f"a field of wire type {encoding}")
    if at > end:
        raise DecodeError("a field goes on after the end")
    return key, content, at


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Read a varint: (value, offset of the next byte). Raises `DecodeError`."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise DecodeError("a number without an end")


PIECE_BYTES = 2**20
"""Bytes copied at once."""

Part = bytes | memoryview


def field(number: int, parts: Sequence[Part]) -> list[Part]:
    """Encode a length-delimited field. `parts` are the bytes of a message or of an array."""
    return [_as_varint(number << 3 | 2) + _as_varint(sum(map(len, parts))), *parts]


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


def _as_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])
