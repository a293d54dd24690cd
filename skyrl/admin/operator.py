"""HTTP client of operator commands: address, key and error messages."""

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

import httpx

from skyrl.errors import RequestError
from skyrl.tinker.config import ENVIRONMENT_PREFIXES, options_parser, read_config, url_of
from skyrl.utils.arguments import ArgumentParser
from skyrl.utils.console import say, say_error
from skyrl.utils.subcommands import output_may_be_cut

PATIENCE_S = 30.0
"""Timeout of a request, in seconds."""
READ = ("host", "port", "operator_keys", "operator_keys_file")
"""Server options for the address and for operator keys."""


class Unreachable(RequestError):
    """The server is unreachable, or is not a SkyRL server."""


class Operator:
    """Client of a server.

    Args:
        url: Base URL of the server.
        key: Operator key; None for a server without keys.
    """

    def __init__(self, url: str, key: str | None):
        self.url = url.rstrip("/")
        headers = {"X-API-Key": key} if key else {}
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE_S)

    def get(self, path: str, **asked: Any) -> dict[str, Any]:
        """Return the JSON response of a GET. Raises `Unreachable`, and `RequestError` if the server rejects the
        request."""
        return self._ask("GET", path, {name: value for name, value in asked.items() if value is not None})

    def post(self, path: str) -> dict[str, Any]:
        """Return the JSON response of a POST. Raises the errors of `get`."""
        return self._ask("POST", path, {})

    def _ask(self, method: str, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = self._http.request(method, path, params=asked)
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise Unreachable(f"nothing answers at {self.url}: {why}; start it, or correct --base-url") from error
        if answer.status_code == 200:
            return answer.json()
        if answer.status_code in (401, 403):
            raise RequestError(
                f"{self.url} refuses this key: name the file with the server's --operator-keys-file, or set "
                "SKYRL_OPERATOR_KEYS"
            )
        raise RequestError(
            _detail(answer) or f"{self.url}{path} answers {answer.status_code}: not this version's server"
        )


def _detail(answer: httpx.Response) -> str | None:
    """Return the server's explanation of an error."""
    try:
        return answer.json()["detail"] if answer.status_code != 404 or "known" in answer.text else None
    except (ValueError, KeyError, TypeError):
        return None


def operator_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """Create a parser with the common options of operator commands, for `connect`. Commands add their own options."""
    parser = ArgumentParser(
        prog=prog,
        description=description,
        epilog="SKYRL_HOST, SKYRL_PORT, SKYRL_OPERATOR_KEYS and SKYRL_OPERATOR_KEYS_FILE are read as the server reads "
        "them, so on its machine and with its environment there is nothing to name.",
        allow_abbrev=False,
    )
    parser.add_argument("--base-url", metavar="URL", help="the server (default: http://127.0.0.1:8000)")
    parser.add_argument(
        "--operator-keys-file", metavar="FILE", help="file whose first key is sent; needed where the server has keys"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    return parser


def connect(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Operator:
    """Return a client of the server that the options of `operator_parser` and the environment select."""
    names = [prefix + name.upper() for prefix in ENVIRONMENT_PREFIXES for name in READ]
    environ = {name: os.environ[name] for name in names if name in os.environ}
    argv = ["--insecure"]  # accepts a public host, although client keys are not read
    if given.operator_keys_file is not None:
        argv += ["--operator-keys-file", given.operator_keys_file]
    config, _ = read_config(options_parser(parser.prog, ""), argv, environ)
    url = given.base_url or url_of(config.host, config.port)
    if not url.startswith(("http://", "https://")):
        parser.error(f"--base-url={url}: a URL begins with http:// or https://")
    return Operator(url, next(iter(config.operator_keys), None))


def told(prog: str, run: Callable[[], None]) -> int:
    """Run a command. Prints a RequestError as one line. Returns the exit status."""
    try:
        with output_may_be_cut():
            run()
    except RequestError as error:
        say_error(f"{prog}: error: {error}")
        return 1
    return 0


def print_json(value: Any) -> None:
    """Print a value as JSON, for programs."""
    say(json.dumps(value, indent=1))
