"""Checks of the data of a pass with a traced loss."""

from collections.abc import Sequence

import numpy as np

from skyrl.algorithms.checks.arrays import numbers, token_ids
from skyrl.algorithms.traced.graph import LOGPROBS
from skyrl.algorithms.traced.objective import TracedObjective
from skyrl.algorithms.traced.ragged import COLUMNS
from skyrl.algorithms.traced.reductions import MAX_COLUMNS
from skyrl.errors import RequestError
from skyrl.types import Datum

TARGETS = "target_tokens"
NAMED = "named."
"""Prefix of the inputs of a traced loss in a checked datum. `weights` without prefix are the weights of the pass."""
ADDED = {"weights", "mask"}
"""Inputs that client programs add to every datum, even if the loss does not read them."""
LARGEST_INTEGER = 2**24
"""All integers up to this magnitude are exact in float32."""


def check_traced_data(
    data: Sequence[Datum],
    objective: TracedObjective,
    *,
    vocab_size: int,
    max_context_length: int,
    refuse_unread: bool = True,
) -> list[Datum]:
    """Check the data of a pass with a traced loss and return it in normal form.

    Token ids are int32; `weights` are ones. Each input of the loss has the key `NAMED` plus its name, and is float32
    `[tokens]` (a scalar is repeated at each token) or `[tokens, K]`. K is the number of targets per token; the entry
    `NAMED` plus `COLUMNS` has it at each token. Unread inputs in `ADDED` are dropped. Other unread inputs raise an
    error if `refuse_unread` is True. If it is False, they are dropped too, as older servers did.

    Raises `RequestError` for the first violation.
    """
    if not data:
        raise RequestError("data is empty; send at least one datum")
    if refuse_unread:
        _check_names(data, objective)
    shapes = [_check_form(f"datum {i}", datum, objective, max_context_length) for i, datum in enumerate(data)]
    tokens = token_ids("model_input", [datum.tokens for datum in data], vocab_size)
    targets = token_ids(TARGETS, [datum.loss_fn_inputs[TARGETS] for datum in data], vocab_size)
    columns = {}
    for name, rank in objective.graph.inputs[1:]:
        arrays = [datum.loss_fn_inputs[name] for datum in data]
        _check_integers(name, arrays)
        columns[name] = rank, numbers(name, arrays)
    checked = []
    for i, (length, width) in enumerate(shapes):
        given = {
            NAMED + name: np.full(length, arrays[i], np.float32) if rank == 0 else arrays[i]
            for name, (rank, arrays) in columns.items()
        }
        given[NAMED + COLUMNS] = np.full(length, width, np.float32)
        weights = np.ones(targets[i].shape, np.float32)
        checked.append(Datum(tokens[i], {TARGETS: targets[i], "weights": weights, **given}))
    return checked


def _check_names(data: Sequence[Datum], objective: TracedObjective) -> None:
    known = {TARGETS, *(name for name, _ in objective.graph.inputs[1:]), *ADDED}
    for i, datum in enumerate(data):
        if unread := datum.loss_fn_inputs.keys() - known:
            raise RequestError(
                f"datum {i}: loss_fn_inputs[{min(unread)!r}] is not an input of this custom loss; remove it (known: "
                f"{', '.join(sorted(known))})"
            )


def _check_form(where: str, datum: Datum, objective: TracedObjective, max_context_length: int) -> tuple[int, int]:
    """Check a datum's shapes against the declared shapes. Returns the numbers of tokens and of targets per token."""
    length, given = len(datum.tokens), datum.loss_fn_inputs
    if not objective.min_tokens <= length <= max_context_length:
        raise RequestError(
            f"{where}: model_input has {length} tokens; this loss needs at least {objective.min_tokens}, and the "
            f"model's context is {max_context_length}"
        )
    widths: dict[str, int] = {}
    for name, rank in objective.graph.inputs:
        key = TARGETS if name == LOGPROBS else name
        if key not in given:
            raise RequestError(f"{where}: loss_fn_inputs lacks {key!r}, which the loss reads; add it")
        shape = _shape(given[key], rank)
        if len(shape) != rank or (rank and shape[0] != length):
            expected = ("a scalar", f"[{length}]", f"[{length}, K]")[rank]
            raise RequestError(f"{where}: {key} has shape {list(shape)} but the loss declared {expected} (rank {rank})")
        if rank == 2:
            widths[key] = shape[1]
    if len(set(widths.values())) > 1:
        raise RequestError(f"{where}: {widths} differ in K; inputs of rank 2 have the same targets per token")
    width = next(iter(widths.values()), 1)
    if not objective.min_columns <= width <= MAX_COLUMNS:
        raise RequestError(
            f"{where}: {width} targets per token; this loss needs at least {objective.min_columns}, and at most "
            f"{MAX_COLUMNS} are served with traced losses"
        )
    if given[TARGETS].dtype.kind not in "iu":
        raise RequestError(f"{where}: target_tokens has dtype {given[TARGETS].dtype}; send int64 token ids")
    return length, width


def _shape(values: np.ndarray, rank: int) -> tuple[int, ...]:
    """Return the shape of an input. Protobuf encodes a scalar like a list with one element; `rank` tells which."""
    return () if rank == 0 and values.shape == (1,) else values.shape


def _check_integers(name: str, arrays: Sequence[np.ndarray]) -> None:
    for i, values in enumerate(arrays):
        if (
            values.dtype.kind in "iu"
            and values.size
            and not (values.min() >= -LARGEST_INTEGER and values.max() <= LARGEST_INTEGER)
        ):
            raise RequestError(f"datum {i}: {name} has integers above 2**24 in magnitude; losses compute in float32")
