"""JSON parser that decodes long lists of numbers to NumPy arrays.

An ordinary JSON parser holds the interpreter lock until the end of the text, and creates an object per number.
Therefore, long lists are parsed separately, in small pieces. In the rest of the text, a placeholder replaces each list.
The rest has a size limit and goes through the ordinary parser.
"""

import re
from contextlib import suppress
from secrets import token_hex
from typing import Any

import numpy as np
from pydantic_core import from_json

from skyrl.tinker.wire.pace import Pace

NAMES = ("tokens", "data", "sparse_crow_indices", "sparse_col_indices")
"""Names of fields that may have long lists."""
LONG_BYTES = 64
"""Minimum bytes of a long list. The ordinary parser reads shorter lists."""
PIECE_BYTES = 32 * 1024
"""Bytes of a list that are parsed at once, in less than a millisecond."""

MAX_REST_BYTES = 2 * 2**20
"""Maximum bytes of a text without its long lists. A request with 1024 datums needs a quarter of it."""
MAX_MARKS = 2**18
"""Maximum number of quotes and opening brackets in that text. It limits the number of parsed objects."""

TOKENS_BYTES = 2**20
TOKEN_BYTES = 32
"""A prompt's tokens may take `TOKENS_BYTES` of text, or `TOKEN_BYTES` per token of the context if that is more."""

_SCALAR = rb'"[^"\\]{0,1024}"|-?\d{1,20}|true|false|null'
_MEMBER = rb'"\w{1,64}"\s{0,64}:\s{0,64}(?:' + _SCALAR + rb")"
_FIRST = re.compile(rb"\s{0,64}\{\s{0,64}(" + _MEMBER + rb"(?:\s{0,64},\s{0,64}" + _MEMBER + rb"){0,15})?")
_LAST = re.compile(rb",\s{0,64}(" + _MEMBER + rb"(?:\s{0,64},\s{0,64}" + _MEMBER + rb"){0,15})\s{0,64}\}\s{0,64}$")
_NAME_OF_LARGE = re.compile(rb'\s{0,64},?\s{0,64}"(\w{1,64})"\s{0,64}:\s{0,64}[{\[]')
_OUTER_BYTES = 4096
"""Bytes at the beginning and the end of an unparsed text that are searched for scalar members."""

_NAME = re.compile(rb'[{,\s]"(' + "|".join(NAMES).encode() + rb')"\s{0,8}:\s{0,8}$')
_NAME_BYTES = 64
"""Bytes before a list that are searched for its name."""
_MARK = f"{token_hex(16)}:"
"""Prefix of placeholders. Random, so that no client can send it."""


class JsonTooLarge(ValueError):
    """The text is too large to be parsed without blocking other work."""


def parse(text: bytes, max_tokens: int | None = None, bounded: bool = True) -> Any:
    """Parse a JSON text. Long lists of numbers in the fields `NAMES` become int64 or float64 arrays.

    Raises `ValueError` for invalid JSON, and `JsonTooLarge`.

    Args:
        text: Body to parse.
        max_tokens: Approximate limit of the number of tokens in all fields `tokens` together. None: no limit.
        bounded: True to limit the size of the text without its long lists.
    """
    rest, arrays, pace = [], [], Pace()
    at = end = tokens_bytes = rest_bytes = 0
    begin = -1
    while (begin := text.find(b"[", begin + 1)) >= 0:
        if end < begin and (end := text.find(b"]", begin)) < 0:
            break
        if bounded and rest_bytes + begin - at > MAX_REST_BYTES:
            raise _too_much()
        if end - begin < LONG_BYTES or (name := _NAME.search(text, max(at, begin - _NAME_BYTES), begin)) is None:
            continue
        if name[1] == b"tokens" and max_tokens is not None:
            tokens_bytes += end - begin
            _check_tokens(tokens_bytes, max_tokens)
        if (array := _array(text, begin + 1, end, pace)) is None:
            continue  # the ordinary parser reads it, or reports the error
        rest += [text[at:begin], f'"{_MARK}{len(arrays)}"'.encode()]
        rest_bytes += begin - at + len(rest[-1])
        arrays.append(array)
        at, begin = end + 1, end
    value = parse_short(b"".join([*rest, text[at:]]), bounded)
    return _with_arrays(value, arrays) if arrays else value


def parse_short(text: bytes, bounded: bool = True) -> Any:
    """Parse a JSON text. Raises `ValueError` for invalid JSON. If `bounded`, may also raise `JsonTooLarge`."""
    if bounded and (len(text) > MAX_REST_BYTES or sum(map(text.count, (b'"', b"[", b"{"))) > MAX_MARKS):
        raise _too_much()
    return from_json(text)


def outer_members(text: bytes) -> dict[str, Any]:
    """Return scalar members at the beginning and the end of a JSON object, without parsing the text in between.

    If a list or object follows right after the first scalar members, its name is returned with the value None.
    """
    members: dict[str, Any] = {}
    first, last = _FIRST.match(text[:_OUTER_BYTES]), _LAST.search(text[-_OUTER_BYTES:])
    if first is not None and (following := _NAME_OF_LARGE.match(text, first.end())) is not None:
        members[following[1].decode()] = None
    for found in (first, last):
        if found is not None and found[1] is not None:
            with suppress(ValueError):
                members |= from_json(b"{%b}" % found[1])
    return members


def _check_tokens(size: int, max_tokens: int) -> None:
    most = max(TOKENS_BYTES, TOKEN_BYTES * max_tokens)
    if size > most:
        raise JsonTooLarge(
            f"tokens: more than the {most} bytes that a prompt of the model's context of {max_tokens} tokens may take; "
            "send a shorter prompt"
        )


def _too_much() -> JsonTooLarge:
    return JsonTooLarge(
        f"beside the long lists of numbers in {', '.join(NAMES)} there are more than {MAX_REST_BYTES} bytes, or "
        f"{MAX_MARKS} quotes and opening brackets; send less in one request"
    )


def _array(text: bytes, at: int, end: int, pace: Pace) -> np.ndarray | None:
    """Parse the numbers of a list. `text[at:end]` is the list without its brackets.

    Returns None for an empty list, for other values than numbers, and for integers that do not fit into 64 bits.
    """
    parts = []
    while at <= end:
        stop = end if end - at <= PIECE_BYTES else text.rfind(b",", at, at + PIECE_BYTES)
        if stop < 0:
            return None
        try:
            numbers = from_json(b"[%b]" % text[at:stop])
        except ValueError:
            return None
        kinds = set(map(type, numbers))
        if not numbers or not kinds <= {int, float}:
            return None
        try:
            parts.append(np.array(numbers, np.float64 if float in kinds else np.int64))
        except OverflowError:
            return None
        at = stop + 1
        pace()
    return np.concatenate(parts)


def _with_arrays(value: Any, arrays: list[np.ndarray]) -> Any:
    """Replace each placeholder in a value by its array."""
    if isinstance(value, list):
        return [_with_arrays(child, arrays) for child in value]
    if not isinstance(value, dict):
        return value
    return {
        key: arrays[int(child.removeprefix(_MARK))]
        if isinstance(child, str) and child.startswith(_MARK)
        else _with_arrays(child, arrays)
        for key, child in value.items()
    }
