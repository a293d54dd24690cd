"""Encoding of frames: a pickle, followed by long arrays as raw memory.

A frame begins with the number of its parts (the pickle and the arrays) and the size of each, as 64-bit integers. A
large frame may be sent in pieces, with other frames in between. Each piece belongs to one part. It begins with a zero,
the number of the frame's parts, the size of each, the index of the piece's part, the offset in this part, and the size
of the piece. The sequences of a pass and its outputs are pickled as columns (`skyrl.tinker.processes.columns`), so the
number of objects does not depend on the number of tokens.
"""

import io
import pickle
import struct
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from skyrl.backends.operations import ForwardBackward
from skyrl.tinker.processes.columns import Column, pack, unpack
from skyrl.types import Datum, ForwardBackwardOutput

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
