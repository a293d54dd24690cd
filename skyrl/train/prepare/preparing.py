"""From rows of a published data set to rows of an environment, each prompt once."""

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
    """Rows, and how many were left out."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    repeated: int = 0
    """Rows whose prompt an earlier one has."""
    contradicting: int = 0
    """Those of them that have another answer."""
    invalid: int = 0
    """Rows that cannot be used."""


def prepare(
    sources: Sequence[str], data_set: Published, *, instruction: str, limit: int | None = None, skip_invalid: bool
) -> Prepared:
    """Rows that `skyrl train rl` takes, in order.

    Args:
        sources: As `read_rows` takes them.
        data_set: What is in them.
        instruction: Text after the last message of each prompt, in a paragraph of its own; "" for none.
        limit: Rows after which reading ends.
        skip_invalid: Whether rows that cannot be used are left out and counted. Otherwise the first is refused.

    Raises:
        ConfigError: A source cannot be read, a row cannot be used, or none is left.
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
