"""Chat templates of model folders, rendered as in `transformers`, without importing it.

The text that a template renders after an answer begins with the end-of-turn token. A short conversation is rendered to
find it, with a marker as the answer.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MARKER = "THE-ANSWER-4f1c9b"
SHORT: list[dict[str, Any]] = [{"role": "user", "content": "A"}, {"role": "assistant", "content": MARKER}]
"""Conversation that ends with the marker."""
LONG: list[dict[str, Any]] = [{"role": "user", "content": "B"}, {"role": "assistant", "content": "C"}, *SHORT]
"""A longer one. What follows the marker must be equal in both, or it depends on the conversation before."""
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "a"}}},
    },
}
"""A tool that every template for tools can render."""

_GENERATION = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
"""Tags of `transformers` around assistant messages. The text between them is rendered unchanged."""


class ChatTemplate:
    """The chat template of a model folder.

    Args:
        source: Text of the template.
        tokenizer_config: Content of tokenizer_config.json. Its special tokens are variables of the template.
    """

    def __init__(self, source: str, tokenizer_config: Mapping[str, Any]):
        self.source = source
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        self._special = {name: _spelled(value) for name, value in tokenizer_config.items() if name.endswith("_token")}
        self._template = environment.from_string(_GENERATION.sub(_as_condition, source))

    @cache  # noqa: B019 (a process has few templates)
    def renders(self, role: str) -> bool:
        """Return True unless messages of a role, system or tool, are left out without an error."""
        call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
        probes = {
            "system": [{"role": "system", "content": MARKER}, SHORT[0]],
            "tool": [
                SHORT[0],
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "123456789", "name": "f", "content": MARKER},
            ],
        }
        try:
            return MARKER in self.render(probes[role], [TOOL] if role == "tool" else None)
        except Exception:  # templates are programs; the request's own chat may be one that it takes
            return True

    @classmethod
    def of(cls, folder: Path, tokenizer_config: Mapping[str, Any]) -> "ChatTemplate | None":
        """Return the template of a folder; None if it has none. Raises `TemplateError` for one that is invalid."""
        source = _source(folder, tokenizer_config)
        return None if source is None else cls(source, tokenizer_config)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the text of a chat. Templates are programs and may raise any exception."""
        given = {"documents": None, **self._special, **variables}
        return self._template.render(
            messages=messages, tools=tools or None, add_generation_prompt=add_generation_prompt, **given
        )


def text_after_answer(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """Return the text that the chat template of a model folder renders after the last answer.

    None if the folder has no template, or if the template fails or does not render the answer unchanged.
    """
    try:
        template = ChatTemplate.of(folder, tokenizer_config)
        text = None if template is None else template.render(SHORT, add_generation_prompt=False)
    except Exception:  # templates are programs and may raise any exception
        return None
    _, found, after = (text or "").partition(MARKER)
    return after if found else None


def _source(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """Return the text of the template, from chat_template.jinja or, without it, from the tokenizer configuration."""
    path = folder / "chat_template.jinja"
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    given = tokenizer_config.get("chat_template")
    if isinstance(given, list):  # several named templates
        given = next((one.get("template") for one in given if one.get("name") == "default"), None)
    return given if isinstance(given, str) else None


def _spelled(token: Any) -> Any:
    return token.get("content") if isinstance(token, Mapping) else token


def _as_condition(tag: re.Match[str]) -> str:
    before, closes, after = tag.groups()
    return f"{{%{before} {'endif' if closes else 'if true'} {after}%}}"


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> None:
    raise TemplateError(message)
