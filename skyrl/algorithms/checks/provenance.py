"""Check for losses that train only on sampled tokens."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from skyrl.errors import RequestError
from skyrl.types import Datum

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
