"""`skyrl status`: show the activity of a server, updated every few seconds."""

import shutil
import sys
import textwrap
import time
from collections.abc import Sequence

from skyrl.admin.operator import Operator, Unreachable, connect, operator_parser, print_json, told
from skyrl.admin.screen import Look, rates, screen
from skyrl.utils.console import say

BETWEEN_S = 1.0
"""Seconds between the two snapshots of a single report."""
OTHER_SCREEN, BACK = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Terminal sequences: switch to the alternate screen and hide the cursor; switch back."""
HOME, TO_THE_END_OF_LINE, AND_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def main(argv: Sequence[str]) -> int:
    """Show the status of a server. Returns the exit status."""
    parser = operator_parser(
        "skyrl status",
        "Show what a server is doing: who trains and samples what, what waits and why, rates, memory, disk. Drawn "
        "again every few seconds until Ctrl-C; once where the output is no terminal.",
    )
    parser.add_argument("--once", action="store_true", help="report once: of two looks, a second apart")
    parser.add_argument("--every", type=float, default=3.0, metavar="S", help="seconds between two looks (3)")
    given = parser.parse_args(argv)
    if given.every <= 0:
        parser.error(f"--every={given.every:g}: must be above 0 seconds")
    server = connect(parser, given)
    if given.json:
        return told(parser.prog, lambda: _as_json(server))
    if given.once or not sys.stdout.isatty():
        return told(parser.prog, lambda: say("\n".join(screen(*_two_looks(server), server.url, _columns()))))
    return told(parser.prog, lambda: _live(server, given.every))


def _two_looks(server: Operator) -> tuple[Look, Look]:
    """Return two snapshots: (second, first)."""
    before = server.get("/status")
    time.sleep(BETWEEN_S)
    return server.get("/status"), before


def _as_json(server: Operator) -> None:
    now, before = _two_looks(server)
    print_json({**now, "rates": rates(now, before)})


def _live(server: Operator, every_s: float) -> None:
    before = server.get("/status")
    sys.stdout.write(OTHER_SCREEN)
    try:
        _draw(screen(before, None, server.url, *shutil.get_terminal_size()))
        while True:
            time.sleep(min(every_s, BETWEEN_S) if before is None else every_s)
            try:
                now = server.get("/status")
            except Unreachable as error:
                before = None
                _draw([*_wrapped(str(error)), "", f"asked again every {min(every_s, BETWEEN_S):g} s; Ctrl-C ends this"])
                continue
            _draw(screen(now, before, server.url, *shutil.get_terminal_size()))
            before = now
    except KeyboardInterrupt:
        pass
    finally:
        sys.stdout.write(BACK)
        sys.stdout.flush()


def _draw(lines: Sequence[str]) -> None:
    """Overwrite the previous lines, which avoids flicker."""
    sys.stdout.write(HOME + f"{TO_THE_END_OF_LINE}\n".join(lines) + TO_THE_END_OF_LINE + AND_BELOW)
    sys.stdout.flush()


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _columns())


def _columns() -> int:
    return shutil.get_terminal_size().columns
