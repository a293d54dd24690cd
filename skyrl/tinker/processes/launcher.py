"""Parent process of a server. It starts the API process, restarts it after a crash, and keeps the listening socket.

`skyrl serve` and `python -m skyrl.tinker.api` run the launcher. Its only state is the socket, which stays open while
there is no API process, so clients wait instead of being refused. It imports nothing that could need much memory or
fail.

The launcher and the API process exchange messages of one byte over a socketpair. The API process creates the listening
socket and sends it once; later API processes inherit it. Before an orderly exit, the API process sends a message.
Without this message the exit counts as a crash, and the launcher restarts the process. The launcher also sends its
orders over the socketpair, because signals may come from elsewhere. The end of the launcher's stream is an order to
stop at once, so an API process does not outlive its launcher.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from skyrl.utils.backoff import pause_s
from skyrl.utils.console import say_error
from skyrl.utils.private import PRIVATE

HELLO, READY, ENDS = b"h", b"r", b"e"
"""Messages of the API process. HELLO: it accepts orders (the message carries the listening socket if the process has
created it). READY: its engine is ready. ENDS: it is about to exit in an orderly way."""
STOP, NOW = b"s", b"n"
"""Messages of the launcher. STOP: stop after everything is stored. NOW: stop at once."""

STARTS = 5
"""Number of crashes without any `READY` after which the launcher gives up."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
STEADY_S = 2.0
"""Seconds after `READY` after which the process counts as stable, so a later crash restarts with the shortest pause."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Launcher:
    """Runs one server until it exits.

    Args:
        prog: Name of the command, for messages to the user.
        options: Command line of the server, which the API process parses.
        owner: File descriptor of a pipe. The server stops when the other end of the pipe is closed.
    """

    def __init__(self, prog: str, options: Sequence[str], owner: int | None = None):
        self._prog = prog
        self._options = list(options)
        self._owner = owner
        self._wake, self._waker = socket.socketpair()
        self._listener: socket.socket | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._greeted = False
        self._ended = False
        self._was_ready = False
        self._stops = 0
        self._ready_at: float | None = None
        self._deaths = 0

    def run(self) -> int:
        """Serve until the API process exits in an orderly way or crashes too often. Returns the exit status."""
        os.umask(PRIVATE)  # of files of all processes, which contain data, results and secrets
        self._waker.setblocking(False)
        self._wake.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, _noticed)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # children inherit this until they install a handler
        while True:
            try:
                status = self._run_api()
                reason = _reason(status)
            except OSError as error:  # lack of descriptors, memory or processes, perhaps temporary
                if self._stops:
                    return 1
                status, reason, self._ended = 1, f"cannot be started: {error}", False
            if self._ended or self._stops:
                return status if status >= 0 else 0 if status == -signal.SIGTERM else 128 - status
            if self._ready_at is not None and time.monotonic() - self._ready_at > STEADY_S:
                self._deaths = 0
            self._deaths, self._ready_at = self._deaths + 1, None
            if not self._was_ready and self._deaths == STARTS:
                _say(f"error: the server process {reason}, {STARTS} times before it was ready; see above")
                return 1
            _say(f"the server process {reason}; starting it again")
            self._wait(pause_s(self._deaths - 1, FIRST_PAUSE_S, LONGEST_PAUSE_S))
            if self._stops:
                return 0

    def _run_api(self) -> int:
        """Run one API process until it exits. Returns its exit status."""
        ours, its = socket.socketpair()
        with ours, its:
            inherited = [its.fileno()]
            command = [
                sys.executable,
                "-m",
                "skyrl.tinker.api_process",
                f"--prog={self._prog}",
                f"--link={its.fileno()}",
            ]
            if self._listener is not None:
                inherited.append(self._listener.fileno())
                command.append(f"--listener={self._listener.fileno()}")
            if self._was_ready:
                command.append("--again")
            # In a separate session, so that a Ctrl-C at the terminal reaches the launcher only.
            self._child = subprocess.Popen(
                [*command, "--", *self._options], pass_fds=inherited, stdin=subprocess.DEVNULL, start_new_session=True
            )
            its.close()
            ours.setblocking(False)
            self._link, self._greeted, self._ended = ours, False, False
            while (status := self._child.poll()) is None:
                self._wait(None)
            self._listen_to_api()
            self._link = None
        return status

    def _wait(self, timeout_s: float | None) -> None:
        """Handle events for `timeout_s` seconds. None: until a signal arrives, such as for the exit of a child."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            sources = [source for source in (self._wake, self._link, self._owner) if source is not None]
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select(sources, [], [], left)
            if self._link in readable:
                self._listen_to_api()
            if self._owner in readable:
                self._owner = None
                self._stop()
            if self._wake in readable:
                for number in self._wake.recv(4096):
                    if number in STOP_SIGNALS:
                        self._stop()
                if deadline is None:
                    return
            if not readable or (self._stops and deadline is not None):
                return

    def _stop(self) -> None:
        """Forward a stop request to the API process: the first as `STOP`, further ones as `NOW`."""
        self._stops += 1
        if self._listener is not None:  # clients must not wait for a server that will not start
            self._listener.close()
            self._listener = None
        if self._child is None or self._child.poll() is not None:
            return
        if not self._greeted:
            self._child.terminate()
        elif self._link is not None:
            with suppress(OSError):
                self._link.send(STOP if self._stops == 1 else NOW)

    def _listen_to_api(self) -> None:
        """Handle messages of the API process."""
        with suppress(BlockingIOError):
            while self._link is not None:
                try:
                    messages, handles, _, _ = socket.recv_fds(self._link, 64, 1)
                except ConnectionError:
                    messages, handles = b"", []
                for handle in handles:
                    self._listener = socket.socket(fileno=handle)
                for message in (messages[i : i + 1] for i in range(len(messages))):
                    self._greeted |= message == HELLO
                    self._ended |= message == ENDS
                    if message == READY:
                        self._was_ready, self._ready_at = True, time.monotonic()
                if not messages:
                    self._link = None


def run(options: Sequence[str], prog: str, owner: int | None = None) -> int:
    """Serve with these command-line options until the server stops. Returns the exit status."""
    return Launcher(prog, options, owner).run()


def _noticed(number: int, frame: object) -> None:
    """Do nothing: the wakeup socket notifies the loop of the signal."""


def _say(message: str) -> None:
    with suppress(OSError):
        say_error(f"skyrl: {message}", flush=True)


def _reason(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"failed with exit status {status}"


if __name__ == "__main__":  # for a parent program: handle of an inherited pipe, then the options
    os.set_inheritable(int(sys.argv[1]), False)
    sys.exit(run(sys.argv[2:], "python -m skyrl.tinker.api", owner=int(sys.argv[1])))
