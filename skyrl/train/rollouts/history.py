"""Construction of the sampler's input at each turn, in three ways.

- `TokenHistory`: tokens in, tokens out. Responses stay as sampled, and only new messages are rendered.
- `RenderedHistory`: the whole conversation is rendered again. Templates that drop earlier reasoning, or an
  environment's own view of the history, work as in a chat.
- `SingleMessageHistory`: one assistant message contains all turns, with the observations as plain text in between.

The trained tokens do not depend on the history; they follow from the sampled tokens (`rows`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from skyrl.envs.env import Message
from skyrl.train.config import GeneratorConfig
from skyrl.train.rollouts.chat import Chat
from skyrl.train.rollouts.sampler import Sampled


class History(ABC):
    """A conversation as input of the sampler.

    Args:
        chat: Tokenizer and template.
        messages: The prompt.
        tools: Descriptions of tools that the template shows the model.
        append_eos: True: a turn that ended at a stop string gets an end-of-turn token.
    """

    def __init__(self, chat: Chat, messages: Sequence[Message], tools: Sequence[Any] = (), append_eos: bool = True):
        self.chat = chat
        self.tools = tools
        self.append_eos = append_eos

    @abstractmethod
    def prompt_ids(self) -> list[int]:
        """The whole input of the next turn."""

    @abstractmethod
    def extend(self, sampled: Sampled, observations: Sequence[Message]) -> None:
        """Add a response and the environment's answer, before another turn."""

    def closing_ids(self, sampled: Sampled) -> list[int]:
        """Tokens to add after the last response: an end-of-turn token after a stop string (`append_eos`), else none."""
        at_stop_string = sampled.stop_reason == "stop" and not self.chat.ended(sampled.token_ids)
        return [self.chat.end_of_turn] if at_stop_string and self.append_eos else []


class TokenHistory(History):
    """Each input is the previous input, its response, and the template's tokens up to the next response.

    A response cut off at its length limit gets the template's end-of-turn token, so it is separated from the next
    message.
    Raises ConfigError if the template cannot be continued.
    """

    def __init__(self, chat: Chat, messages: Sequence[Message], tools: Sequence[Any] = (), append_eos: bool = True):
        super().__init__(chat, messages, tools, append_eos)
        self._ids = chat.render(messages, tools)

    def prompt_ids(self) -> list[int]:
        return self._ids

    def extend(self, sampled: Sampled, observations: Sequence[Message]) -> None:
        between = self.chat.continuation(observations, self.tools)
        cut_off = sampled.stop_reason == "length" and not self.chat.ended(sampled.token_ids)
        closed = cut_off or self.closing_ids(sampled)
        self._ids = [*self._ids, *sampled.token_ids, *(between if closed else between[1:])]


class RenderedHistory(History):
    """Each input is the conversation so far, rendered by the template."""

    def __init__(self, chat: Chat, messages: Sequence[Message], tools: Sequence[Any] = (), append_eos: bool = True):
        super().__init__(chat, messages, tools, append_eos)
        self._messages = list(messages)

    def prompt_ids(self) -> list[int]:
        return self.chat.render(self._messages, self.tools)

    def extend(self, sampled: Sampled, observations: Sequence[Message]) -> None:
        answer = {"role": "assistant", "content": self.chat.text(sampled.token_ids)}
        self._messages += [answer, *observations]


class SingleMessageHistory(History):
    """Each input is the prompt and the start of one long answer: responses, and plain text of observations.

    The end-of-turn token of a response is not part of later inputs, because the answer continues.
    """

    def __init__(self, chat: Chat, messages: Sequence[Message], tools: Sequence[Any] = (), append_eos: bool = True):
        super().__init__(chat, messages, tools, append_eos=True)
        self._ids = chat.render(messages, tools)

    def prompt_ids(self) -> list[int]:
        return self._ids

    def extend(self, sampled: Sampled, observations: Sequence[Message]) -> None:
        response = list(sampled.token_ids)
        if self.chat.ended(response):
            response.pop()
        text = "".join(message["content"] for message in observations)
        self._ids = [*self._ids, *response, *self.chat.encode(text)]


def history_class(config: GeneratorConfig) -> type[History]:
    """Class of histories for a configuration."""
    if not config.use_conversation_multi_turn:
        return SingleMessageHistory
    if config.step_wise_trajectories or config.chat_template.name_or_path is not None:
        return RenderedHistory
    return TokenHistory
