"""SIGINT and SIGTERM of a command: the first one ends it within `CLOSING_S`, a second one at once.

The first signal raises `Stopped` in the main thread, so that open contexts are closed. A main thread that waits inside
a library (a compiler, a store, a cluster) may not return to Python for minutes. Therefore a second thread reads the
signals too, and ends the process with all its descendants when the time is up. The time limit ends with the outermost
context, unless the process exits after it. A command that has work to save calls `first_signal_calls`: then its first
signal has no time limit, and the main thread can end the process, too, because a computation there may keep the second
thread from running. A signal that is ignored, as SIGINT is in a background command of a script, stays ignored.
"""

import contextlib
import os
import select
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import FrameType

from skyrl.utils.processes import kill_descendants

SIGNALS = signal.SIGINT, signal.SIGTERM
STDERR = 2
CLOSING_S = 3.0
"""Seconds after the first signal in which a command closes what it has opened."""
AGAIN = "{} again: ended at once"
"""Message of a second signal."""


LATER_S = 0.01
"""Seconds after which a signal is handled that arrived where Python drops exceptions."""


class Stopped(KeyboardInterrupt):
    """A signal has ended a command that had nothing to save."""

    def __init__(self, number: signal.Signals):
        super().__init__(f"ended by {number.name}")
        self.signal = number

    @property
    def status(self) -> int:
        """Exit status, as shells report it."""
        return 128 + self.signal


class _Watch:
    """Thread that ends the process in time."""

    def __init__(self) -> None:
        self.limited = True
        """True if the time after the first signal is limited."""
        self.promise = ""
        """Message after the first signal, if the time is not limited."""
        self.first: signal.Signals | None = None
        """The first signal. None: there was none."""
        self._source, self._sink = socket.socketpair()
        self._sink.setblocking(False)
        self._before = signal.set_wakeup_fd(self._sink.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._run, name="stop signals", daemon=True).start()

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Signal handler of a command that has nothing to save."""
        if not _is_finalizer(frame):
            raise Stopped(signal.Signals(number))
        before = signal.getsignal(signal.SIGALRM)

        def again(_: int, later: FrameType | None) -> None:
            signal.signal(signal.SIGALRM, before)
            self.stop(number, later)

        signal.signal(signal.SIGALRM, again)
        signal.setitimer(signal.ITIMER_REAL, LATER_S)

    def close(self) -> None:
        """Stop watching. A time limit that is running ends."""
        signal.set_wakeup_fd(self._before)
        self._sink.close()

    def _run(self) -> None:
        if (number := self._next()) is None:
            return
        if self.limited and not self._hears_more_within(CLOSING_S) and self.limited:
            _end_now(number, f"{number.name}: not closed within {CLOSING_S:g} s, so it is ended")
        if not self.limited:  # perhaps since a moment after the signal, which was for the new handler
            _say(f"{number.name}: {self.promise}; once more ends it at once")
        if (number := self._next()) is not None:
            _end_now(number, AGAIN.format(number.name))

    def _hears_more_within(self, seconds: float) -> bool:
        """Return True if a signal of `SIGNALS` arrives, or the other end of the socket is closed, in this time."""
        end = time.monotonic() + seconds
        while select.select([self._source], [], [], max(0.0, end - time.monotonic()))[0]:
            received = self._source.recv(1, socket.MSG_PEEK)
            if not received or received[0] in SIGNALS:
                return True
            self._source.recv(1)  # of a signal that the process uses itself
        return False

    def noticed(self) -> signal.Signals | None:
        """The first signal, even if the thread has not read it yet."""
        if self.first is None:
            with contextlib.suppress(OSError):
                self._note(self._source.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        return self.first

    def _next(self) -> signal.Signals | None:
        """Wait for a signal. Returns None when the other end of the socket is closed."""
        while received := self._source.recv(1, socket.MSG_PEEK):
            number = self._note(received)
            self._source.recv(1)  # after it is noted, so that `noticed` cannot miss it
            if number is not None:
                return number
        self._source.close()
        return None

    def _note(self, received: bytes) -> signal.Signals | None:
        number = signal.Signals(received[0]) if received and received[0] in SIGNALS else None
        self.first = self.first or number
        return number


_watch: _Watch | None = None
"""Watch of this process, if its signals are handled here."""


_ending = False
"""True if a thread has begun to end the process."""

_forking = threading.local()
"""Signal mask of this thread before it forks."""


def _before_fork() -> None:
    """Block signals, so that a child gets none before it has its own handlers."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_child() -> None:
    """Restore the default handlers. With the inherited ones, a child's signals would reach its parent's watch."""
    global _watch
    if _watch is not None:
        _watch = None
        signal.set_wakeup_fd(-1)
        for number, default in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, default)
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


@contextmanager
def ending_on_signals(exits: bool = False) -> Iterator[None]:
    """Context of a command. The first SIGINT or SIGTERM raises `Stopped`, also inside an event loop.

    Other errors after the signal become `Stopped` too, because they may follow from it: a library may have replaced the
    handler, or a child may have received the signal. Only in the main thread. It may be nested.

    Args:
        exits: The process exits after this context, so its exit is part of the limited time. Only for the outermost.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _watching(exits) as watch:
        try:
            yield
        except BaseException as error:
            if (number := watch.noticed()) is None or not watch.limited:
                raise
            kill_descendants(os.getpid())  # those of contexts that were not entered yet
            raise Stopped(number) from error


@contextmanager
def _watching(exits: bool = False) -> Iterator[_Watch]:
    global _watch
    if _watch is not None:
        yield _watch
        return
    _watch = watch = _Watch()
    try:
        with _handling(watch.stop):
            yield watch
    finally:
        if not (exits and watch.limited and watch.noticed()):
            watch.close()
        _watch = None


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Context with a handler of the signals that are not ignored."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    heard = [number for number, earlier in before.items() if earlier != signal.SIG_IGN]
    try:
        for number in heard:
            signal.signal(number, handler)
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])


@contextmanager
def first_signal_calls(handle: Callable[[signal.Signals], None], promise: str) -> Iterator[None]:
    """Context in which the first signal calls `handle`. A second one ends the process at once, as everywhere.

    Args:
        handle: Called in the main thread, once it is in Python.
        promise: What follows, for the user; told at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _watching() as watch:
        signals = count()

        def handler(number: int, frame: FrameType | None) -> None:
            if next(signals):
                _end_now(signal.Signals(number), AGAIN.format(signal.Signals(number).name))
            handle(signal.Signals(number))

        try:
            with _handling(handler):
                watch.promise, watch.limited = promise, False
                yield
        finally:
            if watch.noticed() is None:
                watch.limited = True


def _is_finalizer(frame: FrameType | None) -> bool:
    """Return True if a frame, or one of its callers, is a `__del__` or a callback of `weakref.finalize`.

    Python prints and drops exceptions of these.
    """
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code is weakref.finalize.__call__.__code__:
            return True
        frame = frame.f_back
    return False


def _end_now(number: signal.Signals, message: str) -> None:
    global _ending
    if not _ending:
        _ending = True
        _say(message)
    kill_descendants(os.getpid())
    os._exit(128 + number)


def _say(message: str) -> None:
    with contextlib.suppress(OSError):
        os.write(STDERR, f"{message}\n".encode())  # without locks, which the main thread may hold
