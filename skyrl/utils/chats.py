"""Parser of chats, in rows of data sets and in requests.

`read_chat` accepts the formats in which chats are published, and returns the format that chat templates read. There,
`content` is text, or None if there are `tool_calls`. The arguments of a call are an object. Reasoning is in
`reasoning_content`. Messages may be in ShareGPT format (`from` and `value`). `read_tools` does the same for tools. Both
raise ConfigError with a message that begins with the place in the row (`messages[1].content=...`). Callers prepend file
and row.

To accept another format, add it here, and add a row to the table of tests/train/test_chat_rows.py.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl.errors import ConfigError
from skyrl.utils.spelling import did_you_mean

Message = dict[str, Any]
"""A message of an OpenAI chat: `role`, `content`, and other fields that the chat template reads."""
Row = dict[str, Any]


class Struct(Row):
    """An object from an Arrow struct. Arrow gives every row all members; those that a row lacks are null.

    A null may therefore come from the row or from Arrow. Chats are read without nulls; environments get them unchanged.
    """


ROLES = ("system", "developer", "user", "assistant", "tool")
ELSEWHERE = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "function": "tool"}
"""Corresponding role, by the role name of another format."""
CALLS = "function_call"
SPEAKERS = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    CALLS: "assistant", "observation": "tool",
}  # fmt: skip
"""Role, by speaker name in ShareGPT format.

The value of a `function_call` is JSON text: `{"name": ..., "arguments": {...}}`, or a list of such objects.
"""
REASONING = "reasoning_content"
REASONING_NAMES = (REASONING, "reasoning", "thinking")
"""Names that published data use for the field with a model's reasoning."""
PYTHON_CHAT = re.compile(r"\s*\[\s*\{\s*'(role|content)'\s*:")
"""Start of a list of messages as Python prints it, and as pandas writes it to CSV files."""
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content parts that contain text."""


def read_chat(value: Any, column: str) -> list[Message]:
    """Return the messages of a chat, given as a list or as JSON text. Raises ConfigError for other values.

    Args:
        value: Value of the column.
        column: Name of the column, for error messages.
    """
    value = parsed(value, column) if isinstance(value, str) and value.lstrip().startswith("[") else value
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError(
            f'{column}={short(value)}: give a list of messages, such as [{{"role": "user", "content": "..."}}]'
        )
    return [_message(message, f"{column}[{number}]") for number, message in enumerate(value)]


def chat_or_text(value: Any, column: str) -> Any:
    """Return the list if `value` is JSON text of a list of messages, as CSV files have it. Otherwise return `value`.

    Text is a chat if each object of the list has a known `role`, and `content` or `tool_calls`. Raises ConfigError for
    a list of messages in Python's notation.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    if PYTHON_CHAT.match(value):
        return parsed(value, column)
    try:
        chat = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return chat if chat and all(map(_is_message, chat)) else value


def _is_message(value: Any) -> bool:
    role = value.get("role") if isinstance(value, dict) else None
    return isinstance(role, str) and role in (*ROLES, *ELSEWHERE) and ("content" in value or "tool_calls" in value)


def read_tools(value: Any, column: str) -> list[dict[str, Any]] | None:
    """Return the tools of a chat as JSON schemas. `value` is a list or JSON text. None: there are no tools.

    Raises ConfigError for other values.
    """
    value = parsed(value, column) if isinstance(value, str) and value.strip() else value
    if value is None or value == "" or value == []:
        return None
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{column}={short(value)}: give a list of tools, each a JSON schema")
    tools = []
    for number, tool in enumerate(value):
        at = f"{column}[{number}]"
        tool = parsed(tool, at) if isinstance(tool, str) else tool
        if not isinstance(tool, Mapping) or not tool:
            raise ConfigError(f"{at}={short(tool)}: give a JSON schema of the tool, as an object or as JSON text")
        tools.append(without_padding(tool, at))
    return tools


def without_padding(value: Any, at: str) -> Any:
    """Return a value without the nulls that Arrow adds to structs.

    Raises ConfigError for text that is invalid Unicode.
    """
    if isinstance(value, str):
        return checked_text(value, at)
    if isinstance(value, Mapping):
        padded = isinstance(value, Struct)
        return {
            key: without_padding(member, f"{at}.{key}")
            for key, member in value.items()
            if not (padded and member is None)
        }
    if isinstance(value, list | tuple):
        return [without_padding(member, f"{at}[{number}]") for number, member in enumerate(value)]
    return value


def checked_text(value: str, at: str) -> str:
    """Return the text. Raises ConfigError if it contains an unpaired surrogate, which no tokenizer can encode."""
    try:
        if not value.isascii():
            value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{at}={short(value)}: character {error.start} is half of a surrogate pair; correct the text"
        ) from None
    return value


