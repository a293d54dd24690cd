"""Conversion of rows of a data set to examples. An example has token ids and a loss mask.

The columns of a row determine its kind: `input_ids` with `labels` or `loss_mask` (already tokenized), `messages` (a
conversation), `conversations` (in ShareGPT format), `prompt` and `completion`, `instruction`, `input` and `output`
(Alpaca), or `text`. To add a kind, add a branch to `RowReader.example`. Pairs of answers are in
`skyrl.train.sft.pairs`.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from skyrl.envs.env import Message
from skyrl.errors import ConfigError
from skyrl.train.sft.conversations import Conversations, Masked
from skyrl.utils.chats import chat_or_text, checked_text, columns_of, read_chat, read_tools, short

IGNORED = -100
"""Label of a token that is not trained on."""

NO_ANSWER = "do not end with an assistant's message"
NOTHING_TRAINED = "have nothing that is trained on"
CUT = "have nothing that is trained on within max_length"
"""These three are the reasons for skipping rows. In a summary, they follow the number of rows."""


@dataclass(frozen=True)
class Example:
    """A sequence to train on."""

    token_ids: np.ndarray
    """int32 `[tokens]`."""
    mask: np.ndarray
    """bool `[tokens]`: True for each token that is trained on.

    Always False for the first token, because no token predicts it.
    """
    truncated: bool = False
    """True if the sequence was truncated at the end."""
    untrained_calls: int = 0
    """Number of messages with tool calls that follow the last user message but are not trained on."""

    @property
    def sequences(self) -> "tuple[Example, ...]":
        """Sequences of the example. It is its only sequence."""
        return (self,)

    @property
    def start(self) -> int:
        """Position of the first trained token."""
        return int(self.mask.argmax())

    @property
    def trained_tokens(self) -> int:
        """Number of trained tokens."""
        return int(self.mask.sum())


@dataclass(frozen=True)
class RowReader:
    """Converts rows into examples."""

    conversations: Conversations
    train_on_what: str
    max_length: int | None = None
    """Maximum length of an example, in tokens. Longer examples are truncated at the end. None: no limit."""
    messages_key: str = "messages"
    tools_key: str = "tools"
    system_key: str = "system"
    """These three fields are the names of the columns with messages, tools and the system message."""

    def example(self, row: Mapping[str, Any]) -> Example | str:
        """Return the example that a row contains, or the reason to skip the row.

        Raises ConfigError for a malformed row or a row of an unknown kind.
        """
        if row.get("input_ids") is not None:
            masked = _pretokenized(row)
        elif row.get(self.messages_key) is not None:
            return self._conversation(self._chat(row[self.messages_key], self.messages_key, row), row)
        elif row.get("conversations") is not None:
            return self._conversation(self._chat(row["conversations"], "conversations", row), row)
        elif row.get("prompt") is not None and row.get("completion") is not None:
            return self.answered(row["prompt"], row["completion"], row, "completion")
        elif row.get("instruction") is not None and row.get("output") is not None:
            return self._conversation(_alpaca(row), row)
        elif row.get("text") is not None:
            masked = self.conversations.text(_text(row["text"], "text"))
        else:
            raise ConfigError(
                f"unsupported type in columns: {columns_of(row)}; give {self.messages_key} (a list of "
                "messages), conversations (ShareGPT), prompt and completion, instruction and output, text, or "
                "input_ids with labels or loss_mask; messages_key names another column of messages"
            )
        return self._cut(masked)

    def answered(self, prompt: Any, answer: Any, row: Mapping[str, Any], name: str) -> Example | str:
        """Return the example of a prompt and an answer, or the reason to skip the row.

        Prompt and answer are both text, or both are lists of messages or JSON text of such a list.

        Args:
            prompt: Value of the column `prompt`.
            answer: Value of the column `name`. The answer is trained on.
            row: All columns of the row.
            name: Name of the column with the answer.
        """
        prompt, answer = chat_or_text(prompt, "prompt"), chat_or_text(answer, name)
        if isinstance(prompt, list) and isinstance(answer, list):
            said = self._chat(answer, name, row)
            return self._conversation([*self._chat(prompt, "prompt", row), *said], row, len(said))
        also = f"; prompt and {name} may both be lists of messages, or JSON text of them"
        return self._cut(self.conversations.completed(_text(prompt, "prompt", also), _text(answer, name, also)))

    def _chat(self, value: Any, column: str, row: Mapping[str, Any]) -> list[Message]:
        return self.conversations.form.fit(read_chat(value, column), column, self._tools(row))

    def _tools(self, row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        return read_tools(row.get(self.tools_key), self.tools_key)

    def _conversation(
        self, messages: list[Message], row: Mapping[str, Any], completion: int | None = None
    ) -> Example | str:
        messages = self._with_system(messages, row)
        if self.train_on_what != "all_tokens" and messages[-1]["role"] != "assistant":
            return NO_ANSWER
        example = self._cut(self.conversations.masked(messages, self._tools(row), completion))
        if isinstance(example, str) or completion is not None or self.train_on_what != "last_assistant_message":
            return example
        turn = itertools.takewhile(lambda message: message["role"] != "user", reversed(messages[:-1]))
        return replace(example, untrained_calls=sum("tool_calls" in message for message in turn))

    def _cut(self, masked: Masked) -> Example | str:
        token_ids = np.asarray(masked.token_ids, np.int32)
        mask = np.asarray(masked.mask, np.bool_)
        mask[:1] = False
        if not mask.any():
            return NOTHING_TRAINED
        truncated = self.max_length is not None and len(token_ids) > self.max_length
        example = Example(token_ids[: self.max_length], mask[: self.max_length], truncated)
        return example if example.trained_tokens else CUT

    def _with_system(self, messages: list[Message], row: Mapping[str, Any]) -> list[Message]:
        system = row.get(self.system_key)
        if system is None or system == "":
            return messages
        system = _text(system, self.system_key)
        if messages[0]["role"] == "system":
            raise ConfigError(
                f"{self.system_key}={short(system)}: the messages begin with a system message; leave out one"
            )
        return [{"role": "system", "content": system}, *messages]


def _text(value: Any, name: str, also: str = "") -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name}={short(value)}: give a string{also}")
    return checked_text(value, name)


def _alpaca(row: Mapping[str, Any]) -> list[Message]:
    """Convert an Alpaca row to two messages: a question (instruction, and input if there is one) and an answer."""
    given = {name: row.get(name) for name in ("instruction", "input", "output")}
    parts = {name: "" if value is None else _text(value, name) for name, value in given.items()}
    question = "\n\n".join(part for part in (parts["instruction"], parts["input"]) if part)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": parts["output"]}]


def _pretokenized(row: Mapping[str, Any]) -> Masked:
    """Return the tokens of a row that is already tokenized, without padding (tokens whose `attention_mask` is 0)."""
    token_ids = _numbers(row, "input_ids")
    wrong = token_ids[(token_ids < 0) | (token_ids > np.iinfo(np.int32).max)]
    if wrong.size:
        raise ConfigError(f"input_ids has {wrong[0]}, which is no token id; use the tokenizer of this model")
    labels, loss_mask = row.get("labels"), row.get("loss_mask")
    if (labels is None) == (loss_mask is None):
        given = "neither labels nor loss_mask" if labels is None else "labels and loss_mask"
        raise ConfigError(f"input_ids comes with {given}; give one of them, which says what is trained on")
    if labels is None:
        trained = _flags(row, "loss_mask", len(token_ids))
    else:
        labels = _numbers(row, "labels", len(token_ids))
        trained = labels != IGNORED
        wrong = np.flatnonzero(trained & (labels != token_ids))
        if wrong.size:
            at = int(wrong[0])
            raise ConfigError(
                f"labels[{at}]={labels[at]} but input_ids[{at}]={token_ids[at]}; a label is the token at its own place "
                f"(not shifted), or {IGNORED}"
            )
    kept = np.ones(len(token_ids), np.bool_)
    if row.get("attention_mask") is not None:
        kept = _flags(row, "attention_mask", len(token_ids))
    return Masked(token_ids[kept].tolist(), trained[kept].tolist())


def _flags(row: Mapping[str, Any], name: str, length: int) -> np.ndarray:
    flags = _numbers(row, name, length)
    if not np.isin(flags, (0, 1)).all():
        raise ConfigError(f"{name} has values other than 0 and 1; give 1 where it holds and 0 where it does not")
    return flags.astype(np.bool_)


def _numbers(row: Mapping[str, Any], name: str, length: int | None = None) -> np.ndarray:
    """Return a column as an int64 array `[tokens]`. Booleans become 0 and 1.

    Raises ConfigError unless it is a list of integers, with `length` entries if that is given.
    """
    try:
        array = np.asarray(row[name])
    except ValueError:
        array = np.asarray(None)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
        raise ConfigError(f"{name}={short(row[name])}: give a flat list of integers")
    if length is not None and len(array) != length:
        raise ConfigError(f"{name} has {len(array)} entries but input_ids has {length}; give one for each token")
    return array.astype(np.int64)
