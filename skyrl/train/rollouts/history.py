"""Construction of the sampler's input at each turn, in three ways.

- `TokenHistory`: tokens in, tokens out. Responses stay as sampled, and only new messages are rendered.
- `RenderedHistory`: the whole conversation is rendered again. Templates that drop earlier reasoning therefore work as
  in a chat.
- `SingleMessageHistory`: one assistant message contains all turns, with the observations as plain text in between.

The trained tokens are always the sampled tokens (`rows`), whatever the history.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from skyrl.config import GeneratorConfig
from skyrl.envs.env import Message
from skyrl.train.rollouts.chat import Chat
from skyrl.train.rollouts.sampler import Sampled


class History(ABC):
    """A conversation, in the form of the sampler's input.

    Args:
        chat: Tokenizer and template.
        messages: Prompt messages.
        tools: Descriptions of tools. The template shows them to the model.
        append_eos: True: a turn that ended at a stop string gets an end-of-turn token.
    """

    def __init__(self, chat: Chat, messages: Sequence[Message], tools: Sequence[Any] = (), append_eos: bool = True):
        self.chat = chat
        self.tools = tools
        self.append_eos = append_eos

    @abstractmethod
    def prompt_ids(self) -> list[int]:
        """Return the whole input of the next turn."""

    @abstractmethod
    def extend(self, sampled: Sampled, observations: Sequence[Message]) -> None:
        """Add a response and the environment's answer. Called if another turn follows."""

    def closing_ids(self, sampled: Sampled) -> list[int]:
        """Return the tokens to add after a response.

        This is an end-of-turn token if the response ended at a stop string and `append_eos` is True. Otherwise none.
        """
        at_stop_string = sampled.stop_reason == "stop" and not self.chat.ended(sampled.token_ids)
        return [self.chat.end_of_turn] if at_stop_string and self.append_eos else []


class TokenHistory(History):
    """Each input is the previous input, its response, and the template's tokens up to the next response.

    A response that was cut off at the length limit gets the template's end-of-turn token before the next message.
    `extend` raises ConfigError if the template cannot be continued (`Chat.continuation`).
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
    """Each input is the prompt and the start of one long answer, made of responses and the text of observations.

    The end-of-turn token of a response is left out of later inputs, because the answer continues.
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
    """Return the class of histories that a configuration selects."""
    if not config.use_conversation_multi_turn:
        return SingleMessageHistory
    if config.step_wise_trajectories or config.chat_template.name_or_path is not None:
        return RenderedHistory
    return TokenHistory