def short(value: object) -> str:
    """Return the value as text of at most 80 characters, for error messages."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _message(given: Any, at: str) -> Message:
    if not isinstance(given, Mapping) or (given.get("role") is None and given.get("from") is None):
        raise ConfigError(f'{at}={short(given)}: has no role; give {{"role": "user", "content": "..."}}')
    message = {key: without_padding(value, f"{at}.{key}") for key, value in given.items() if value is not None}
    shared = "role" not in message
    if shared:
        message = _from_shared(message, at)
    role = message["role"]
    if role not in ROLES:
        meant = f"; did you mean {ELSEWHERE[role]}?" if isinstance(role, str) and role in ELSEWHERE else None
        near = did_you_mean(str(role), ROLES) if meant is None else meant
        raise ConfigError(f"{at}.role={short(role)}: known: {', '.join(ROLES)}{near}")
    if "function_call" in message:
        raise ConfigError(f"{at}.function_call: templates do not read it; write the call as one of tool_calls")
    if message.get("weight", 1) not in (0, 1) or ("weight" in message and role != "assistant"):
        raise ConfigError(f"{at}.weight={short(message['weight'])}: give 0 or 1, in the assistant's messages only")
    calls = message.pop("tool_calls", None)
    if calls is not None and calls != []:
        message["tool_calls"] = _calls(calls, role, f"{at}.tool_calls")
    message["content"] = _content(
        message.get("content"), "tool_calls" in message, f"{at}.{'value' if shared else 'content'}"
    )
    return _with_reasoning(message, at)


def _from_shared(given: Message, at: str) -> Message:
    """Return a message in ShareGPT format with `role` and `content`. Raises ConfigError for an unknown speaker."""
    message = {key: value for key, value in given.items() if key not in ("from", "value")}
    speaker, said = str(given["from"]), given.get("value")
    if speaker not in SPEAKERS:
        near = did_you_mean(speaker, SPEAKERS)
        raise ConfigError(f"{at}.from={short(given['from'])}: known: {', '.join(SPEAKERS)}{near}")
    if speaker != CALLS:
        return {**message, "role": SPEAKERS[speaker], "content": said}
    calls = parsed(said, f"{at}.value") if isinstance(said, str) else said
    return {**message, "role": SPEAKERS[speaker], "tool_calls": calls if isinstance(calls, list) else [calls]}


def _content(value: Any, calls: bool, at: str) -> str | None:
    """Return the text of a message's content, which is text or a list of text parts.

    Returns None if the content is missing, which is allowed only in a message with tool calls (`calls`).
    """
    if isinstance(value, str):
        return value
    if value is None:
        if calls:
            return None
        raise ConfigError(f"{at} is missing or null; give text (only a message with tool_calls may have none)")
    if not isinstance(value, list):
        raise ConfigError(f"{at}={short(value)}: give text, or a list of parts of type text; write data as JSON text")
    return "".join(_part(part, f"{at}[{number}]") for number, part in enumerate(value))


def _part(part: Any, at: str) -> str:
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
        raise ConfigError(f'{at}={short(part)}: only parts of text are supported: {{"type": "text", "text": "..."}}')
    return part["text"]


def _with_reasoning(message: Message, at: str) -> Message:
    """Return the message with its reasoning in the field `REASONING`. It may be given in any of `REASONING_NAMES`."""
    role = message["role"]
    found = {name: message.pop(name) for name in REASONING_NAMES if name in message}
    for name, value in found.items():
        if isinstance(value, list):
            found[name] = value = _content(value, False, f"{at}.{name}")
        if not isinstance(value, str):
            raise ConfigError(f"{at}.{name}={short(value)}: give text")
        if value and role != "assistant":
            raise ConfigError(f"{at}.{name}: only the assistant's messages have reasoning; this is the {role}'s")
    texts = {value for value in found.values() if value}
    if len(texts) > 1:
        raise ConfigError(f"{at} has different texts in {' and '.join(found)}; keep one of them")
    return {**message, REASONING: texts.pop()} if texts else message


def _calls(value: Any, role: str, at: str) -> list[dict[str, Any]]:
    value = parsed(value, at) if isinstance(value, str) else value
    if not isinstance(value, list):
        raise ConfigError(f"{at}={short(value)}: give a list of calls")
    if role != "assistant":
        raise ConfigError(f"{at}: only the assistant's messages call tools; this is the {role}'s")
    return [_call(call, f"{at}[{number}]") for number, call in enumerate(value)]


def _call(call: Any, at: str) -> dict[str, Any]:
    """Return the call, with its arguments as an object."""
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise ConfigError(
            f'{at}={short(call)}: give {{"type": "function", "function": {{"name": "...", "arguments": {{...}}}}}}'
        )
    place = f"{at}.function.arguments" if inner is not call else f"{at}.arguments"
    arguments = inner.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        arguments = parsed(arguments, place)
    arguments = {} if arguments is None or arguments == "" else arguments
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"{place}={short(arguments)}: give an object, or JSON text of one")
    inner = {**inner, "arguments": arguments}
    return {**call, "function": inner} if "function" in call else inner


def parsed(text: str, at: str) -> Any:
    """Return the parsed JSON text. Raises ConfigError for invalid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{at}={short(text)}: this text is not JSON ({error}); correct it") from None


def columns_of(row: Mapping[str, Any] | Sequence[str]) -> str:
    """Return the names of a row's columns, for error messages."""
    return ", ".join(sorted(map(str, row))) or "none"
