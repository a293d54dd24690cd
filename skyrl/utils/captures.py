"""Rows of captured sessions (`/v1/captures/ID` of a server) as data of the Tinker SDK."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np


def rows_of(lines: str) -> list[dict[str, Any]]:
    """Return the rows in the text of a capture, without those of incomplete sessions and those without drawn tokens."""
    rows = [json.loads(line) for line in lines.splitlines()]
    return [row for row in rows if row["complete"] and any(row["mask"])]


def datums(rows: Iterable[Mapping[str, Any]], advantages: Sequence[float]) -> list[Any]:
    """Return a `tinker.Datum` for each row, for a loss of policies such as importance_sampling or ppo.

    Drawn tokens have the row's advantage, and all others 0, so they are not trained on. Raises ValueError unless there
    is an advantage for each row.
    """
    import tinker

    data = []
    for row, advantage in zip(rows, advantages, strict=True):
        tokens, mask = row["tokens"], np.asarray(row["mask"][1:], np.float32)
        inputs = {
            "target_tokens": np.asarray(tokens[1:], np.int64),
            "logprobs": np.asarray(row["logprobs"][1:], np.float32),
            "advantages": np.float32(advantage) * mask,
        }
        model_input = tinker.ModelInput.from_ints(tokens[:-1])
        data.append(tinker.Datum(model_input=model_input, loss_fn_inputs=inputs))  # pyright: ignore[reportArgumentType]
    return data
