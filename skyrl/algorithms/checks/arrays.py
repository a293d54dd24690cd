"""Checks of token ids and numbers. The arrays of all data are checked together, not token by token.

Errors have the form `datum <number>: <field>[<position>]=<value> <violated rule>`.
"""

from collections.abc import Callable, Sequence

import numpy as np

from skyrl.algorithms.losses import LARGEST
from skyrl.errors import RequestError


def token_ids(field: str, arrays: Sequence[np.ndarray], vocab_size: int) -> list[np.ndarray]:
    """Return the arrays, one per datum, as int32. Raises `RequestError` unless all values are token ids."""
    flat = np.concatenate([values.reshape(-1) for values in arrays])
    check_token_ids(field, flat, vocab_size, arrays)
    return _cut(flat.astype(np.int32), arrays)


def check_token_ids(field: str, ids: np.ndarray, vocab_size: int, arrays: Sequence[np.ndarray] | None = None) -> None:
    """Raise `RequestError` unless all ids are in the vocabulary. For `arrays`, see `refuse_where`."""
    refuse_where(
        field,
        ids,
        arrays,
        lambda tokens: (tokens < 0) | (tokens >= vocab_size),
        f"is outside the vocabulary [0, {vocab_size}); use the tokenizer of this model",
    )


def numbers(field: str, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the arrays, one per datum, as float32.

    Raises `RequestError` for values that are not finite or too large.
    """
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
    """Raise `RequestError` for the first value that is `bad`.

    Args:
        field: Name of the values in the request.
        flat: All values, concatenated.
        arrays: One array per datum. Their shapes give the position of a value in the message. None: no data.
        bad: Returns True for each invalid element of `flat`.
        rule: Text after the value in the message.
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
    """Split `flat` into views with the shapes of the arrays."""
    parts, start = [], 0
    for values in arrays:
        end = start + values.size
        part = flat[start:end]
        parts.append(part if values.ndim == 1 else part.reshape(values.shape))
        start = end
    return parts
