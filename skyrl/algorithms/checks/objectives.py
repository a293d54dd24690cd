"""Checks of the data of a pass with an objective, like those in `requests` for the losses of the protocol."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from skyrl.algorithms.checks.arrays import numbers, refuse_where, token_ids
from skyrl.algorithms.objective import Objective
from skyrl.errors import RequestError
from skyrl.types import Datum

TARGETS = "target_tokens"
NOTHING = np.zeros(0, np.float32)
"""Substitute for an input that a datum does not give."""


def check_objective_data(
    data: Sequence[Datum], objective: Objective, *, vocab_size: int, max_context_length: int
) -> list[Datum]:
    """Check the data of a pass and return it in normal form: token ids int32, other inputs float32.

    Each datum has `target_tokens` and the required inputs of the objective. It may also have the objective's optional
    inputs, `weights` (default: ones) and `temperature` (default: 1). The shape of each is `[tokens]`.

    Raises `RequestError` for the first violation.
    """
    if not data:
        raise RequestError("data is empty; send at least one datum")
    for i, datum in enumerate(data):
        _check_form(f"datum {i}", datum, objective, max_context_length)
    tokens = token_ids("tokens", [datum.tokens for datum in data], vocab_size)
    targets = token_ids(TARGETS, [datum.loss_fn_inputs[TARGETS] for datum in data], vocab_size)
    names = sorted({name for datum in data for name in datum.loss_fn_inputs} - {TARGETS})
    columns = {name: numbers(name, [datum.loss_fn_inputs.get(name, NOTHING) for datum in data]) for name in names}
    if (column := columns.get("temperature")) is not None:
        rule = "must be above 0, as log-probabilities at 0 are not defined; use 1"
        refuse_where("temperature", np.concatenate(column), column, lambda values: values <= 0, rule)
    checked = []
    for i, datum in enumerate(data):
        given = {name: column[i] for name, column in columns.items() if name in datum.loss_fn_inputs}
        given.setdefault("weights", np.ones(len(tokens[i]), np.float32))
        checked.append(Datum(tokens[i], {TARGETS: targets[i], **given}))
    return checked


def _check_form(where: str, datum: Datum, objective: Objective, max_context_length: int) -> None:
    """Check that lengths agree, required inputs are present and all inputs are known."""
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


NEEDING = ("stable_reinforce",)
"""Losses whose data must say which targets were sampled."""


def only_sampled(data: Sequence[Datum], sampled: Sequence[np.ndarray | None], loss_fn: str) -> list[Datum]:
    """Return checked data, with weight 0 where a target was not sampled.

    Args:
        data: Data from `check_pass`, with `advantages`.
        sampled: bool `[tokens]` of each datum: True for sampled targets. None if the datum has no provenance.
        loss_fn: Name of the loss, for errors.

    Raises `RequestError` for a datum without provenance, and for a nonzero advantage of a target that was not sampled.
    """
    restricted = []
    for i, (datum, drawn) in enumerate(zip(data, sampled, strict=True)):
        if drawn is None:
            raise RequestError(
                f"datum {i}: no provenance, which {loss_fn} needs; send datum.with_provenance(...) with the "
                "sequence_id of each sample, or train with importance_sampling"
            )
        advantages = datum.loss_fn_inputs["advantages"]
        if np.any(stray := (advantages != 0) & ~drawn):
            at = int(np.argmax(stray))
            raise RequestError(
                f"datum {i}: advantages[{at}]={advantages[at]:g} "
                f"is nonzero for a target that was not sampled; {loss_fn} takes 0 there"
            )
        weights = np.where(drawn, datum.loss_fn_inputs["weights"], np.float32(0))
        restricted.append(replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, "weights": weights}))
    return restricted
