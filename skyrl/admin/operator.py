"""A server as its operator asks it: where it is, with which key, and what its refusals mean."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import httpx

from skyrl.errors import RequestError
from skyrl.tinker.config import ENVIRONMENT_PREFIXES, options_parser, read_config, url_of
from skyrl.utils.arguments import ArgumentParser

PATIENCE_S = 30.0
"""Seconds that an answer may take."""
READ = ("host", "port", "operator_keys", "operator_keys_file")
"""Options of a server that say where it is and who may ask it."""


class Unreachable(RequestError):
    """Nothing answers, or no server of ours."""


class Operator:
    """Asks a server.

    Args:
        url: Its base URL.
        key: An operator's key; None on a server without keys.
    """

    def __init__(self, url: str, key: str | None):
        self.url = url.rstrip("/")
        headers = {"X-API-Key": key} if key else {}
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE_S)

    def get(self, path: str, **asked: Any) -> dict[str, Any]:
        """JSON of a route. Raises `Unreachable`, and `RequestError` for a refusal."""
        return self._ask("GET", path, {name: value for name, value in asked.items() if value is not None})

    def post(self, path: str) -> dict[str, Any]:
        """JSON that an order is answered with. Raises as `get`."""
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
    """Detail of a refusal, in the server's words."""
    try:
        return answer.json()["detail"] if answer.status_code != 404 or "known" in answer.text else None
    except (ValueError, KeyError, TypeError):
        return None


def operator_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser of what all commands of operators take, for `connect`; each adds options of its own."""
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
    """The server that the options of `operator_parser` name, and the environment."""
    names = [prefix + name.upper() for prefix in ENVIRONMENT_PREFIXES for name in READ]
    environ = {name: os.environ[name] for name in names if name in os.environ}
    argv = ["--insecure"]  # which a host that others reach takes, where no keys of clients are read
    if given.operator_keys_file is not None:
        argv += ["--operator-keys-file", given.operator_keys_file]
    config, _ = read_config(options_parser(parser.prog, ""), argv, environ)
    url = given.base_url or url_of(config.host, config.port)
    if not url.startswith(("http://", "https://")):
        parser.error(f"--base-url={url}: a URL begins with http:// or https://")
    return Operator(url, next(iter(config.operator_keys), None))


def told(prog: str, run: Callable[[], None]) -> int:
    """Run what a command does. A refusal is told in a line. Returns the exit status."""
    try:
        run()
        sys.stdout.flush()
    except RequestError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # who reads has read enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def print_json(value: Any) -> None:
    """For programs."""
    print(json.dumps(value, indent=1))
