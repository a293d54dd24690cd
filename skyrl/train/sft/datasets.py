"""Data sets of examples. They are read from the configured sources, and truncated and skipped rows are counted."""

import logging
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Generic, Protocol, TypeVar

from skyrl.config.sft import DPOConfig, SFTConfig
from skyrl.errors import ConfigError
from skyrl.train.data.files import read_rows
from skyrl.train.data.loaders import Loader, as_it_is
from skyrl.train.rollouts.templates import load_template
from skyrl.train.sft.conversations import ChatTokenizer, Conversations
from skyrl.train.sft.examples import Example, RowReader
from skyrl.train.sft.pairs import PairReader
from skyrl.utils.chats import short

logger = logging.getLogger(__name__)

NAMED = 5
"""Maximum number of skipped rows that a summary lists for each reason."""


class Trainable(Protocol):
    """Example or pair of examples, made from one row."""

    @property
    def sequences(self) -> tuple[Example, ...]:
        """Sequences to train on. An example has one, a pair two."""
        ...

    @property
    def trained_tokens(self) -> int:
        """Number of trained tokens."""
        ...

    @property
    def truncated(self) -> bool:
        """True if a sequence was truncated at the end."""
        ...


E = TypeVar("E", bound=Trainable)
R = TypeVar("R", bound=Trainable, covariant=True)


class Reader(Protocol[R]):
    """Converts rows into examples or pairs."""

    def example(self, row: Mapping[str, Any]) -> R | str:
        """Return the example or pair that a row contains, or the reason to skip the row.

        Raises ConfigError for a malformed row.
        """
        ...


@dataclass(frozen=True)
class Dataset(Generic[E]):
    """Training examples or preference pairs of a data set, in the order of its rows."""

    name: str
    examples: list[E]
    rows: int
    """Number of rows read."""
    left_out: Mapping[str, list[int]]
    """Numbers of the skipped rows (from 0), by reason."""

    @property
    def truncated(self) -> int:
        """Number of truncated examples."""
        return sum(example.truncated for example in self.examples)

    def row(self, number: int) -> int:
        """Return the number (from 0) of the row that became `examples[number]`."""
        left_out = set(chain.from_iterable(self.left_out.values()))
        return next(islice((row for row in range(self.rows) if row not in left_out), number, None))

    def summary(self) -> str:
        """Return one line for the log: how many rows were read, used, truncated and skipped, and why."""
        trained = sum(example.trained_tokens for example in self.examples)
        parts = [f"{self.name}: {len(self.examples)} of {self.rows} rows used, {trained} tokens trained on"]
        if self.truncated:
            parts.append(f"{self.truncated} cut to max_length")
        if calls := sum(one.untrained_calls for example in self.examples for one in example.sequences):
            parts.append(
                f"{calls} messages with tool calls are not trained on (they are with train_on_what=last_assistant_turn)"
            )
        for reason, rows in self.left_out.items():
            named = ", ".join(map(str, rows[:NAMED])) + (", ..." if len(rows) > NAMED else "")
            parts.append(f"{len(rows)} left out that {reason} (row {named})")
        return "; ".join(parts)


def load_datasets(
    config: SFTConfig, tokenizer: ChatTokenizer, loader: Loader = as_it_is
) -> tuple[list[Dataset[Any]], list[Dataset[Any]]]:
    """Return (training data sets, evaluation data sets) of a resolved configuration. Logs a summary of each data set.

    Args:
        config: Resolved configuration.
        tokenizer: Tokenizer of the model.
        loader: Function that converts each row to a kind that `RowReader` or `PairReader` knows.

    Raises ConfigError for an unreadable source, a malformed row (the message names source and row), and a data set in
    which all rows are skipped.
    """
    reader = row_reader(config, tokenizer)
    train = [read_dataset(path, read_rows(path), reader, loader) for path in config.train_datasets]
    names = config.eval_dataset_names or []
    evaluation = [
        read_dataset(name, read_rows(path), reader, loader)
        for name, path in zip(names, config.eval_datasets, strict=True)
    ]
    for dataset in (*train, *evaluation):
        logger.info("%s", dataset.summary())
    return train, evaluation


def row_reader(config: SFTConfig, tokenizer: ChatTokenizer) -> Reader[Any]:
    """Return the reader of the rows of a run, which are examples or pairs."""
    rows = RowReader(
        conversations=Conversations(
            tokenizer, config.train_on_what, load_template(config.chat_template), config.chat_template_kwargs
        ),
        train_on_what=config.train_on_what,
        max_length=config.max_length,
        messages_key=config.messages_key,
        tools_key=config.tools_key,
        system_key=config.system_key,
    )
    return PairReader(rows) if isinstance(config, DPOConfig) else rows


def _loaded(loader: Loader, row: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return loader(row)
    except ConfigError:
        raise
    except Exception as error:  # the loader is the user's function
        frames = traceback.extract_tb(error.__traceback__)[1:]  # without this function's own frame
        place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        raise ConfigError(f"the loader raised {type(error).__name__}: {error}{place}") from error


def read_dataset(
    name: str, rows: Iterable[Mapping[str, Any]], reader: Reader[E], loader: Loader = as_it_is
) -> Dataset[E]:
    """Read the examples of `rows`. Raises ConfigError for a malformed row, or if all rows are skipped."""
    examples: list[E] = []
    left_out: dict[str, list[int]] = {}
    number = -1
    for number, row in enumerate(rows):
        try:
            loaded = _loaded(loader, row)
            if not isinstance(loaded, Mapping):
                raise ConfigError(f"the loader returned {short(loaded)}; return a row: a dict of columns")
            example = reader.example(loaded)
        except ConfigError as error:
            raise ConfigError(f"{name}, row {number}: {error}") from error
        if isinstance(example, str):
            left_out.setdefault(example, []).append(number)
        else:
            examples.append(example)
    dataset = Dataset(name, examples, number + 1, left_out)
    if not examples:
        raise ConfigError(f"{dataset.summary()}; give other data, or another train_on_what or max_length")
    return dataset
