"""Conversion between messages and tokens, by a model's tokenizer and chat template.

A conversation is rendered as text and encoded as a whole, or continued. A continuation needs the tokens that the
template puts between a response and the next one. To find them, a small conversation is rendered in which the last
answer is a marker. The text after the marker follows every answer. This text begins with the token that ends a turn.
That is a special token, at which tokenizers split first. Encoding the text alone therefore gives the same tokens as
encoding the whole conversation. Sampled tokens are never encoded again.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
from jinja2 import TemplateError

from skyrl.envs.env import Message
from skyrl.errors import ConfigError
from skyrl.train.rollouts.templates import template_error
from skyrl.utils.answer_formats import THINK, AnswerFormat, format_of
from skyrl.utils.chat_template import LONG, MARKER, SHORT, TOOL

ANCHORS = ("\n", "a", ".")
"""Texts that may precede a text to encode it as the middle of a text, unless a token crosses the border."""
REMEMBERED = 256
"""Maximum number of texts whose tokens are cached. Texts recur: all samples of a prompt, for example, have the same."""


class ChatTokenizer(Protocol):
    """The methods of a `transformers` tokenizer that are used here."""

    name_or_path: str
    """Folder or hub id of its model. Empty: neither."""

    @property
    def eos_token_id(self) -> Any: ...

    @property
    def all_special_ids(self) -> list[int]: ...

    @property
    def added_tokens_decoder(self) -> dict[int, Any]: ...

    def get_added_vocab(self) -> dict[str, int]: ...

    def get_vocab(self) -> dict[str, int]: ...

    def get_chat_template(self, chat_template: str | None = None, tools: list[Any] | None = None) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Any, **options: bool) -> Any: ...

    def convert_ids_to_tokens(self, ids: int, /) -> Any: ...

    def apply_chat_template(self, conversation: list[Message], **options: Any) -> Any: ...


class Chat:
    """A tokenizer and its chat template.

    Raises ConfigError if the tokenizer has no end-of-sequence token, or the template cannot be rendered.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        ends: Collection[int] = (),
    ):
        """Create the chat of a model.

        Args:
            tokenizer: Encodes text and renders chats.
            template: Chat template. None: the tokenizer's own.
            variables: Additional variables of the template (`chat_template_kwargs`).
            ends: Further tokens that end a turn, as the model's generation_config.json lists them.
        """
        self._tokenizer = tokenizer
        self._tokens = lru_cache(REMEMBERED)(lambda text: tuple(tokenizer.encode(text, add_special_tokens=False)))
        self._options = {**(variables or {}), "tokenize": False}
        self._template = template
        if template is not None:
            self._options["chat_template"] = template
        self._added = frozenset(tokenizer.get_added_vocab().values()) | frozenset(tokenizer.all_special_ids)
        if not isinstance(tokenizer.eos_token_id, int):
            raise ConfigError("the tokenizer has no eos_token, so that no turn can end; set eos_token in its folder")
        try:
            after_answer = self._after_marker(SHORT, self._required_tools(), answering=False)
        except TemplateError as error:
            way_out = (
                "set generator.chat_template, or use a tokenizer that has a template"
                if template is None
                else "fix it there, or set generator.chat_template to another"
            )
            raise ConfigError(
                f"the chat template cannot be rendered with chat_template_kwargs={dict(variables or {})}: {error}; "
                f"{way_out}"
            ) from error
        first = self.encode(after_answer or "")[:1]
        self.end_of_turn: int = first[0] if first and first[0] in self._added else tokenizer.eos_token_id
        """Token that the template puts after an assistant message. If it puts none there, the eos_token."""
        self.extra_end: int | None = None if self.end_of_turn == tokenizer.eos_token_id else self.end_of_turn
        """`end_of_turn` if it is not the tokenizer's eos_token. Samplers then need it as an additional stop token."""
        self._ends = {self.end_of_turn, tokenizer.eos_token_id, *ends}
        self._checked: set[tuple[str, ...]] = set()

    @cached_property
    def answer_format(self) -> AnswerFormat:
        """Format of the model's reasoning and tool calls."""
        return format_of(self._tokenizer.get_chat_template(self._template, [TOOL]))

    @cached_property
    def answer_reasons(self) -> bool:
        """True if the template begins each answer with reasoning."""
        return self._text(SHORT[:1], self._required_tools()).rstrip().endswith(THINK)

    @property
    def tokenizer(self) -> ChatTokenizer:
        return self._tokenizer

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Return the tokens of a conversation, up to the start of the model's next message."""
        return self._encode(self._text(messages, tools))

    def written(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str:
        """Return the text of a complete conversation, without the start of a next message."""
        return self._text(messages, tools, answering=False)

    def continuation(self, observations: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Return the tokens between a response and the next one: end of turn, messages, start of the next turn.

        The first token is `end_of_turn`. Raises ConfigError if the template makes these tokens depend on the earlier
        conversation, or does not begin them with a token that ends a turn.
        """
        text = self._after_marker([*SHORT, *observations], tools)
        roles = tuple(str(message.get("role")) for message in observations)
        if roles not in self._checked:
            self._check(text, self._after_marker([*LONG, *observations], tools), roles)
            self._checked.add(roles)
        return self.encode(text or "")

    def encode(self, text: str) -> list[int]:
        """Return the tokens of text that follows other tokens.

        They lack the marker of a space that SentencePiece tokenizers put at the start of a text.
        """
        for anchor in ANCHORS:
            before, whole = self._encode(anchor), self._encode(anchor + text)
            if before and whole[: len(before)] == before:
                return whole[len(before) :]
        return self._encode(text)

    def ended(self, response: Sequence[int]) -> bool:
        """Return True if the last token of a response ends a turn."""
        return bool(response) and response[-1] in self._ends

    def text(self, response: Sequence[int]) -> str:
        """Return the text of a response, without the token that ends its turn. Other special tokens are part of it."""
        ids = np.asarray(response[:-1] if self.ended(response) else response, np.int64)  # of a list, each item is read
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _required_tools(self) -> list[Any] | None:
        """Return a tool if the tokenizer has no template for chats without tools, because it may have one for tools."""
        try:
            self._tokenizer.get_chat_template(self._template)
        except ValueError:
            return [TOOL]
        return None

    def _text(self, messages: Sequence[Message], tools: Sequence[Any] | None, answering: bool = True) -> str:
        options = {"add_generation_prompt": answering} | ({"tools": list(tools)} if tools else {})
        try:
            return self._tokenizer.apply_chat_template(list(messages), **{**self._options, **options})
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise TemplateError(template_error(error, self._template)) from error

    def _encode(self, text: str) -> list[int]:
        return list(self._tokens(text))

    def _after_marker(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, answering: bool = True
    ) -> str | None:
        """Return the text that is rendered after the marker. None if the marker itself is not rendered."""
        _, found, after = self._text(messages, tools, answering).partition(MARKER)
        return after if found else None

    def _check(self, short: str | None, long: str | None, roles: tuple[str, ...]) -> None:
        way_out = "; set generator.step_wise_trajectories=True, or generator.chat_template, to render each turn anew"
        what = f"the chat template cannot be continued after a response (messages: {', '.join(roles) or 'none'}): "
        if short is None or long is None:
            raise ConfigError(f"{what}it does not render an assistant's content as it is{way_out}")
        if short != long:
            raise ConfigError(f"{what}it renders them differently after another conversation{way_out}")
        if self.encode(short)[:1] != [self.end_of_turn]:
            start = short[:20]
            raise ConfigError(f"{what}after it comes {start!r}, not a token that ends a turn{way_out}")
