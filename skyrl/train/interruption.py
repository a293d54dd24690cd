"""Handling of SIGINT and SIGTERM once a run has work to save. The first signal ends it after its state is saved."""

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from skyrl.errors import BackendLost, BackendStopped
from skyrl.utils.stop_signals import first_signal_calls

T = TypeVar("T")


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
        """Context in which the first signal of this process is the request.

        Raises `Interrupted` for a lost backend after a signal, because who ends a run may end its workers too.
        """
        loop = asyncio.get_running_loop()

        def ask(number: signal.Signals) -> None:
            self.signal = self.signal or number
            loop.call_soon_threadsafe(self._asked.set)

        try:
            with first_signal_calls(ask, "the run ends as soon as its state is saved"):
                yield
        except (BackendLost, BackendStopped) as error:
            if self.signal is None:
                raise
            said = f"nothing is saved since the newest checkpoint, because the backend is lost: {error}"
            raise Interrupted(self.signal, f"{self.signal.name}: {said}") from error

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
