"""Reasoning and tool calls in a model's answers, by the family of its chat template.

`AnswerReader` splits an answer, whole or as it arrives, into reasoning, content and calls. A call that is malformed
stays in the content. To add a family, add an `AnswerFormat` to `FORMATS`. The first format whose `mark` is in the chat
template is used.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["reasoning", "content"]


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool. `arguments` is JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class AnswerFormat:
    """Form of the answers of a family of chat templates."""

    name: str
    mark: str | None
    """Text of the family's templates. None: any template."""
    opening: str | None
    """Text at which calls begin. None: there are none."""
    read_calls: Callable[[str], list[ToolCall] | None]
    """Parses the text from `opening` on. Returns None if it is malformed."""
    anywhere: bool = True
    """True if calls may follow content. Otherwise an answer is content, or calls."""


def _call(value: Any, with_arguments: bool) -> ToolCall | None:
    """Return the call in a parsed JSON object, whose arguments may be called parameters; None if it is no call."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    if with_arguments and not value.keys() & {"arguments", "parameters"}:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        f"{value['name']}{text}".encode()  # or a half of a surrogate pair could not be sent
    except (ValueError, RecursionError):
        return None
    return ToolCall(value["name"], text) if isinstance(arguments, dict) else None


def _calls(texts: list[str], with_arguments: bool = False) -> list[ToolCall] | None:
    """Return the calls in JSON texts; None if one is malformed."""
    calls = []
    for text in texts:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        calls += [_call(one, with_arguments) for one in (value if isinstance(value, list) else [value])]
    known = [call for call in calls if call is not None]
    return known if known and len(known) == len(calls) else None


def _qwen(text: str) -> list[ToolCall] | None:
    parts = re.split(r"\s*<tool_call>\s*", text.strip())
    if parts[0] or not all(part.endswith("</tool_call>") for part in parts[1:]):
        return None
    return _calls([part.removesuffix("</tool_call>") for part in parts[1:]])


def _mistral(text: str) -> list[ToolCall] | None:
    parts = text.strip().split("[TOOL_CALLS]")[1:]
    if all("[ARGS]" in part for part in parts):
        named = [part.partition("[ARGS]") for part in parts]
        texts = [f'{{"name": {json.dumps(name.strip())}, "arguments": {arguments}}}' for name, _, arguments in named]
        return _calls(texts)
    return _calls(parts)


def _llama(text: str) -> list[ToolCall] | None:
    decoder, calls, at = json.JSONDecoder(), [], 0
    text = text.strip().removeprefix("<|python_tag|>").strip()
    while at < len(text):
        try:
            _, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        calls.append(text[at:end])
        at = end + len(text[end:]) - len(text[end:].lstrip(" ;\n"))
    return _calls(calls, with_arguments=True)


_DEEPSEEK_CALL = re.compile(
    r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n(?P<old>.*?)\n```"
    r"|(?P<short>[^<\n]+)<｜tool▁sep｜>(?P<new>.*?))<｜tool▁call▁end｜>\s*",
    re.DOTALL,
)


def _deepseek(text: str) -> list[ToolCall] | None:
    inner = text.strip().removeprefix("<｜tool▁calls▁begin｜>").removesuffix("<｜tool▁calls▁end｜>")
    found = list(_DEEPSEEK_CALL.finditer(inner))
    if "".join(match[0] for match in found) != inner:
        return None
    named = [(match["name"] or match["short"], match["old"] or match["new"]) for match in found]
    return _calls([f'{{"name": {json.dumps(name.strip())}, "arguments": {arguments}}}' for name, arguments in named])


PLAIN = AnswerFormat("plain", None, None, lambda text: None)
"""Format without calls."""
FORMATS = (
    AnswerFormat("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", _mistral),
    AnswerFormat("deepseek", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜>", _deepseek),
    AnswerFormat("qwen", "<tool_call>", "<tool_call>", _qwen),
    AnswerFormat("llama3", "<|start_header_id|>", "{", _llama, anywhere=False),
    PLAIN,
)
"""Formats, in the order in which they are tried."""
THINK, THOUGHT = "<think>", "</think>"
PYTHON_TAG = "<|python_tag|>"


def format_of(template: str) -> AnswerFormat:
    """Return the format of the answers to prompts of a chat template, given its text."""
    return next(one for one in FORMATS if one.mark is None or one.mark in template)


class AnswerReader:
    """Splits an answer.

    Args:
        form: Format of the answer.
        reasons: True if the prompt ends where reasoning has begun.
        calls: True if the prompt has tools. Otherwise calls are content.
    """

    def __init__(self, form: AnswerFormat, reasons: bool = False, calls: bool = True):
        self._form = form
        self._opening = form.opening if calls else None
        self._at: Literal["start", "reasoning", "content", "calls"] = "reasoning" if reasons else "start"
        self._text = ""
        """Text that has not been returned yet."""
        self._trims = reasons
        """True while white space before the next text is dropped."""
        self._said = False

    def push(self, text: str) -> list[tuple[Kind, str]]:
        """Return the parts of reasoning and content that this text adds for certain."""
        self._text += text
        return list(self._parts())

    def end(self) -> tuple[list[tuple[Kind, str]], list[ToolCall]]:
        """Return the last parts, and the calls."""
        parts = list(self._parts())
        calls = self._form.read_calls(self._text) if self._at == "calls" else None
        if calls is None and self._text:
            text = self._text.lstrip() if self._trims else self._text
            if text:
                parts.append(("reasoning", text) if self._at == "reasoning" else ("content", text))
        self._text = ""
        return parts, calls or []

    def _parts(self) -> Iterator[tuple[Kind, str]]:
        if self._at == "start" and not self._begin():
            return
        if self._at == "reasoning":
            before, closed, after = self._text.partition(THOUGHT)
            yield from self._said_of("reasoning", before if closed else None, THOUGHT)
            if not closed:
                return
            self._at, self._text, self._trims, self._said = "content", after, True, False
        if self._at == "content":
            if self._opens_here():
                return
            marker = self._opening if self._form.anywhere else None
            before, opened, after = (self._text, "", "") if marker is None else self._text.partition(marker)
            yield from self._said_of("content", before if opened else None, marker)
            if opened:
                space = before[len(before.rstrip()) :]  # part of the content, if the calls are malformed
                self._at, self._text = "calls", f"{space}{opened}{after}"

    def _begin(self) -> bool:
        """Decide whether an answer begins with reasoning. Returns False if that is not known yet."""
        text = self._text.lstrip()
        if text.startswith(THINK):
            self._at, self._text, self._trims = "reasoning", text.removeprefix(THINK), True
        elif text and not THINK.startswith(text):
            self._at = "content"
        return self._at != "start"

    def _opens_here(self) -> bool:
        """Return True if an answer in a format without content beside calls may consist of calls."""
        if self._opening is None or self._form.anywhere or self._said:
            return False
        text = self._text.lstrip()
        if text.startswith((self._opening, PYTHON_TAG)):
            self._at = "calls"
        return not text or self._at == "calls" or PYTHON_TAG.startswith(text)

    def _said_of(self, kind: Kind, whole: str | None, marker: str | None) -> Iterator[tuple[Kind, str]]:
        """Yield text of a kind. `whole` is all of it up to `marker`; None: more may come, or the marker's rest."""
        text = self._text.lstrip() if self._trims else self._text
        if whole is not None:
            text = (whole.lstrip() if self._trims else whole).rstrip()
            held = ""
        elif marker is None:
            held = ""
        else:
            begun = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
            kept = text[: len(text) - begun].rstrip()
            text, held = kept, text[len(kept) :]
        if text:
            self._trims, self._said = False, True
            yield kind, text
        self._text = held
