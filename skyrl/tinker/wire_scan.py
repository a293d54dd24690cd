"""A look at a protobuf body before it is parsed: of how many parts it is made.

A part takes two bytes to send and a hundred to parse, and compressed almost nothing to send. So a body of a few KB can
stand for gigabytes of messages; here they are counted, two levels deep, where everything repeated is.
"""

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from google.protobuf.message import DecodeError

from skyrl.errors import RequestError
from skyrl.tinker.proto import skyrl_tinker_pb2 as pb
from skyrl.tinker.schemas import MAX_DATUMS

MAX_PARTS = 2**19
"""Datums, chunks, tensors and options in a request."""

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5

DATA = pb.ForwardBackwardRequest.DATA_FIELD_NUMBER
ADDRESS = (
    pb.ForwardBackwardRequest.MODEL_ID_FIELD_NUMBER,
    pb.ForwardBackwardRequest.SEQ_ID_FIELD_NUMBER,
    pb.ForwardBackwardRequest.FORWARD_ONLY_FIELD_NUMBER,
)


class Field(NamedTuple):
    """A field as it was sent: its number, its kind of encoding, where it begins and where its content is."""

    number: int
    encoding: int
    begin: int
    content: int
    end: int


def address_of(body: bytes) -> bytes:
    """A request that says only whose the given one is. Raises `DecodeError` where the body is no protobuf."""
    sent = islice(fields(body, 0, len(body)), MAX_PARTS)
    return b"".join(body[field.begin : field.end] for field in sent if field.number in ADDRESS)


def check_parts(body: bytes) -> None:
    """Raises `RequestError` for too many parts, `DecodeError` where nothing can be read."""
    datums = parts = 0
    for field in fields(body, 0, len(body)):
        parts += 1
        if field.number == DATA:
            datums += 1
            if datums > MAX_DATUMS:
                raise RequestError(f"data has more than {MAX_DATUMS} datums; send fewer per request")
            for _ in fields(body, field.content, field.end):
                parts += 1
                _check_count(parts)
        _check_count(parts)


def fields(data: bytes, at: int, end: int) -> Iterator[Field]:
    """The fields of a message. Raises `DecodeError`."""
    while at < end:
        begin = at
        key, at = _varint(data, at, end)
        number, encoding = key >> 3, key & 7
        content = at
        if encoding == VARINT:
            _, at = _varint(data, at, end)
        elif encoding == LENGTH:
            length, content = _varint(data, at, end)
            at = content + length
        elif encoding in (FIXED32, FIXED64):
            at += 4 if encoding == FIXED32 else 8
        else:
            raise DecodeError(f"a field of wire type {encoding}")
        if at > end:
            raise DecodeError("a field goes on after the end")
        yield Field(number, encoding, begin, content, at)


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """(value, where the next thing begins)."""
    if at < end and data[at] < 0x80:
        return data[at], at + 1
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise DecodeError("a number without an end")


def _check_count(parts: int) -> None:
    if parts > MAX_PARTS:
        raise RequestError(f"the request has more than {MAX_PARTS} parts; send fewer sequences per request")
