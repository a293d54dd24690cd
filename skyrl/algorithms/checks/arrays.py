"""Checks of token ids and numbers: the arrays of all data are looked at at once, never token by token.

What is wrong is named as `datum <number>: <field>[<place>]=<value>`, with the rule that it breaks.
"""

from collections.abc import Callable, Sequence

import numpy as np

from skyrl.algorithms.losses import LARGEST
from skyrl.errors import RequestError


def token_ids(field: str, arrays: Sequence[np.ndarray], vocab_size: int) -> list[np.ndarray]:
    """The arrays, one of each datum, as int32. Raises `RequestError` unless all of it is token ids."""
    flat = np.concatenate([values.reshape(-1) for values in arrays])
    check_token_ids(field, flat, vocab_size, arrays)
    return _cut(flat.astype(np.int32), arrays)


def check_token_ids(field: str, ids: np.ndarray, vocab_size: int, arrays: Sequence[np.ndarray] | None = None) -> None:
    """Raise `RequestError` unless all ids are in the vocabulary. `arrays` as in `refuse_where`."""
    refuse_where(
        field,
        ids,
        arrays,
        lambda tokens: (tokens < 0) | (tokens >= vocab_size),
        f"is outside the vocabulary [0, {vocab_size}); use the tokenizer of this model",
    )


def numbers(field: str, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The arrays, one of each datum, as float32. Raises `RequestError` unless all of it is finite and not huge."""
    with np.errstate(over="ignore"):
        flat = np.concatenate([values.reshape(-1) for values in arrays], dtype=np.float32, casting="unsafe")
    refuse_where(
        field,
        flat,
        arrays,
        lambda values: ~(np.abs(values) <= LARGEST),
        f"must be finite and at most {LARGEST:g} in magnitude; mask the token with weight 0 and send 0 here",
    )
    return _cut(flat, arrays)


def refuse_where(
    field: str,
    flat: np.ndarray,
    arrays: Sequence[np.ndarray] | None,
    bad: Callable[[np.ndarray], np.ndarray],
    rule: str,
) -> None:
    """Raise `RequestError` naming the first value that is `bad`.

    Args:
        field: What the values are called by who sent them.
        flat: All values, one after the other.
        arrays: Arrays of these shapes, one of each datum, have the values. None: they belong to no datum.
        bad: Says of each of `flat` whether it is.
        rule: Follows the value in the message.
    """
    wrong = bad(flat)
    if not wrong.any():
        return
    at = int(np.argmax(wrong))
    if arrays is None:
        raise RequestError(f"{field}[{at}]={flat[at]} {rule}")
    ends = np.cumsum([values.size for values in arrays])
    datum = int(np.searchsorted(ends, at, side="right"))
    position = np.unravel_index(at - int(ends[datum] - arrays[datum].size), arrays[datum].shape)
    where = ", ".join(str(int(index)) for index in position)
    raise RequestError(f"datum {datum}: {field}[{where}]={flat[at]} {rule}")


def _cut(flat: np.ndarray, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Parts of `flat` in the shapes of the arrays, one after the other. Not copied."""
    parts, start = [], 0
    for values in arrays:
        end = start + values.size
        part = flat[start:end]
        parts.append(part if values.ndim == 1 else part.reshape(values.shape))
        start = end
    return parts
