"""`skyrl doctor`: selection of checks, and output of findings."""

import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

import httpx

from skyrl.admin.doctor import machine, model, server, state
from skyrl.admin.doctor.finding import CheckFinding, examine, name_of
from skyrl.tinker.config import EngineConfig, options_parser, read_config, url_of
from skyrl.utils.console import say

WIDTH = 80
NAMES = [name_of(check) for room in (machine, model, state, server) for check in room.CHECKS]


def main(argv: Sequence[str]) -> int:
    """Run the checks and print the findings. Returns the exit status: 1 if there is a problem."""
    parser = options_parser(
        prog="skyrl doctor",
        description="Check an installation and the state of a server with these options, and that server if it runs; "
        "with --base-url only a server that runs, anywhere. Nothing is changed. Takes the options of skyrl serve. "
        "The exit status is 1 if there is a problem.",
    )
    parser.add_argument("--base-url", metavar="URL", help="check this server only")
    parser.add_argument("--json", action="store_true", help="print a JSON list of check, level, seen and remedy")
    parser.add_argument(
        "--skip", action="append", choices=NAMES, default=[], metavar="CHECK", help="leave a check out; may be repeated"
    )
    config, given = read_config(parser, argv)
    if given.get("base_url"):
        found = check_server(given["base_url"], given["skip"])
    else:
        found = check_installation(config, given["skip"])
    if given["json"]:
        say(json.dumps([{"check": one.check, **vars(one.finding)} for one in found], indent=1))
    else:
        say("\n".join(report(found)))
    return int(any(one.finding.level == "problem" for one in found))


def check_installation(config: EngineConfig, skipped: Sequence[str] = ()) -> list[CheckFinding]:
    """Check this machine, the model and state that the options name, and the server if it is running."""
    subject = state.State(config)
    found = examine(machine.CHECKS, config, skipped) + examine(model.CHECKS, config, skipped)
    found += examine(state.CHECKS, subject, skipped)
    if subject.holder is not None and config.port != 0:
        found += check_server(url_of(config.host, config.port), skipped)
    return found


def check_server(url: str, skipped: Sequence[str] = ()) -> list[CheckFinding]:
    """Check a running server."""
    with httpx.Client(base_url=url) as http:
        return examine(server.CHECKS, server.Server(url.rstrip("/"), http), skipped)


def report(found: Sequence[CheckFinding]) -> Iterator[str]:
    """Yield the lines of a report for a terminal."""
    column = max(len(one.check) for one in found) + 2
    for one in found:
        finding = one.finding
        head = f"{finding.level:<9}{one.check:<{column}}"
        yield from _wrapped(head, finding.seen)
        if finding.remedy:
            yield from _wrapped(f"{'':<9}{'':<{column - 3}}-> ", finding.remedy)
    levels = Counter(one.finding.level for one in found)
    problems, warnings = levels["problem"], levels["warning"]
    yield ""
    yield f"{problems} problem{'s' * (problems != 1)}, {warnings} warning{'s' * (warnings != 1)}, {levels['ok']} ok"


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
        break_long_words=True,
    )
