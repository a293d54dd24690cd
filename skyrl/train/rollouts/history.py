"""Input of the sampler at each turn, in three ways.

- `TokenHistory`: tokens in, tokens out. Responses stay as they were sampled, and only what is new is rendered.
- `RenderedHistory`: the whole conversation is rendered anew. Templates that leave reasoning out of the past, or an
  environment's own view of it, act as they do in a chat.
- `SingleMessageHistory`: one assistant message holds all turns, with the observations as bare text within it.

None of them says which tokens are trained on: that follows from what was sampled (`rows`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from skyrl.envs.env import Message
from skyrl.train.config import GeneratorConfig
from skyrl.train.rollouts.chat import Chat
from skyrl.train.rollouts.sampler import Sampled


class History(ABC):
    """A conversation as the sampler sees it.

    Args:
        chat: Tokenizer and template.
        messages: The prompt.
        tools: Descriptions of the tools that the template shows the model.
        append_eos: Whether a turn that ended at a stop string gets a token that ends turns.
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
        """A response and what the environment answered: another turn follows."""

    def closing_ids(self, sampled: Sampled) -> list[int]:
        """Tokens after the response if it is the last: the token that ends a turn, after a stop string."""
        at_stop_string = sampled.stop_reason == "stop" and not self.chat.ended(sampled.token_ids)
        return [self.chat.end_of_turn] if at_stop_string and self.append_eos else []


class TokenHistory(History):
    """Every input is the previous input, its response, and the template's tokens from there to the next response.

    A response cut off at its length limit gets the template's end of turn, so the next message does not begin in it.
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
    """Every input is the conversation so far, rendered by the template."""

    def __init__(self, chat: Chat, messages: Sequence[Message], tools: Sequence[Any] = (), append_eos: bool = True):
        super().__init__(chat, messages, tools, append_eos)
        self._messages = list(messages)

    def prompt_ids(self) -> list[int]:
        return self.chat.render(self._messages, self.tools)

    def extend(self, sampled: Sampled, observations: Sequence[Message]) -> None:
        answer = {"role": "assistant", "content": self.chat.text(sampled.token_ids)}
        self._messages += [answer, *observations]


class SingleMessageHistory(History):
    """Every input is the prompt and the beginning of one long answer: responses and bare text of observations.

    A token that ends the turn does not stay in the middle of the answer: the input after it does not have it.
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
    """Class of histories that a configuration wants."""
    if not config.use_conversation_multi_turn:
        return SingleMessageHistory
    if config.step_wise_trajectories or config.chat_template.name_or_path is not None:
        return RenderedHistory
    return TokenHistory
