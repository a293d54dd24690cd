"""Standard JSON: non-finite numbers are written as the strings "NaN", "Infinity" and "-Infinity".

The SDK's parser rejects bare NaN, and its models read these strings as numbers.

Values may contain NumPy arrays and iterators, which are written as lists. Therefore, large values need not exist as
Python objects. They are written in pieces, and the interpreter lock can be released between pieces.
"""

import json
import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

PIECE_BYTES = 64 * 1024
"""Bytes of text in a piece, which takes two milliseconds to write."""
NUMBERS = 1024
"""Number of array elements that are written at once."""
ITEMS = 32
"""Number of an iterator's items that are written at once. Each may be a short list."""


def dumps(value: Any) -> bytes:
    """Encode a value as UTF-8 JSON."""
    return b"".join(pieces(value))


def pieces(value: Any) -> Iterator[bytes]:
    """Encode a value as UTF-8 JSON, in pieces of `PIECE_BYTES` or slightly more."""
    texts: list[str] = []
    size = 0
    for text in _texts(value):
        texts.append(text)
        size += len(text)
        if size >= PIECE_BYTES:
            yield "".join(texts).encode()
            texts, size = [], 0
    if texts:
        yield "".join(texts).encode()


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        before = "{"
        for key, child in value.items():
            yield f"{before}{json.dumps(key)}: "
            yield from _texts(child)
            before = ", "
        yield "}"
    elif isinstance(value, list | tuple) and value:
        before = "["
        for child in value:
            yield before
            yield from _texts(child)
            before = ", "
        yield "]"
    elif isinstance(value, np.ndarray):
        yield from _joined(value[at : at + NUMBERS].tolist() for at in range(0, len(value), NUMBERS))
    elif isinstance(value, Iterator):
        yield from _joined(iter(lambda: list(islice(value, ITEMS)), []))
    else:
        yield _text(value)


def _joined(parts: Iterable[list[Any]]) -> Iterator[str]:
    """Write the concatenation of non-empty lists as one JSON list."""
    before = "["
    for part in parts:
        yield before + _text(part)[1:-1]
        before = ", "
    yield "]" if before == ", " else "[]"


def _text(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_in_words(value), allow_nan=False)


def _in_words(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_in_words(child) for child in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
