"""`skyrl status`: show the activity of a server, updated every few seconds."""

import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import Any

from skyrl.admin.operator import Operator, Unreachable, connect, operator_parser, print_json, told
from skyrl.admin.words import GIB, cut, duration, number, plural, size
from skyrl.utils.console import say

KINDS = ("trained", "scored", "prompt", "sampled")
"""Kinds of tokens: training passes, scoring passes, prompts, and sampled tokens."""
NARROWEST = 40
TENANTS = 8
"""Maximum number of tenants shown, those with the most requests first."""

Look = dict[str, Any]
"""Snapshot of a server: the response of `GET /status`."""


def rates(now: Look, before: Look | None) -> Look | None:
    """Return rates per second between two snapshots: requests, tokens by kind, and tokens by tenant.

    None if there is only one snapshot, or if the server was restarted between them.
    """
    if before is None or now["uptime_s"] < before["uptime_s"] or now["time"] <= before["time"]:
        return None
    seconds = now["time"] - before["time"]
    earlier = {one["tenant"]: one for one in before["tenants"]}
    of_tenants = {
        one["tenant"]: {
            kind: (one.get(kind, 0) - earlier.get(one["tenant"], {}).get(kind, 0)) / seconds for kind in KINDS
        }
        for one in now["tenants"]
    }
    ended = sum(now["requests"]["ended"].values()) - sum(before["requests"]["ended"].values())
    return {
        "requests": ended / seconds,
        "tokens": {kind: sum(rate[kind] for rate in of_tenants.values()) for kind in KINDS},
        "tenants": of_tenants,
    }


def screen(now: Look, before: Look | None, url: str, width: int, height: int | None = None) -> list[str]:
    """Return up to `height` lines (None: all) of up to `width` columns. Smaller widths count as `NARROWEST`."""
    width = max(width, NARROWEST)
    rate = rates(now, before)
    lines = [*_head(now, rate, url, width), "", *_tenants(now, rate), "", *_models(now, width)]
    if height is not None and len(lines) > height:
        lines = [*lines[: height - 1], f"... {len(lines) - height + 1} more lines"]
    return [cut(line.rstrip(), width) for line in lines]


def _head(now: Look, rate: Look | None, url: str, width: int) -> Iterator[str]:
    engine, requests, memory, disk = now["engine"], now["requests"], now["memory"], now["disk"]
    clock = time.strftime("%H:%M:%S", time.localtime(now["time"]))
    title = cut(f"SkyRL {now['version']} at {url}, up {duration(now['uptime_s'])}", width - len(clock) - 2)
    yield f"{title:<{width - len(clock)}}{clock}"
    state = engine["progress"] if engine["state"] != "ready" or engine["progress"] != "ready" else "ready"
    facts = [engine["base_model"], f"pid {engine['pid']}" if engine["pid"] else None]
    facts.append(plural(engine["restarts"], "restart") if engine["restarts"] else None)
    yield f"engine    {'; '.join([state, *(fact for fact in facts if fact)])}"
    oldest = f", the oldest for {duration(requests['oldest_s'])}" if requests["oldest_s"] is not None else ""
    yield (
        f"requests  {number(requests['running'])} run, {number(requests['waiting'])} wait{oldest}; "
        f"{_rate(rate['requests'] if rate else None)}/s end, {number(requests['failed'])} failed"
    )
    yield "tokens/s  " + ", ".join(f"{kind} {_rate(rate['tokens'][kind] if rate else None)}" for kind in KINDS)
    parts = [f"server {size(memory['api'])}, engine {size(memory['engine'])}"]
    parts.append(f"{memory['available'] / GIB:.1f} of {memory['machine'] / GIB:.1f} GiB free")
    if memory.get("cache_pages"):
        parts.append(f"KV cache {100 * memory['cache_pages_used'] / memory['cache_pages']:.0f}%")
    yield "memory    " + "; ".join(parts)
    for call in now.get("slow_calls", ()):  # missing in older servers
        yield f"waits for {call}"
    stored = ", ".join(f"{kind}s {size(count)}" for kind, count in disk["stored"].items())
    yield f"disk      {stored or 'not looked at yet'}; {size(disk['free'])} free"


def _tenants(now: Look, rate: Look | None) -> Iterator[str]:
    columns = "".join(f"{f'{kind.upper()}/S':>12}" for kind in KINDS)
    yield f"{'TENANT':<20}{'RUN':>5}{'WAIT':>7}{columns}"
    tenants = sorted(now["tenants"], key=lambda one: -one.get("running", 0) - one.get("waiting", 0))
    for one in tenants[:TENANTS]:
        of_it = rate["tenants"][one["tenant"]] if rate else {}
        shown = "".join(f"{_rate(of_it.get(kind)):>12}" for kind in KINDS)
        yield f"{cut(one['tenant'], 20):<20}{number(one.get('running', 0)):>5}{number(one.get('waiting', 0)):>7}{shown}"
    if len(tenants) > TENANTS:
        yield f"... and {len(tenants) - TENANTS} more"
    if not tenants:
        yield "nobody has asked for anything yet"


def _models(now: Look, width: int) -> Iterator[str]:
    yield f"{'MODEL':<17}{'TENANT':<13}{'RUN':>4}{'WAIT':>6}{'OLDEST':>8}  DOES, OR WAITS FOR"
    for one in now["models"]:
        running = sum(one["running"].values())
        oldest = duration(one["oldest_s"]) if one["oldest_s"] is not None else ""
        head = f"{cut(short(one['model_id']), 16):<17}{cut(one['tenant'], 12):<13}"
        yield f"{head}{number(running):>4}{number(one['waiting']):>6}{oldest:>8}  {_doing(one)}"
    if now["models_left_out"]:
        yield f"... and {now['models_left_out']} more"
    if not now["models"]:
        yield "none is in the engine"


def short(model_id: str) -> str:
    """Return a model's id with a shortened session id."""
    session, _, rest = model_id.partition(":")
    return f"{session[:8]}:{rest}" if model_id else "(base model)"


def _doing(model: Look) -> str:
    if model["running"]:
        return ", ".join(kind if count == 1 else plural(count, kind) for kind, count in model["running"].items())
    if model["waits_for"]:
        return f"waits for {model['waits_for']}"
    return f"idle, {model['state']}"


def _rate(value: float | None) -> str:
    return "?" if value is None else number(value)


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
