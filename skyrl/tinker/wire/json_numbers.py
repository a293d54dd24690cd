"""JSON text as values, its long lists of numbers as NumPy arrays.

A parser of JSON lets nobody else have the interpreter before it has come to the end, and makes an object of each
number. So the lists that may be long are read by themselves, in pieces of bounded work. What is left goes through the
parser with a mark in the place of each, and may not be large.
"""

import re
from contextlib import suppress
from secrets import token_hex
from typing import Any

import numpy as np
from pydantic_core import from_json

from skyrl.tinker.wire.pace import Pace

NAMES = ("tokens", "data", "sparse_crow_indices", "sparse_col_indices")
"""Fields whose lists may be long."""
LONG_BYTES = 64
"""Shorter lists are left to the parser."""
PIECE_BYTES = 32 * 1024
"""Bytes of a list, read at once in less than a millisecond."""

MAX_REST_BYTES = 2 * 2**20
"""Bytes of a text without its long lists: four times what 1024 datums take."""
MAX_MARKS = 2**18
"""Quotes and opening brackets in it, which bound the objects that are made of it."""

TOKENS_BYTES = 2**20
TOKEN_BYTES = 32
"""Bytes of text that the tokens of a prompt may have, the larger of both: so many, or so many for each of a context."""

_SCALAR = rb'"[^"\\]{0,1024}"|-?\d{1,20}|true|false|null'
_MEMBER = rb'"\w{1,64}"\s{0,64}:\s{0,64}(?:' + _SCALAR + rb")"
_FIRST = re.compile(rb"\s{0,64}\{\s{0,64}(" + _MEMBER + rb"(?:\s{0,64},\s{0,64}" + _MEMBER + rb"){0,15})?")
_LAST = re.compile(rb",\s{0,64}(" + _MEMBER + rb"(?:\s{0,64},\s{0,64}" + _MEMBER + rb"){0,15})\s{0,64}\}\s{0,64}$")
_NAME_OF_LARGE = re.compile(rb'\s{0,64},?\s{0,64}"(\w{1,64})"\s{0,64}:\s{0,64}[{\[]')
_OUTER_BYTES = 4096
"""At the ends of a text that is not parsed, in which its simple members are."""

_NAME = re.compile(rb'[{,\s]"(' + "|".join(NAMES).encode() + rb')"\s{0,8}:\s{0,8}$')
_NAME_BYTES = 64
"""Bytes of the text before a list, in which its name is."""
_MARK = f"{token_hex(16)}:"
"""Text that no client knows, so that none can send it."""


class JsonTooLarge(ValueError):
    """The text is of more than can be read without holding up others."""


def parse(text: bytes, max_tokens: int | None = None, bounded: bool = True) -> Any:
    """The value of a JSON text, in which long lists of numbers in fields of `NAMES` are arrays, int64 or float64.

    Raises `ValueError` where it is no JSON, and `JsonTooLarge`.

    Args:
        text: A body.
        max_tokens: How many tokens there may be in all lists of that name together, roughly.
        bounded: Whether it may be too much.
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
            continue  # the parser will say what is wrong with it
        rest += [text[at:begin], f'"{_MARK}{len(arrays)}"'.encode()]
        rest_bytes += begin - at + len(rest[-1])
        arrays.append(array)
        at, begin = end + 1, end
    value = parse_short(b"".join([*rest, text[at:]]), bounded)
    return _with_arrays(value, arrays) if arrays else value


def parse_short(text: bytes, bounded: bool = True) -> Any:
    """The value of a JSON text. Raises `ValueError` where it is none, and `JsonTooLarge` where it may be."""
    if bounded and (len(text) > MAX_REST_BYTES or sum(map(text.count, (b'"', b"[", b"{"))) > MAX_MARKS):
        raise _too_much()
    return from_json(text)


def outer_members(text: bytes) -> dict[str, Any]:
    """Words and numbers among the first members of an object and its last ones, without a look at what is between.

    Of the member behind the first ones there is the name, with None.
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
    """The numbers of a list without its brackets. None where anything else is in it, or none, or none of 64 bits."""
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
    """The value with its arrays in the place of their marks."""
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
