"""Prompts for rollouts, from the rows of the configured sources.

The column `prompt` contains a chat. The optional column `env_class` names an environment. All other columns are passed
to the environment.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

from jinja2 import TemplateError

from skyrl.envs.env import Message
from skyrl.errors import ConfigError
from skyrl.train.data.files import Row, read_rows
from skyrl.train.rollouts.episode import Prompt
from skyrl.utils.chats import columns_of, read_chat, read_tools, short

logger = logging.getLogger(__name__)

Fit = Callable[[Sequence[Message], str, Sequence[Any] | None], list[Message]]


@dataclass(frozen=True)
class PromptReader:
    """Converts rows into prompts."""

    default_env_class: str
    """Environment of rows without `env_class`."""

    prompt_length: Callable[[Prompt], int]
    """Returns a prompt's number of tokens. The prompt is rendered as in training, with its row's tools."""

    fit: Fit = lambda messages, column, tools: list(messages)
    """Converts messages to the format that the chat template reads, such as `TemplateForm.fit`."""

    tools_of: Callable[[str], list[dict[str, Any]]] = lambda env_class: []
    """Returns the tools of an environment, for rows without `tools`."""

    reward: str | None = None
    """Reward function that replaces the environments of all rows. None: each row's environment is used."""

    def read(self, row: Row, number: int, where: str) -> tuple[Prompt, int]:
        """Return the prompt of a row and its number of tokens. Raises ConfigError for an unusable row.

        Args:
            row: All columns of the row.
            number: Number of the row among all rows of all sources.
            where: Source of the row and its number there.
        """
        try:
            prompt = self._prompt(row, str(number), where)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        return prompt, _length(self.prompt_length, prompt, where)

    def _prompt(self, row: Row, instance_id: str, where: str) -> Prompt:
        extras = dict(row)
        if extras.get("prompt") is None:
            raise ConfigError(f"has no column prompt, but {columns_of(row)}; rename the column with the chats")
        messages = read_chat(extras.pop("prompt"), "prompt")
        env_class = extras.pop("env_class", None)
        if env_class is None:
            env_class = self.default_env_class
        if not isinstance(env_class, str):
            raise ConfigError(f"env_class={short(env_class)} is not the name of an environment; name one, or none")
        env_class = env_class if self.reward is None else self.reward
        if "tools" in extras:
            extras["tools"] = read_tools(extras["tools"], "tools")
        if extras.get("tools") is None and (tools := self.tools_of(env_class)):
            extras["tools"] = tools
        messages = self.fit(messages, "prompt", extras.get("tools"))
        return Prompt(messages, env_class, instance_id, extras, where)


class PromptDataset:
    """The rows of all sources, one source after another. Rows whose prompts are too long are left out.

    The id of a row (`Prompt.instance_id`) is its number among all rows of all sources, including those left out.

    Args:
        sources: Files and data sets, in the form that `data.files.read_rows` accepts.
        reader: Reader of the rows.
        max_prompt_length: Maximum number of tokens of a prompt. Longer prompts are left out, counted and logged.

    Raises:
        ConfigError: A source cannot be read, a row has no usable prompt or environment, or no rows are left.
    """

    def __init__(self, sources: Sequence[str], reader: PromptReader, max_prompt_length: int):
        self._prompts: list[Prompt] = []
        self.dropped = 0
        """Number of prompts that were too long."""
        for number, (where, row) in enumerate(_rows(sources)):
            prompt, length = reader.read(row, number, where)
            if length <= max_prompt_length:
                self._prompts.append(prompt)
            else:
                self.dropped += 1
        rows = len(self._prompts) + self.dropped
        if self.dropped:
            logger.warning(
                "%d of %d prompts are longer than trainer.max_prompt_length=%d and are left out",
                *(self.dropped, rows, max_prompt_length),
            )
        if not self._prompts:
            raise ConfigError(
                f"{', '.join(sources)}: of {rows} rows none has a prompt of at most "
                f"trainer.max_prompt_length={max_prompt_length} tokens; raise it, or use other data"
            )

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)

    @property
    def fingerprint(self) -> str:
        """Hash of all prompts in order. A resumed run uses it to check that its data are unchanged."""
        digest = hashlib.sha256()
        for prompt in self._prompts:
            row = [prompt.instance_id, prompt.env_class, prompt.messages, prompt.extras]
            digest.update(json.dumps(row, sort_keys=True, default=_stable).encode() + b"\n")
        return digest.hexdigest()


def _rows(sources: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Yield (source of the row and its number there, row) for every row."""
    for source in sources:
        for index, row in enumerate(read_rows(source)):
            yield f"{source}, row {index}", row


def _length(prompt_length: Callable[[Prompt], int], prompt: Prompt, where: str) -> int:
    try:
        return prompt_length(prompt)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:  # templates raise any exception
        said = str(error) if type(error) is TemplateError else f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{where}: the chat template cannot render prompt ({said}); change the row, or set generator.chat_template"
        ) from error


def _stable(value: object) -> str:
    """Return a text for a value that JSON cannot represent. The text is the same in every process."""
    known = isinstance(value, bytes | date | time | timedelta | Decimal)
    return repr(value) if known else type(value).__name__
