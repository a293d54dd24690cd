"""Loss masks of conversations.

If the chat template marks assistant messages (`{% generation %}`), the mask follows these markers. With other
templates, the messages before an assistant message are rendered as its prompt, and its tokens are those after the
longest common prefix of the prompt's tokens and the whole conversation's tokens, as in TRL. If the last characters of
the prompt and the first of the answer share a token, this token is thus trained on. Plain text follows the same rule.

A template may render earlier messages differently in a longer conversation (Qwen3 drops earlier reasoning). The text of
the prompt must therefore be a prefix of the whole text; other conversations are rejected.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError

from skyrl.config import ChatTemplateConfig
from skyrl.envs.env import Message
from skyrl.errors import ConfigError
from skyrl.train.rollouts.chat import ChatTokenizer
from skyrl.train.rollouts.templates import load_template, template_error
from skyrl.utils.template_form import TemplateForm

KEEPS_THOUGHTS = "qwen3_with_thinking"
"""Name of a built-in template that keeps the reasoning of earlier messages."""
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Masked(NamedTuple):
    """A tokenized conversation and its loss mask."""

    token_ids: list[int]
    mask: list[bool]
    """True for each token that is trained on."""


def _agreeing(some: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    unequal = (at for at, (one, another) in enumerate(zip(some, other, strict=False)) if one != another)
    return next(unequal, min(len(some), len(other)))


def _said(messages: Sequence[Message]) -> list[int]:
    """Return the indices of the assistant messages."""
    return [number for number, message in enumerate(messages) if message.get("role") == "assistant"]


class Conversations:
    """Tokenizes conversations with a chat template, the tokenizer's own or another one."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        train_on_what: str,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ):
        """Create the tokenizer of conversations.

        Args:
            tokenizer: Encodes text and renders chats.
            train_on_what: Selection of the tokens to train on, one of `TRAIN_ON_WHAT`.
            template: Chat template. None: the tokenizer's own.
            variables: Additional variables of the template, such as `enable_thinking`.
        """
        self._tokenizer = tokenizer
        self._what = train_on_what
        self._template = template
        self._variables = dict(variables or {})
        self._options = self._variables | ({} if template is None else {"chat_template": template})
        special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = special | set(tokenizer.all_special_ids)
        self._check_syntax()
        self._first, self._last = self._added_tokens()
        self.form = TemplateForm(self._text)
        """Message format that the chat template expects."""

    def masked(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, completion: int | None = None
    ) -> Masked:
        """Tokenize a whole conversation.

        Args:
            messages: Messages of the conversation.
            tools: JSON schemas of tools, which the template renders.
            completion: Number of messages at the end that answer a prompt. The assistant messages among these are
                trained on, and no earlier messages, unless `train_on_what` is all_tokens. None: `train_on_what` selects
                the messages.

        The token that ends a turn is part of an assistant message. White space that the template adds after this token
        is not. Raises ConfigError if the template cannot be rendered, or if the messages cannot be located in the
        rendered text.
        """
        shown, chosen = list(tools) if tools else None, self._chosen(messages, completion)
        try:
            if self._what == "all_tokens":
                self._check_weights(messages)
                token_ids = self._encode(self._text(messages, shown))
                return Masked(token_ids, [True] * len(token_ids))
            if _MARKER.search(self._tokenizer.get_chat_template(self._template, tools=shown)):
                return self._marked(messages, shown, chosen)
            return self._by_prefixes(messages, shown, chosen)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{self._refusal(error)}; change the messages, or set chat_template") from error

    def completed(self, prompt: str, completion: str) -> Masked:
        """Tokenize a prompt and its completion, both plain text.

        Only the completion is trained on, unless `train_on_what` is all_tokens. Both are encoded as one text, with the
        special tokens that the tokenizer adds around a text, except those that the text has. The end-of-sequence token
        is appended unless the completion already ends with it.
        """
        end = self._tokenizer.eos_token_id
        if not isinstance(end, int):
            raise ConfigError("the tokenizer has no eos_token, so that no text can end; set eos_token in its folder")
        token_ids, before = self._begun(prompt + completion), self._begun(prompt)
        if token_ids[len(token_ids) - len(self._last) :] != self._last:
            token_ids += self._last
        start = _agreeing(before, token_ids)
        if len(token_ids) == start or token_ids[-1] != end:
            token_ids.append(end)
        return Masked(token_ids, [self._what == "all_tokens"] * start + [True] * (len(token_ids) - start))

    def text(self, text: str) -> Masked:
        """Tokenize a plain text as `completed` does. All of its tokens are trained on."""
        token_ids = self.completed("", text).token_ids
        return Masked(token_ids, [True] * len(token_ids))

    def _added_tokens(self) -> tuple[list[int], list[int]]:
        """Return the special tokens that the tokenizer adds before and after a text."""
        whole, inner = self._tokenizer.encode("a", add_special_tokens=True), self._encode("a")
        around = range(len(whole) - len(inner) + 1)
        start = next((at for at in around if whole[at : at + len(inner)] == inner), 0)
        return list(whole[:start]), list(whole[start + len(inner) :])

    def _begun(self, text: str) -> list[int]:
        """Encode a text. The special tokens that begin a sequence come first, once."""
        token_ids = self._encode(text)
        return token_ids if token_ids[: len(self._first)] == self._first else [*self._first, *token_ids]

    def _check_syntax(self) -> None:
        """Raise ConfigError if the template has a syntax error. Otherwise, the error would be attributed to a row."""
        try:
            self._text([{"role": "user", "content": "A"}], None)
        except TemplateSyntaxError as error:
            raise ConfigError(f"{self._refusal(error)}; fix it there, or set chat_template to another") from error
        except (TemplateError, ValueError, TypeError, KeyError):  # rows may have its fields, or need no template
            pass

    def _refusal(self, error: Exception) -> str:
        told = template_error(error, self._template)
        return f"the chat template cannot be rendered with chat_template_kwargs={self._variables}: {told}"

    def _chosen(self, messages: Sequence[Message], completion: int | None) -> list[int]:
        """Return the indices of the messages to train on. Messages with `weight` 0 are excluded."""
        said = _said(messages)
        if completion is not None:
            said = [number for number in said if number >= len(messages) - completion]
        elif self._what == "last_assistant_message":
            said = said[-1:]
        elif self._what == "last_assistant_turn":
            asked = [number for number, message in enumerate(messages) if message.get("role") == "user"]
            said = [number for number in said if number > max(asked, default=-1)]
        return [number for number in said if messages[number].get("weight", 1)]

    def _check_weights(self, messages: Sequence[Message]) -> None:
        """Raise ConfigError if a message has weight 0. This contradicts `all_tokens`."""
        for number, message in enumerate(messages):
            if not message.get("weight", 1):
                raise ConfigError(
                    f"messages[{number}].weight=0 contradicts train_on_what=all_tokens; leave weights out, or set "
                    "train_on_what=all_assistant_messages"
                )

    def _marked(self, messages: Sequence[Message], tools: list[Any] | None, chosen: list[int]) -> Masked:
        """Mask by the template's own markers."""
        rendered = self._tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
            **self._options,
        )  # fmt: skip
        token_ids, marked = list(rendered["input_ids"]), [bool(one) for one in rendered["assistant_masks"]]
        said = _said(messages)
        if chosen == said:
            return Masked(token_ids, marked)
        starts = [at for at, one in enumerate(marked) if one and not (at and marked[at - 1])]
        if len(starts) != len(said):
            raise ConfigError(
                f"the chat template marks {len(starts)} assistant spans but the conversation has {len(said)} assistant "
                f"messages, so the tokens of the {len(chosen)} that are trained on are ambiguous; "
                "train on all (train_on_what=all_assistant_messages), or set a chat_template that marks "
                "each message once"
            )
        ends = [*starts[1:], len(marked)]
        mask = [False] * len(marked)
        for number, start, end in zip(said, starts, ends, strict=True):
            if number in chosen:
                mask[start:end] = marked[start:end]
        return Masked(token_ids, mask)

    def _by_prefixes(self, messages: Sequence[Message], tools: list[Any] | None, chosen: list[int]) -> Masked:
        """Mask the tokens that each chosen message adds to the messages before it."""
        text = self._text(messages, tools)
        token_ids = self._encode(text)
        mask = [False] * len(token_ids)
        for number in chosen:
            if number == 0:
                raise ConfigError(
                    "messages[0] is an assistant's, so that there is no prompt for it; begin with a message of "
                    "another role, or use a chat_template with {% generation %} markers"
                )
            before = self._prefix(text, token_ids, messages[:number], tools, prompt=True)
            start, upto = _agreeing(before, token_ids), token_ids
            if number < len(messages) - 1:
                upto = self._prefix(text, token_ids, messages[: number + 1], tools, prompt=False)
            end, agree = self._without_glue(upto, start), _agreeing(upto, token_ids)
            for at in range(start, min(end, agree + 1)):  # the last token may also have characters that follow
                mask[at] = True
        return Masked(token_ids, mask)

    def _prefix(
        self, text: str, token_ids: list[int], messages: Sequence[Message], tools: list[Any] | None, prompt: bool
    ) -> list[int]:
        """Return the tokens of the first messages.

        Raise ConfigError unless the whole conversation, of which `text` and `token_ids` are given, begins with them.
        """
        shorter = self._text(messages, tools, prompt)
        before = self._encode(shorter)
        agree = _agreeing(before, token_ids)
        if agree == len(before) or text.startswith(shorter):
            return before
        count = len(messages)
        what = f"the prompt for messages[{count}]" if prompt else f"the conversation up to messages[{count - 1}]"
        raise ConfigError(
            f"the chat template renders {what} differently within the whole conversation: from token {agree} on, "
            f"{self._at(before, agree)} became {self._at(token_ids, agree)}, so that what is trained on cannot be told "
            f"from the rest; {self._way_out()}"
        )

    def _way_out(self) -> str:
        """Return advice for a template that renders earlier messages differently, except advice already followed."""
        ways = []
        if self._template != load_template(ChatTemplateConfig(name_or_path=KEEPS_THOUGHTS)):
            renders = f"renders the past as it was (such as {KEEPS_THOUGHTS}) or has {{% generation %}} markers"
            ways.append(f"set a chat_template that {renders}")
        if self._options.get("enable_thinking") is False:
            ways.append("leave enable_thinking=false out where messages have thoughts")
        return ", or ".join([*ways, "change the messages"])

    def _at(self, token_ids: list[int], start: int) -> str:
        return repr(self._tokenizer.decode(token_ids[start : start + 8])) if start < len(token_ids) else "nothing"

    def _without_glue(self, token_ids: list[int], start: int) -> int:
        """Return the end of a message that begins at `start`, not counting its trailing white space.

        If only white space follows the message's last special token, this is the place after the token. If not, it is
        the end of the tokens.
        """
        end = len(token_ids)
        last = next((at for at in range(end - 1, start - 1, -1) if token_ids[at] in self._special), end - 1)
        return end if self._tokenizer.decode(token_ids[last + 1 :]).strip() else last + 1

    def _text(self, messages: Sequence[Message], tools: Sequence[Any] | None, prompt: bool = False) -> str:
        return self._tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt, **self._options
        )

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))
