"""Main program of an API process. It listens, starts the server's parts, announces the address, and stops in order.

The process supervises the engine process, and it is the only process that opens the database. It imports neither jax
nor torch, so it starts quickly and responds while the engine loads and computes.
"""

import asyncio
import contextlib
import gc
import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn
import uvloop

from skyrl.errors import RequestError
from skyrl.tinker.config import EngineConfig, is_any, url_of, without_password
from skyrl.tinker.http.app import create_app
from skyrl.tinker.http.connections import Connection
from skyrl.tinker.http.middleware import StartupGate
from skyrl.tinker.processes.engine_process import EngineProcess
from skyrl.tinker.processes.engine_supervisor import EngineSupervisor
from skyrl.tinker.processes.launcher_link import BACKLOG, LauncherLink, fail
from skyrl.tinker.server import TinkerServer
from skyrl.utils.console import say
from skyrl.utils.log import setup_logging
from skyrl.utils.machine import allow_many_files
from skyrl.utils.processes import kill_descendants
from skyrl.utils.stop_signals import CLOSING_S

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""Seconds until an idle connection is closed. The timeout of clients is shorter, so clients close first."""
COLLECTIONS = (10_000, 20, 50)
"""Thresholds of Python's garbage collector. The default thresholds are lower, but waiting requests are many objects
that are not garbage."""
SWITCH_S = 0.0005
"""Switch interval of the interpreter in seconds: the maximum time that the event loop waits for a decoding thread. With
Python's default of 5 ms, each answer would wait that long several times."""
SHOWN_KEYS = 8
"""Maximum number of keys whose names are printed at the start. If there are more, only their number is printed."""
OPEN_REQUESTS = 0.25
"""Fraction of `shutdown_timeout_sec` in which open requests may finish. The rest is for the engine."""
LAST_S = 1.0
"""Seconds after `shutdown_timeout_sec` in which results are stored and the database is closed."""


def run(config: EngineConfig, link: LauncherLink, listener: socket.socket, engine: EngineProcess | None) -> int:
    """Serve on `listener` until the server stops. Returns the exit status for this process.

    `engine` is the first engine process, or None if it could not be started. Failures to start are printed in one
    line.
    """
    setup_logging(config.log_level, style=config.log_format)
    sys.setswitchinterval(SWITCH_S)
    allow_many_files()
    try:
        return uvloop.run(_serve(config, link, listener, engine))
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to interrupt


async def _serve(
    config: EngineConfig, link: LauncherLink, listener: socket.socket, engine: EngineProcess | None
) -> int:
    app = create_app(config, partial(EngineSupervisor, first=engine, again=link.again))
    server: TinkerServer = app.state.server
    gate = StartupGate(app, config.long_poll_s)
    options = uvicorn.Config(
        gate,
        http=Connection,
        ws="none",
        proxy_headers=False,  # otherwise a client without a key could forge its address
        lifespan="off",
        log_config=None,
        access_log=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(OPEN_REQUESTS * config.shutdown_timeout_sec),
    )
    http = _HttpServer(options, server, gate, partial(_leave, link))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, http.end)
    link.watch(http.end)
    link.greet(listener if link.listener is None else None)
    with listener:
        life = asyncio.create_task(_live(server, gate, http, _url(listener), link))
        life.add_done_callback(http.nothing_to_serve)
        try:
            await http.serve(sockets=[listener])
        finally:
            life.cancel()
            [outcome] = await asyncio.gather(life, return_exceptions=True)
            if server.started:
                await server.stop()
    if server.failure is not None:
        if server.again:
            raise SystemExit(f"skyrl: {server.failure}")  # no message, so the launcher restarts the process
        return fail(server.failure, link, for_good=True)
    if isinstance(outcome, RequestError):
        return fail(str(outcome), link)
    if isinstance(outcome, Exception) and not http.told:
        raise outcome
    return 0


