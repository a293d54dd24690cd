"""Replacement of launched engines that stopped answering although their processes still run.

`Replacing` wraps admission, which is retried while an engine is not in use. If an engine does not answer for too long,
its processes are killed, and the launcher starts another engine.
"""

import logging
import time
from collections.abc import Awaitable, Callable

from skyrl.backends.engines.launcher.launcher import Launcher
from skyrl.backends.engines.protocol import Admitted, Engine, EngineDown

log = logging.getLogger(__name__)


class Replacing:
    """Admission that replaces hung engines.

    Args:
        admit: Admits an engine. Raises `EngineDown` if it does not answer.
        launcher: Launcher of the engines.
        hang_s: Seconds without an answer after which an engine that was in use counts as hung.
        start_s: The same for an engine that was never in use and may still be loading its model.
    """

    def __init__(
        self, admit: Callable[[Engine], Awaitable[Admitted]], launcher: Launcher, hang_s: float, start_s: float
    ):
        self._admit, self._launcher = admit, launcher
        self._hang_s, self._start_s = hang_s, start_s
        self._silent: dict[str, float] = {}
        """Time of the first unanswered admission of each engine that does not answer, on the monotonic clock."""
        self._used: set[str] = set()
        """Engines in use at least once since their last start."""

    async def __call__(self, engine: Engine) -> Admitted:
        """Admit an engine. Raises the errors of `admit`."""
        since = self._silent.setdefault(engine.name, time.monotonic())
        try:
            admitted = await self._admit(engine)
        except EngineDown as error:
            limit = self._hang_s if engine.name in self._used else self._start_s
            if time.monotonic() - since >= limit and engine.name in self._launcher.names:
                log.error("sampling engine %s has not answered for %g s and is replaced: %s", engine.name, limit, error)
                self._launcher.replace(engine.name)
                self._used.discard(engine.name)
                del self._silent[engine.name]
            raise
        except BaseException:
            del self._silent[engine.name]
            raise
        del self._silent[engine.name]
        self._used.add(engine.name)
        if engine.name in self._launcher.names:
            self._launcher.has_joined(engine.name)
        return admitted
