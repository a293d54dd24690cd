"""What the data of a pass with an objective must satisfy, as `checks` has it for the losses of the protocol."""

from collections.abc import Sequence

import numpy as np

from skyrl.algorithms.losses import LARGEST
from skyrl.algorithms.objective import Objective
from skyrl.errors import RequestError
from skyrl.types import Datum

TARGETS = "target_tokens"


def check_objective_data(
    data: Sequence[Datum], objective: Objective, *, vocab_size: int, max_context_length: int
) -> list[Datum]:
    """Check the data of a pass and return it in normal form: token ids int32, other inputs float32.

    Every datum has `target_tokens` `[tokens]` and the objective's needs; it may have the objective's other inputs,
    `weights` (ones if left out) and `temperature` (1 if left out), all `[tokens]`.

    Raises `RequestError` for the first thing that is wrong.
    """
    if not data:
        raise RequestError("data is empty; send at least one datum")
    return [_checked(f"datum {i}", datum, objective, vocab_size, max_context_length) for i, datum in enumerate(data)]


def _checked(where: str, datum: Datum, objective: Objective, vocab_size: int, max_context_length: int) -> Datum:
    length, given = len(datum.tokens), datum.loss_fn_inputs
    if not 0 < length <= max_context_length:
        raise RequestError(
            f"{where}: {length} tokens; send at least 1 and at most {max_context_length}, the model's context"
        )
    missing = {TARGETS, *(set(objective.needs) & set(objective.inputs))} - given.keys()
    if missing:
        raise RequestError(f"{where}: {min(missing)!r} is missing, which the objective needs; add it")
    unknown = given.keys() - {TARGETS, "weights", "temperature", *objective.inputs}
    if unknown:
        raise RequestError(f"{where}: {min(unknown)!r} is not an input of the objective; remove it")
    for name, values in given.items():
        if values.shape != (length,):
            raise RequestError(
                f"{where}: {name} has shape {list(values.shape)} but there are {length} tokens; send {length} entries"
            )
    ids = {
        name: _token_ids(f"{where}: {name}", given.get(name, datum.tokens), vocab_size) for name in (TARGETS, "tokens")
    }
    floats = {name: _numbers(f"{where}: {name}", values) for name, values in given.items() if name != TARGETS}
    floats.setdefault("weights", np.ones(length, np.float32))
    if (floats.get("temperature", np.ones(1)) <= 0).any():
        raise RequestError(f"{where}: temperature must be above 0, as log-probabilities at 0 are not defined; use 1")
    return Datum(ids["tokens"], {TARGETS: ids[TARGETS], **floats})


def _token_ids(where: str, values: np.ndarray, vocab_size: int) -> np.ndarray:
    wrong = (values < 0) | (values >= vocab_size)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise RequestError(f"{where}[{at}]={values[at]} is outside the vocabulary [0, {vocab_size}); tokenize anew")
    return np.ascontiguousarray(values, np.int32)


def _numbers(where: str, values: np.ndarray) -> np.ndarray:
    wrong = ~(np.abs(values) <= LARGEST)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise RequestError(
            f"{where}[{at}]={values[at]} must be finite and at most {LARGEST:g}; mask the token with weight 0 and send "
            "0 here"
        )
    return np.ascontiguousarray(values, np.float32)