async def _live(server: TinkerServer, gate: StartupGate, http: "_HttpServer", url: str, link: LauncherLink) -> None:
    """Start the server's parts while `StartupGate` answers, then announce the address.

    Returns only after the server has failed, for example because no engine can be started.
    """
    try:
        await server.start(again=link.again)
    finally:
        gate.turn_away()
    # All objects loaded so far are permanent; scanning them in each collection would block all answers for 0.2 s.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTIONS)
    gate.let_in()
    await _announce(server, url, http, link)


class _HttpServer(uvicorn.Server):
    """uvicorn server that stops on command and then ends long polls immediately."""

    def __init__(self, config: uvicorn.Config, server: TinkerServer, gate: StartupGate, leave: Callable[[float], None]):
        super().__init__(config)
        self.told = False
        """True after the command to stop."""
        self._server = server
        self._gate = gate
        self._leave = leave

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def nothing_to_serve(self, _: object) -> None:
        """Stop listening."""
        self.should_exit = True

    def end(self, at_once: bool = False) -> None:
        """Stop the server.

        With `at_once`, it waits neither for open requests nor for the engine. The next server replays unfinished work
        from the log.
        """
        if not self.should_exit:
            log.info("stopping")
            self._leave(self._server.config.shutdown_timeout_sec + LAST_S if self._server.was_ready else CLOSING_S)
        if at_once:
            self._leave(LAST_S)
        self.told = self.should_exit = True
        self._gate.turn_away()
        self.force_exit |= at_once
        self._server.release_waiters(at_once)


def _leave(link: LauncherLink, after_s: float) -> None:
    """Force an exit after `after_s` seconds if the shutdown hangs, for example in the database.

    Unstored work is replayed at the next start.
    """

    def end() -> None:
        log.warning("something hangs, so the server ends without waiting for it")
        link.say_ends()
        kill_descendants(os.getpid())
        os._exit(0)

    timer = threading.Timer(after_s, end)
    timer.daemon = True
    timer.start()


async def _announce(server: TinkerServer, url: str, http: _HttpServer, link: LauncherLink) -> None:
    """Print the address when the server is ready. Stop the server if it fails before or after that."""
    log.info("listening on %s; loading the base model", url)
    ready = asyncio.create_task(server.service.became_ready.wait())
    failed = asyncio.create_task(server.failed.wait())
    await asyncio.wait([ready, failed], return_when=asyncio.FIRST_COMPLETED)
    if not failed.done():
        link.say_ready()
        if link.again:
            log.info("serving again at %s", url)
        else:
            say(_summary(server, url), flush=True)
        await failed
    ready.cancel()
    http.end()


def _summary(server: TinkerServer, url: str) -> str:
    service, config = server.service, server.config
    names = service.served_names()
    aliases = f" (also as {', '.join(names[1:])})" if names[1:] else ""
    rows = {
        "base model": f"{names[0]}{aliases}",
        "context": f"{service.info.max_context_length} tokens, LoRA rank up to {service.info.max_lora_rank}",
        "checkpoints": str(config.checkpoints_base),
        "database": without_password(config.database_url),
        "keys": _in_short([*config.display_names.values()]) if config.api_keys else "any (--api-keys-file limits them)",
    }
    lines = [f"SkyRL Tinker server at {url}", *(f"  {name:<12}{value}" for name, value in rows.items())]
    key = "one of its keys" if config.api_keys else "tml-local"
    lines.append(f"  connect     TINKER_BASE_URL={url} TINKER_API_KEY={key} python your_script.py")
    if is_any(config.host):
        port = url.rpartition(":")[2]
        lines.append(f"              from other machines: TINKER_BASE_URL=http://{socket.gethostname()}:{port}")
    return "\n".join(lines)


def _in_short(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= SHOWN_KEYS else f"{len(names)} configured"


def _url(listener: socket.socket) -> str:
    return url_of(*listener.getsockname()[:2])
