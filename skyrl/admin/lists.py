"""`skyrl models` and `skyrl requests`: list, unload and cancel."""

import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import quote

from skyrl.admin.operator import connect, operator_parser, print_json, told
from skyrl.admin.words import duration, number, plural, size
from skyrl.utils.console import say
from skyrl.utils.subcommands import run_subcommand

INDENT = "    "
Entry = dict[str, Any]
"""Entry of a list."""


def models(argv: Sequence[str]) -> int:
    """Run a command about models. Returns the exit status."""
    return run_subcommand(
        argv,
        {"list": _list_models, "unload": _unload_model},
        prog="skyrl models",
        description="Look at the models of a server that runs, and unload one.",
        kind="action",
    )


def requests(argv: Sequence[str]) -> int:
    """Run a command about requests. Returns the exit status."""
    return run_subcommand(
        argv,
        {"list": _list_requests, "cancel": _cancel_request},
        prog="skyrl requests",
        description="Look at the requests of a server that runs, and cancel one.",
        kind="action",
    )


def _list_models(argv: Sequence[str]) -> int:
    """models that take requests, in the engine or on disk"""
    parser = operator_parser(
        "skyrl models list", "List models that take requests, those first that were asked for something last."
    )
    parser.add_argument("--tenant", metavar="NAME", help="of this tenant only, by its name or id (key-...)")
    parser.add_argument("--limit", type=int, default=100, metavar="N", help="so many at most (100)")
    given = parser.parse_args(argv)
    server = connect(parser, given)

    def run() -> None:
        found = server.get("/operator/models", tenant=given.tenant, limit=given.limit)
        print_json(found) if given.json else _print(found["models"], _model, found["total"], "model")

    return told(parser.prog, run)


def _list_requests(argv: Sequence[str]) -> int:
    """waiting and running requests, and what they wait for"""
    parser = operator_parser("skyrl requests list", "List requests that wait or run, the oldest first.")
    parser.add_argument("--tenant", metavar="NAME", help="of this tenant only, by its name or id (key-...)")
    parser.add_argument("--model", metavar="ID", help="of this model only")
    parser.add_argument("--kind", metavar="KIND", help="of this kind only: sample, forward_backward, optim_step, ...")
    parser.add_argument("--state", choices=["waiting", "running"], help="only these")
    parser.add_argument("--limit", type=int, default=100, metavar="N", help="so many at most (100)")
    given = parser.parse_args(argv)
    server = connect(parser, given)
    asked = {name: getattr(given, name) for name in ("tenant", "model", "kind", "state", "limit")}

    def run() -> None:
        found = server.get("/operator/requests", **asked)
        print_json(found) if given.json else _print(found["requests"], _request, found["total"], "request")

    return told(parser.prog, run)


def _unload_model(argv: Sequence[str]) -> int:
    """free a model's training state after its pending requests; its checkpoints stay"""
    parser = operator_parser(
        "skyrl models unload",
        "Unload a model, as its client may: what has come for it is done first, its training state is freed, and later "
        "requests are refused. Checkpoints and samplers stay.",
    )
    parser.add_argument("id", metavar="ID", help="the model's whole id, as skyrl models list has it")
    given = parser.parse_args(argv)
    server = connect(parser, given)

    def run() -> None:
        found = server.post(f"/operator/models/{quote(given.id, safe='')}/unload")
        words = {
            "done": f"{given.id} is unloaded",
            "pending": f"{given.id} takes no more requests, and is unloaded once those before have ended",
            "failed": f"{given.id} is not unloaded: {found['error']}",
        }
        print_json(found) if given.json else _say(words[found["state"]])

    return told(parser.prog, run)


def _cancel_request(argv: Sequence[str]) -> int:
    """make a request fail; later requests of its model continue"""
    parser = operator_parser(
        "skyrl requests cancel",
        "Cancel a training request or a sample: its client gets an error that says so, and later requests of the model "
        "go on. A training request fails in its place in its model's order, also after a restart of the server.",
    )
    parser.add_argument("id", metavar="ID", help="the request's whole id, as skyrl requests list has it")
    given = parser.parse_args(argv)
    server = connect(parser, given)

    def run() -> None:
        found = server.post(f"/operator/requests/{quote(given.id, safe='')}/cancel")
        words = {
            "cancelled": f"{given.id} is cancelled",
            "pending": f"{given.id} fails in its turn, or ends as it would if the engine has gone too far with it",
            "done": f"{given.id} was done before",
            "failed": f"{given.id} has failed by itself: {found['error']}",
        }
        print_json(found) if given.json else _say(words["cancelled" if found["cancelled"] else found["state"]])

    return told(parser.prog, run)


def _print(entries: Sequence[Entry], describe: Callable[[Entry], Iterator[str]], total: int, noun: str) -> None:
    """Print a few lines per entry, and the total number."""
    for entry in entries:
        say("\n".join(describe(entry)))
    rest = "" if len(entries) == total else f"; {number(total - len(entries))} of them are not shown (--limit)"
    say(f"{plural(total, noun)}{rest}")


def _request(one: Entry) -> Iterator[str]:
    yield f"{one['request_id']:<58} {one['state']} {duration(one['age_s']):>8}"
    place = "" if one["seq_id"] is None else f", seq_id {one['seq_id']}"
    yield from _indented(f"{one['model_id'] or 'the base model'}{place}, {one['tenant']}")
    if one["waits_for"]:
        yield from _indented(f"waits for {one['waits_for']}")


def _model(one: Entry) -> Iterator[str]:
    yield f"{one['model_id']:<46} {one['state']}"
    snapshot = f", snapshot {size(one['snapshot_bytes'])}" if one["snapshot_bytes"] else ""
    asked = f"made {duration(one['age_s'])} ago, last asked {duration(one['idle_s'])} ago"
    yield from _indented(f"{one['tenant']}, rank {one['rank']}{snapshot}; {asked}")
    running = sum(one["running"].values())
    if running or one["waiting"]:
        why = f", the first for {one['waits_for']}" if one["waits_for"] else ""
        yield from _indented(f"{plural(running, 'request')} run, {one['waiting']} wait{why}")


def _say(text: str) -> None:
    say("\n".join(_wrapped(text, "")))


def _indented(text: str) -> list[str]:
    return _wrapped(text, INDENT)


def _wrapped(text: str, indent: str) -> list[str]:
    """Wrap text to the terminal width without splitting ids, so that they can be copied."""
    width = shutil.get_terminal_size().columns
    wrap = textwrap.TextWrapper(
        width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
    return wrap.wrap(text)
