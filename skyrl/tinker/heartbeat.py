"""How an engine that hangs is told from one that computes.

A thread of the engine process says every so often that the process runs, and for how long its present step has. The
supervisor kills one that says nothing for too long (it is stopped, or its interpreter is held), and one whose step
takes too long (a device or a collective that never answers); then it is recovered as after any crash.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from skyrl.tinker.channel import Alive, ChannelClosed, EngineChannel
from skyrl.tinker.config import EngineConfig

LONGEST_INTERVAL_S = 5.0
PER_TIMEOUT = 6
"""Heartbeats within the shorter of both limits at least."""


def interval_s(config: EngineConfig) -> float:
    """Seconds between two heartbeats."""
    limits = [limit for limit in (config.engine_heartbeat_timeout_sec, config.compute_timeout_sec) if limit]
    return min([LONGEST_INTERVAL_S, *(limit / PER_TIMEOUT for limit in limits)])


def start(channel: EngineChannel, config: EngineConfig, step_began: Callable[[], float | None]) -> None:
    """Send heartbeats until the channel closes.

    Args:
        channel: To the API process.
        config: Says how often.
        step_began: When the present step began, on the monotonic clock; None between two.
    """

    def beat() -> None:
        with suppress(ChannelClosed):
            while not channel.closed:
                began = step_began()
                channel.send(Alive(0.0 if began is None else time.monotonic() - began))
                time.sleep(interval_s(config))

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


class Watch:
    """The supervisor's view of one engine. Times are seconds on one monotonic clock."""

    def __init__(self, config: EngineConfig):
        self._config = config
        self._heard: float | None = None
        self._looked: float | None = None
        self._step_s = 0.0

    def heard(self, alive: Alive, now: float) -> None:
        """The engine has said that it runs."""
        self._heard, self._step_s = now, alive.step_s

    def complaint(self, now: float) -> str | None:
        """Why the engine is to be killed, if it is. Asked once every `interval_s`."""
        late = self._looked is not None and now - self._looked > 2 * interval_s(self._config)
        self._looked = now
        if self._heard is None:  # its first heartbeat is still to come
            return None
        if late:  # it was we who did not listen
            self._heard = now
        silent_s, limit_s = now - self._heard, self._config.engine_heartbeat_timeout_sec
        if limit_s and silent_s > limit_s:
            return f"the engine hung: it gave no sign of life for engine_heartbeat_timeout_sec={limit_s:g}"
        if self._config.compute_timeout_sec and self._step_s > self._config.compute_timeout_sec:
            return f"the engine hung: a step took longer than compute_timeout_sec={self._config.compute_timeout_sec:g}"
        return None
