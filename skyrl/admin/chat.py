"""`skyrl chat`: a conversation with a model of a running server, on the terminal."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from skyrl.errors import RequestError
from skyrl.utils.arguments import ArgumentParser
from skyrl.utils.console import say, say_error

URL = "http://127.0.0.1:8000"
SILENCE_S = 600.0
"""Seconds without a token after which the server counts as gone."""


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the exit status."""
    parser = ArgumentParser(
        prog="skyrl chat",
        description="Talk with a model of a running server. Each line of input is a message; end with Ctrl-D.",
    )
    parser.add_argument("model", nargs="?", help="tinker://... or a base model (default: the server's)")
    url = os.environ.get("TINKER_BASE_URL", URL)
    parser.add_argument("--base-url", default=url, metavar="URL", help=f"address of the server (default: {url})")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--temperature", type=float, metavar="T", help="temperature (default: 1)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="maximum tokens of an answer")
    options = parser.parse_args(argv)
    key = os.environ.get("TINKER_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    asked = {"temperature": options.temperature, "max_tokens": options.max_tokens}
    request = {name: value for name, value in asked.items() if value is not None}
    try:
        with httpx.Client(base_url=f"{options.base_url.rstrip('/')}/v1", headers=headers, timeout=SILENCE_S) as server:
            model = options.model or _json(server.get("/models"))["data"][0]["id"]
            _talk(server, {"model": model, **request}, options.system)
    except httpx.HTTPError as error:
        say_error(f"skyrl chat: nothing answers at {options.base_url}: {error}; start a server, or correct --base-url")
        return 1
    except RequestError as error:
        say_error(f"skyrl chat: {error}")
        return 1
    return 0


def _talk(server: httpx.Client, request: dict[str, Any], system: str | None) -> None:
    messages = [{"role": "system", "content": system}] if system else []
    asks = sys.stdin.isatty()
    while line := _read_line("> " if asks else ""):
        messages.append({"role": "user", "content": line})
        said = ""
        for text in _answer(server, request | {"messages": messages}):
            said += text
            say(text, end="", flush=True)
        say("")
        messages.append({"role": "assistant", "content": said})


def _read_line(prompt: str) -> str | None:
    """Return the next line that is not empty; None at the end of the input."""
    try:
        while not (line := input(prompt).strip()):
            pass
    except EOFError:
        return None
    return line


def _answer(server: httpx.Client, request: dict[str, Any]) -> Iterator[str]:
    """Yield the text of an answer as it arrives. Raises `RequestError`."""
    with server.stream("POST", "/chat/completions", json=request | {"stream": True}) as answer:
        if answer.status_code != 200:
            answer.read()
            _json(answer)
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RequestError(event["error"]["message"])
            yield "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def _json(answer: httpx.Response) -> Any:
    """Return the JSON of an answer. Raises `RequestError` for an error."""
    if answer.status_code == 200:
        return answer.json()
    try:
        raise RequestError(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        raise RequestError(f"{answer.url} answers {answer.status_code}: not this version's server") from None
