"""Engines that were started from here and have stopped answering, though their processes have not ended.

`Replacing` stands before admission, which is tried as long as an engine is not in use. If it hears nothing of an engine
for too long, it ends the engine's processes, so that the launcher starts another one in its place.
"""

import logging
import time
from collections.abc import Awaitable, Callable

from skyrl.backends.engines.launcher.launcher import Launcher
from skyrl.backends.engines.protocol import Admitted, Engine, EngineDown

log = logging.getLogger(__name__)


class Replacing:
    """Admission that replaces engines which hang.

    Args:
        admit: Admits an engine. Raises `EngineDown` if it does not answer.
        launcher: Has started engines.
        hang_s: Seconds without an answer after which one that has been in use hangs.
        start_s: The same for one that was not, which has its model to load.
    """

    def __init__(
        self, admit: Callable[[Engine], Awaitable[Admitted]], launcher: Launcher, hang_s: float, start_s: float
    ):
        self._admit, self._launcher = admit, launcher
        self._hang_s, self._start_s = hang_s, start_s
        self._silent: dict[str, float] = {}
        """Times since which engines have not answered."""
        self._used: set[str] = set()
        """Engines that have been in use since they were started."""

    async def __call__(self, engine: Engine) -> Admitted:
        """Raises as `admit` does."""
        since = self._silent.setdefault(engine.name, time.monotonic())
        try:
            admitted = await self._admit(engine)
        except EngineDown as error:
            limit = self._hang_s if engine.name in self._used else self._start_s
            if time.monotonic() - since >= limit and engine.name in self._launcher.urls:
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
        return admitted
