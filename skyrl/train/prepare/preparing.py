"""Conversion of a published data set to rows for an environment. Duplicate prompts are left out."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from skyrl.errors import ConfigError
from skyrl.train.data.files import read_rows
from skyrl.train.prepare.published import Published


@dataclass
class Prepared:
    """Converted rows, and counts of skipped rows."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    repeated: int = 0
    """Number of rows left out because an earlier row has the same prompt."""
    contradicting: int = 0
    """Number of these rows whose answer differs from that of the earlier row."""
    invalid: int = 0
    """Number of rows left out because they are unusable."""


def prepare(
    sources: Sequence[str], data_set: Published, *, instruction: str, limit: int | None = None, skip_invalid: bool
) -> Prepared:
    """Convert rows for `skyrl train rl`, in order.

    Args:
        sources: Sources, in the form that `read_rows` accepts.
        data_set: Format of the rows.
        instruction: Text to append to the last message of each prompt as a separate paragraph; "" for none.
        limit: Maximum number of converted rows. None: all.
        skip_invalid: True: skip and count unusable rows. False: raise an error for the first unusable row.

    Raises:
        ConfigError: A source cannot be read, a row is unusable, or no rows are left.
    """
    prepared = Prepared()
    answers: dict[str, str] = {}
    refused = None
    located = chain.from_iterable(
        ((f"{source}, row {index}", row) for index, row in enumerate(read_rows(source))) for source in sources
    )
    for index, (where, row) in enumerate(located):
        try:
            problem = data_set.problem(row, where)
        except ConfigError as error:
            if not skip_invalid:
                raise ConfigError(f"{error}, or leave such rows out with --skip-invalid") from error
            refused = refused or error
            prepared.invalid += 1
            continue
        key = json.dumps(problem.messages, sort_keys=True, default=str)
        if key in answers:
            prepared.repeated += 1
            prepared.contradicting += answers[key] != problem.ground_truth
            continue
        answers[key] = problem.ground_truth
        *before, last = problem.messages
        asked = f"{last['content']}\n\n{instruction}" if instruction else last["content"]
        prepared.rows.append(
            {
                "data_source": problem.data_source,
                "prompt": [*before, {**last, "content": asked}],
                "env_class": data_set.env_class,
                "reward_spec": {"method": "rule", "ground_truth": problem.ground_truth},
                "extra_info": {"index": index, **problem.extra},
            }
        )
        if len(prepared.rows) == limit:
            break
    if not prepared.rows:
        why = f"none of {prepared.invalid} rows can be used, the first because: {refused}" if refused else "has no rows"
        raise ConfigError(f"{', '.join(sources[:3])}: {why}; name other data")
    return prepared
