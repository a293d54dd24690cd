"""Detection of the message fields that a chat template reads. Small chats are rendered to find out.

Templates differ in the field that contains reasoning, and in whether the arguments of a call are an object or JSON
text. A template without support for reasoning or calls silently drops them. `TemplateForm.fit` converts messages to the
format that the template reads, and rejects a message if the template would drop a part of it. No part of a row is thus
lost silently. A tokenizer may have a separate template for chats with tools, which is then the one that is rendered.
"""

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from skyrl.errors import ConfigError
from skyrl.utils.chat_template import TOOL
from skyrl.utils.chats import REASONING, REASONING_NAMES, Message

MARKER = "THE-VALUE-7d20e5"
ARGUMENTS = {"a": MARKER}
ARGUMENTS_TEXT = json.dumps(ARGUMENTS)


class TemplateForm:
    """Message format that one chat template reads."""

    def __init__(self, render: Callable[[list[Message], Sequence[Any] | None], str]):
        """Create the form of a template. `render` renders a chat and its tools. It is first called by `fit`."""
        self._render = render
        self._reads = cache(self._probe)

    def fit(self, messages: Sequence[Message], column: str, tools: Sequence[Any] | None = None) -> list[Message]:
        """Convert messages from `read_chat` to the format that the template reads.

        Raises ConfigError for content that the template would drop. The error begins with the place in the row.
        """
        given = bool(tools)
        return [self._fitted(message, f"{column}[{number}]", given) for number, message in enumerate(messages)]

    def _fitted(self, message: Message, at: str, tools: bool) -> Message:
        if message.get(REASONING):
            message = self._with_reasoning(message, at, tools)
        return self._with_calls(message, at, tools) if message.get("tool_calls") else message

    def _with_reasoning(self, message: Message, at: str, tools: bool) -> Message:
        for name in REASONING_NAMES:
            if self._reads("B", name, tools):
                return {name if key == REASONING else key: value for key, value in message.items()}
        raise ConfigError(
            f"{at}.{REASONING}: the chat template does not render it; set a chat_template that does, such as "
            "qwen3_with_thinking, write it into content between <think> and </think>, or leave it out of the row"
        )

    def _with_calls(self, message: Message, at: str, tools: bool) -> Message:
        for content in (message["content"],) if message["content"] else ("", None):
            for is_text in (False, True):
                if self._reads("B" if content else content, "text" if is_text else "object", tools):
                    calls = [_with_text(call) for call in message["tool_calls"]] if is_text else message["tool_calls"]
                    return {**message, "content": content, "tool_calls": calls}
        beside = "" if not message["content"] else " beside content"
        raise ConfigError(
            f"{at}.tool_calls: the chat template does not render them{beside}; set a chat_template that does, such as "
            "qwen3_with_thinking, or leave the row out"
        )

    def _probe(self, content: str | None, what: str, tools: bool) -> bool:
        """Return True if the template renders reasoning in the field `what`, or calls with arguments of type `what`.

        `tools` is True for a chat with tools.

        If the template cannot render even a plain chat, return True. Its error is then reported when a row is rendered.
        """
        answer: Message = {"role": "assistant", "content": content}
        if what in REASONING_NAMES:
            answer[what] = MARKER
        else:
            arguments = ARGUMENTS if what == "object" else ARGUMENTS_TEXT
            function = {"name": "f", "arguments": arguments}
            answer["tool_calls"] = [{"type": "function", "id": "123456789", "function": function}]
        text = self._text([{"role": "user", "content": "A"}, answer], tools)
        if text is None:
            return self._text([{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}], tools) is None
        return MARKER in text and str(ARGUMENTS) not in text  # the repr of an object means that it expects text

    def _text(self, messages: list[Message], tools: bool) -> str | None:
        try:
            return self._render(messages, [TOOL] if tools else None)
        except Exception:  # templates raise any exception
            return None


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    """Return the call, with its arguments as JSON text."""
    inner = call.get("function", call)
    inner = {**inner, "arguments": json.dumps(inner["arguments"], ensure_ascii=False)}
    return {**call, "function": inner} if "function" in call else inner
