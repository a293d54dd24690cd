"""Conversion of rows of preference data to pairs of examples, one with the chosen and one with the rejected answer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from skyrl.envs.env import Message
from skyrl.errors import ConfigError
from skyrl.train.sft.examples import Example, RowReader
from skyrl.utils.chats import chat_or_text, columns_of, read_chat, short

SAME = "have the same answer as chosen and as rejected"
"""Reason for skipping a row. The text follows the number of rows in a summary."""


@dataclass(frozen=True)
class Pair:
    """A prompt with two answers. Each example has the prompt and one answer, which alone is trained on."""

    chosen: Example
    rejected: Example

    @property
    def sequences(self) -> tuple[Example, Example]:
        """Both examples."""
        return self.chosen, self.rejected

    @property
    def trained_tokens(self) -> int:
        """Number of trained tokens of both answers."""
        return self.chosen.trained_tokens + self.rejected.trained_tokens

    @property
    def truncated(self) -> bool:
        """True if either example was truncated."""
        return self.chosen.truncated or self.rejected.truncated


@dataclass(frozen=True)
class PairReader:
    """Converts rows in TRL's format (https://huggingface.co/docs/trl/dataset_formats) into pairs.

    The columns are `chosen`, `rejected` and optionally `prompt`. All are text, or all are lists of messages or JSON
    text of such a list. The lists `chosen` and `rejected` may both start with the prompt. The column `prompt` is then
    missing, or has the text of the last prompt message.
    """

    rows: RowReader

    def example(self, row: Mapping[str, Any]) -> Pair | str:
        """Return the pair, or the reason to skip the row. Raises ConfigError for a malformed row."""
        chosen, rejected, prompt = (chat_or_text(row.get(name), name) for name in ("chosen", "rejected", "prompt"))
        if chosen is None or rejected is None:
            raise ConfigError(f"columns {columns_of(row)}: no pair of answers; give prompt, chosen and rejected")
        if type(chosen) is not type(rejected):
            raise ConfigError(
                f"chosen={short(chosen)} and rejected={short(rejected)}: give two texts or two lists of messages"
            )
        if chosen == rejected:
            return SAME
        if isinstance(chosen, list):
            chosen, rejected = read_chat(chosen, "chosen"), read_chat(rejected, "rejected")
            if not isinstance(prompt, list):
                prompt, chosen, rejected = _parted(prompt, chosen, rejected)
        if prompt is None:
            raise ConfigError("there is no prompt; give one, or lists of messages that both begin with it")
        answers = chosen, rejected
        first = self.rows.answered(prompt, chosen, row, "chosen")
        second = self.rows.answered(prompt, rejected, row, "rejected")
        if isinstance(first, str) or isinstance(second, str):
            return first if isinstance(first, str) else str(second)
        if first.token_ids.tolist() == second.token_ids.tolist():
            return SAME
        if all(isinstance(one, str) or (one[0]["role"] == "assistant" and one[0].get("weight", 1)) for one in answers):
            first, second = (_trained_from(min(first.start, second.start), one) for one in (first, second))
        return Pair(first, second)


def _trained_from(start: int, example: Example) -> Example:
    """Return the example, trained on from `start` on.

    Both answers are trained on from the same token on, as in TRL. Otherwise, if the last characters of the prompt share
    a token with one answer only, the probabilities of both answers would be of different texts.
    """
    mask = example.mask.copy()
    mask[start : example.start] = True
    return replace(example, mask=mask)


def _parted(
    prompt: Any, chosen: list[Message], rejected: list[Message]
) -> tuple[list[Message], list[Message], list[Message]]:
    """Return the messages with which both lists begin, and the rest of each list.

    Raises ConfigError if one of the three parts is empty, or if `prompt` is not the text of the last common message.
    """
    unequal = (number for number, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other)
    shared = next(unequal, min(len(chosen), len(rejected)))
    if not shared:
        raise ConfigError("chosen and rejected do not begin with the same message; give a list of messages as prompt")
    if prompt is not None and prompt != chosen[shared - 1].get("content"):
        raise ConfigError(
            f"prompt={short(prompt)}: chosen and rejected begin with another; give the messages of the prompt as a "
            "list, or leave prompt out"
        )
    for name, messages in (("chosen", chosen), ("rejected", rejected)):
        if len(messages) == shared:
            raise ConfigError(f"{name} has no answer after the {shared} messages that both begin with; give one")
    return chosen[:shared], chosen[shared:], rejected[shared:]
