"""Handling of SIGINT and SIGTERM. The first signal ends a run after its state is saved, a second ends it at once."""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from skyrl.errors import BackendLost, BackendStopped

log = logging.getLogger(__name__)

T = TypeVar("T")

SIGNALS = signal.SIGINT, signal.SIGTERM


class Interrupted(Exception):
    """A run has ended because of a signal; the message says what was saved."""

    def __init__(self, number: signal.Signals, message: str):
        super().__init__(message)
        self.signal = number


class Interruption:
    """Request to end a run. Signals are handled only in the event loop of the main thread."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """Signal that requested the end. None: no request."""
        self._asked = asyncio.Event()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Context that handles the signals of this process.

        Raises `Interrupted` for a lost backend after a signal, because who ends a run may end its workers too.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()

        def ask(number: int, frame: FrameType | None) -> None:
            if self.signal is not None:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            self.signal = signal.Signals(number)
            loop.call_soon_threadsafe(self._tell)

        before = {number: signal.signal(number, ask) for number in SIGNALS}
        try:
            yield
        except (BackendLost, BackendStopped) as error:
            if self.signal is None:
                raise
            said = f"nothing is saved since the newest checkpoint, because the backend is lost: {error}"
            raise Interrupted(self.signal, f"{self.signal.name}: {said}") from error
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _tell(self) -> None:
        assert self.signal is not None
        log.warning("%s: the run ends as soon as its state is saved; once more ends it at once", self.signal.name)
        self._asked.set()

    async def either(self, task: "asyncio.Task[Any]") -> None:
        """Wait until a task has ended or a signal arrives."""
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            asked.cancel()

    async def unless_asked(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of `work`. If a signal arrives first, cancel `work` and return None."""
        task = asyncio.ensure_future(work)
        await self.either(task)
        return await task if task.done() else await drop(task)


async def drop(task: "asyncio.Task[Any]") -> None:
    """Cancel a task and wait until it has ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
