"""Sources of rows as data sets of examples, with an account of what was cut and what was left out."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from skyrl.errors import ConfigError
from skyrl.train.config.sft import SFTConfig
from skyrl.train.data.files import read_rows
from skyrl.train.rollouts.templates import load_template
from skyrl.train.sft.conversations import ChatTokenizer, Conversations
from skyrl.train.sft.examples import Example, RowReader

logger = logging.getLogger(__name__)

NAMED = 5
"""Rows that a summary names of those that were left out for the same reason."""


@dataclass(frozen=True)
class Dataset:
    """Examples, in the order of the rows."""

    name: str
    examples: list[Example]
    rows: int
    """Rows that were read."""
    left_out: Mapping[str, list[int]]
    """Numbers of the rows (from 0) that are not trained on, by the reason."""

    @property
    def truncated(self) -> int:
        """Examples that lost their end."""
        return sum(example.truncated for example in self.examples)

    def row(self, number: int) -> int:
        """Number of the row (from 0) that an example was made of."""
        left_out = set(chain.from_iterable(self.left_out.values()))
        return next(islice((row for row in range(self.rows) if row not in left_out), number, None))

    def summary(self) -> str:
        """One line: how many rows, how many are used, cut, and left out, and why."""
        trained = sum(example.trained_tokens for example in self.examples)
        parts = [f"{self.name}: {len(self.examples)} of {self.rows} rows used, {trained} tokens trained on"]
        if self.truncated:
            parts.append(f"{self.truncated} cut to max_length")
        for reason, rows in self.left_out.items():
            named = ", ".join(map(str, rows[:NAMED])) + (", ..." if len(rows) > NAMED else "")
            parts.append(f"{len(rows)} left out that {reason} (row {named})")
        return "; ".join(parts)


def load_datasets(config: SFTConfig, tokenizer: ChatTokenizer) -> tuple[list[Dataset], list[Dataset]]:
    """(training data sets, evaluation data sets) of a resolved configuration; logs a summary of each.

    Raises ConfigError for a source that cannot be read, a row that cannot be used (it names source and row), and a
    data set of which nothing is left.
    """
    reader = RowReader(
        conversations=Conversations(
            tokenizer, config.train_on_what, load_template(config.chat_template), config.chat_template_kwargs
        ),
        train_on_what=config.train_on_what,
        max_length=config.max_length,
        messages_key=config.messages_key,
        tools_key=config.tools_key,
        system_key=config.system_key,
    )
    train = [read_dataset(path, read_rows(path), reader) for path in config.train_datasets]
    names = config.eval_dataset_names or []
    evaluation = [
        read_dataset(name, read_rows(path), reader) for name, path in zip(names, config.eval_datasets, strict=True)
    ]
    for dataset in (*train, *evaluation):
        logger.info("%s", dataset.summary())
    return train, evaluation


def read_dataset(name: str, rows: Iterable[Mapping[str, Any]], reader: RowReader) -> Dataset:
    """The examples of `rows`. Raises ConfigError, which names the row, and if there is no example at all."""
    examples: list[Example] = []
    left_out: dict[str, list[int]] = {}
    number = -1
    for number, row in enumerate(rows):
        try:
            example = reader.example(row)
        except ConfigError as error:
            raise ConfigError(f"{name}, row {number}: {error}") from error
        if isinstance(example, Example):
            examples.append(example)
        else:
            left_out.setdefault(example, []).append(number)
    dataset = Dataset(name, examples, number + 1, left_out)
    if not examples:
        raise ConfigError(f"{dataset.summary()}; give other data, or another train_on_what or max_length")
    return dataset
