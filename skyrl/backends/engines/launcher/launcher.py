"""Launched engines: adopted after a restart of the driver, restarted if they exit, stopped on shutdown.

An engine is a command that listens on a port of this machine. Each start chooses a new port, because nothing reserves a
port until the engine has loaded its model, and a new key. Its record is a file with its process identity, port, key,
and hash of the command. Loading a model takes minutes, so a driver adopts a running engine whose record has the same
command. It kills all other engines that a killed driver left.
"""

import contextlib
import hashlib
import json
import logging
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl.backends.engines.launcher.options import API_KEY_VARIABLE, LaunchOptions
from skyrl.backends.engines.launcher.vllm import devices_of
from skyrl.backends.engines.protocol import OwnAddress
from skyrl.utils.backoff import pause_s
from skyrl.utils.files.atomic_folders import replace_file
from skyrl.utils.private import private_folder
from skyrl.utils.processes import ProcessIdentity, end_group, without_secrets

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 30.0
"""Backoff in seconds between two starts of an engine that exits."""
STEADY_S = 60.0
"""Seconds of running after which an exit does not count as a startup failure."""
TRIES = 3
"""Consecutive starts that end without use, after which samples no longer wait for an engine."""
TAIL = 2000
"""Characters of an engine's log in a message."""


@dataclass
class _Launched:
    """One engine, across restarts. Its port changes, its name does not."""

    number: int
    port: int
    key: str
    folder: Path
    identity: ProcessIdentity | None = None
    child: "subprocess.Popen[bytes] | None" = None
    """Process of the engine; None if a previous driver started it."""
    failures: int = 0
    """Consecutive exits soon after a start."""
    used: bool = False
    """True if it has been in use since its last start."""
    unused_starts: int = 0
    """Consecutive starts that ended before the engine was in use."""

    @property
    def name(self) -> str:
        return f"launched-{self.number}"

    @property
    def record(self) -> Path:
        return self.folder / f"engine-{self.number}.json"

    @property
    def log(self) -> Path:
        return self.folder / f"engine-{self.number}.log"


