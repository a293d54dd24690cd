"""`skyrl keys list`: the names in a key file, without its keys. It needs no server."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from skyrl.admin.operator import print_json
from skyrl.admin.words import plural
from skyrl.tinker.config import ENVIRONMENT_PREFIXES
from skyrl.tinker.identity.key_file import MAX_NAME, parse_keys, read_key_file
from skyrl.utils.arguments import ArgumentParser
from skyrl.utils.console import say, say_error
from skyrl.utils.subcommands import run_subcommand

VARIABLES = [f"{prefix}API_KEYS_FILE" for prefix in ENVIRONMENT_PREFIXES]


def main(argv: Sequence[str]) -> int:
    """Run a command about keys. Returns the exit status."""
    return run_subcommand(
        argv, {"list": _list}, prog="skyrl keys", description="Look at the keys of a server.", kind="action"
    )


def _list(argv: Sequence[str]) -> int:
    """the names and ids in a file of API keys, and what is wrong with its lines"""
    parser = ArgumentParser(
        prog="skyrl keys list",
        description="List the names in a file of API keys, and the ids that status, usage and logs show for tenants "
        "without a name. Reports each line that the server would reject. Prints no keys.",
        allow_abbrev=False,
    )
    default = next((os.environ[name] for name in VARIABLES if os.environ.get(name)), None)
    parser.add_argument(
        "file", nargs="?", type=Path, default=default, metavar="FILE", help="key file (default: SKYRL_API_KEYS_FILE)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    given = parser.parse_args(argv)
    if given.file is None:
        parser.error("no key file; name one, or set SKYRL_API_KEYS_FILE")
    return _show(parser, given)


def _show(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    try:
        keys, problems = parse_keys(read_key_file("file", given.file))
    except ValueError as error:
        say_error(f"{parser.prog}: error: {error}")
        return 1
    if given.json:
        print_json([{"line": key.number, "name": key.name or None, "tenant_id": key.tenant} for key in keys])
    else:
        width = min(MAX_NAME, max([4, *(len(key.name) for key in keys)]))
        say(f"{'LINE':<6}{'NAME':<{width + 2}}TENANT ID")
        for key in keys:
            say(f"{key.number:<6}{key.name or '-':<{width + 2}}{key.tenant}")
        say(plural(len(keys), "key"))
    for problem in problems:
        say_error(f"{parser.prog}: error: file={given.file}: {problem}")
    return 1 if problems else 0