class Launcher:
    """Engines of one driver.

    Args:
        options: Command and number of engines.
        folder: Folder for records and logs. Only one driver at a time may use it.

    Raises RequestError for a folder that other users could have prepared.
    """

    def __init__(self, options: LaunchOptions, folder: Path):
        self._options, self._folder = options, folder
        private_folder(folder)  # records have keys, and name processes to kill
        self._stop, self._stopped = os.pipe()
        """Pipe whose read end becomes readable on shutdown."""
        self._closing = False
        self._lock = threading.Lock()
        self._engines: list[_Launched] = []
        self._threads: list[threading.Thread] = []

    def start(self) -> list[str]:
        """Adopt running engines, start the others, and restart any that exit. Returns the names of all engines."""
        records = {path: _record(path) for path in sorted(self._folder.glob("engine-*.json"))}
        usable = [record for record in records.values() if self._is_ours(record)][: self._options.count]
        for path, record in records.items():
            if record not in usable:
                _end(record)
                path.unlink()
        taken = {record["number"]: record for record in usable}
        for number in range(self._options.count):
            record = taken.get(number)
            engine = _Launched(number, 0, "", self._folder)
            if record is not None:
                engine.port, engine.key = record["port"], record["key"]
                engine.identity = _identity(record)
                log.info("sampling engine %s is taken over (process %d)", engine.name, record["pid"])
            else:
                self._launch(engine)
            self._engines.append(engine)
            self._threads.append(threading.Thread(target=self._watch, args=[engine], daemon=True))
        for thread in self._threads:
            thread.start()
        return self.names

    def close(self) -> None:
        """Stop all engines."""
        with self._lock:
            self._closing = True
        os.write(self._stopped, b"x")
        for thread in self._threads:
            thread.join()
        for engine in self._engines:
            self._end(engine)
            engine.record.unlink(missing_ok=True)
        os.close(self._stop)
        os.close(self._stopped)

    def replace(self, name: str) -> None:
        """Kill a hung engine. It is then restarted like an engine that exited."""
        if (identity := self._named(name).identity) is not None:
            end_group(identity)

    def has_joined(self, name: str) -> None:
        """Record that an engine is in use."""
        engine = self._named(name)
        engine.used, engine.unused_starts = True, 0

    def expects(self, name: str) -> bool:
        """Return True if an engine is ours and has not failed to start `TRIES` times in a row."""
        return name in self.names and self._named(name).unused_starts < TRIES

    def address(self, name: str) -> OwnAddress:
        """Present address of an engine."""
        engine = self._named(name)
        return OwnAddress(f"http://{HOST}:{engine.port}", engine.key)

    @property
    def names(self) -> list[str]:
        """Names of the engines."""
        return [engine.name for engine in self._engines]

    def _named(self, name: str) -> _Launched:
        return next(engine for engine in self._engines if engine.name == name)

    @property
    def given_up(self) -> str | None:
        """Message about an engine that has ended `TRIES` times before it was in use. None: there is no such engine."""
        for engine in self._engines:
            if engine.unused_starts >= TRIES:
                lines = engine.log.read_text(errors="replace").split("\n")
                last = next((line.strip() for line in reversed(lines) if line.strip()), "it is empty")
                return (
                    f"engines.launch: {engine.name} has ended {engine.unused_starts} times before it was in use; the "
                    f"last line of its log, {engine.log}: {last[-TAIL:]}; fix the cause, or leave engines.launch out"
                )
        return None

    @property
    def troubles(self) -> list[str]:
        """Messages about engines that exited soon after their start."""
        return [
            f"{engine.name} has ended {engine.failures} times; the end of {engine.log}: "
            f"{engine.log.read_text(errors='replace')[-TAIL:]}"
            for engine in self._engines
            if engine.failures
        ]

    def _watch(self, engine: _Launched) -> None:
        """Restart an engine whenever it exits, until shutdown."""
        while True:
            begun = time.monotonic()
            if self._wait_for_end(engine):
                return
            self._end(engine)  # with the rest of its process group
            engine.failures = engine.failures + 1 if time.monotonic() - begun < STEADY_S else 0
            engine.unused_starts = 0 if engine.used else engine.unused_starts + 1
            engine.used = False
            log.warning("sampling engine %s has ended (log: %s) and is started again", engine.name, engine.log)
            pause = pause_s(engine.failures - 1, FIRST_PAUSE_S, LONGEST_PAUSE_S) if engine.failures else 0.0
            if self._closes_within(pause):
                return
            with self._lock:
                if self._closing:
                    return
                self._launch(engine)

    def _closes_within(self, seconds: float) -> bool:
        return bool(select.select([self._stop], [], [], seconds)[0])

    def _wait_for_end(self, engine: _Launched) -> bool:
        """Wait until an engine exits or shutdown begins. Return True on shutdown."""
        handle = None if engine.identity is None else engine.identity.handle()
        if handle is None:
            return False
        try:
            readable, _, _ = select.select([handle, self._stop], [], [])
        finally:
            os.close(handle)
        return self._stop in readable

    def _launch(self, engine: _Launched) -> None:
        engine.port, engine.key = _free_port(), secrets.token_hex(16)
        start = secrets.token_hex(8)
        facts = {"number": engine.number, "port": engine.port, "key": engine.key, "command": self._hash, "start": start}
        replace_file(engine.record, json.dumps(facts).encode())
        places = {"{port}": str(engine.port), "{number}": str(engine.number)}
        command = [_filled(part, places) for part in self._options.command]
        devices = devices_of(self._options, engine.number)
        environment = {**without_secrets(os.environ), **devices, **self._options.env, API_KEY_VARIABLE: engine.key}
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        with engine.log.open("ab") as output:
            engine.child = subprocess.Popen(
                [sys.executable, "-m", "skyrl.backends.engines.launcher.launched", str(engine.record), start, *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        engine.identity = ProcessIdentity.of(engine.child.pid)
        log.info("starting sampling engine %s (process %d), log: %s", engine.name, engine.child.pid, engine.log)

    def _end(self, engine: _Launched) -> None:
        """Kill an engine's process group, once. A child's pid cannot be reused before it is reaped here."""
        if engine.child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(engine.child.pid, signal.SIGKILL)
            engine.child.wait()
        elif engine.identity is not None:
            end_group(engine.identity)
        engine.child = engine.identity = None

    @property
    def _hash(self) -> str:
        """Hash of command, environment and devices of the engines."""
        devices = self._options.gpus, self._options.first_gpu
        text = json.dumps([self._options.command, dict(self._options.env), devices], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def _is_ours(self, record: Mapping[str, Any]) -> bool:
        """Return True if the record's engine is running and was started with the current command."""
        identity = _identity(record)
        same = record.get("command") == self._hash and record["number"] < self._options.count
        return same and identity is not None and identity.runs


def _filled(part: str, places: Mapping[str, str]) -> str:
    for name, value in places.items():
        part = part.replace(name, value)
    return part


def _record(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except ValueError:  # incomplete write
        return {}


def _identity(record: Mapping[str, Any]) -> ProcessIdentity | None:
    """Process identity in a record; None if no process has written its identity."""
    return ProcessIdentity(record["pid"], record["start_time"], record["boot_id"]) if "pid" in record else None


def _end(record: Mapping[str, Any]) -> None:
    if (identity := _identity(record)) is not None:
        end_group(identity)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        return free.getsockname()[1]
