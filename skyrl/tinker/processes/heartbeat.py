"""Detection of an engine that hangs rather than computes.

A thread of the engine process regularly reports that the process is alive, and how long its current step has taken. The
supervisor kills an engine without heartbeats (the process is stopped, or its interpreter is blocked). It also kills an
engine whose current step, or whose loading of one part of the model, exceeds a time limit (a device, a collective or a
file system that never answers). Recovery is then the same as after any crash. Time during which either process was
itself frozen does not count.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from skyrl.tinker.config import EngineConfig
from skyrl.tinker.processes.channel import ChannelClosed, EngineChannel
from skyrl.tinker.processes.messages import Alive
from skyrl.utils.slow_calls import slow_calls

LONGEST_INTERVAL_S = 5.0
PER_TIMEOUT = 6
"""Minimum number of heartbeats within the shortest of the time limits."""
SILENT_INTERVALS = 3
"""Intervals without a heartbeat after which an engine does not count as ready. It is not killed yet."""


def interval_s(config: EngineConfig) -> float:
    """Seconds between two heartbeats."""
    limits = (config.engine_heartbeat_timeout_sec, config.compute_timeout_sec, config.load_timeout_sec)
    return min([LONGEST_INTERVAL_S, *(limit / PER_TIMEOUT for limit in limits if limit)])


class Stopwatch:
    """Durations of steps, without time during which the process was frozen.

    Args:
        interval_s: Seconds between two calls of `seconds`.
        now: Current time on the monotonic clock, in seconds, as everywhere in this module.
    """

    def __init__(self, interval_s: float, now: float):
        self._interval_s = interval_s
        self._looked = now
        self._began: float | None = None
        self._lost_s = 0.0

    def seconds(self, began: float | None, now: float) -> float:
        """Seconds of the current step, which started at `began`; 0.0 between steps."""
        looked, self._looked = self._looked, now
        if began is None:
            return 0.0
        if began != self._began:
            self._began, self._lost_s = began, 0.0
        if now - looked > 2 * self._interval_s:
            self._lost_s += now - max(began, looked)
        return now - began - self._lost_s


def start(channel: EngineChannel, config: EngineConfig, step_began: Callable[[], float | None]) -> None:
    """Send heartbeats until the channel closes.

    Args:
        channel: Channel to the API process.
        config: Configuration with the time limits, which determine the interval.
        step_began: Returns the start of the current step on the monotonic clock; None between steps.
    """
    stopwatch = Stopwatch(interval_s(config), time.monotonic())

    def beat() -> None:
        with suppress(ChannelClosed):
            while not channel.closed:
                channel.send(Alive(stopwatch.seconds(step_began(), time.monotonic()), slow_calls()))
                time.sleep(interval_s(config))

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


class Watch:
    """The supervisor's view of one engine, from the start of the engine on.

    All times are seconds on one monotonic clock.
    """

    def __init__(self, config: EngineConfig, now: float):
        self._config = config
        self._heard = self._looked = now
        self._spoken = False
        self._loading = True
        self._step_s = 0.0

    def ready(self) -> None:
        """Record that the engine has loaded its model."""
        self._loading = False

    def heard(self, alive: Alive, now: float) -> None:
        """Record a heartbeat."""
        self._heard, self._step_s, self._spoken = now, alive.step_s, True

    def silent(self, now: float) -> bool:
        """Return True if more than one heartbeat is overdue."""
        return now - self._heard > SILENT_INTERVALS * interval_s(self._config)

    def complaint(self, now: float) -> str | None:
        """Return the reason to kill the engine, or None. Call once every `interval_s`."""
        if now - self._looked > 2 * interval_s(self._config):  # this process was frozen
            self._heard = now
        self._looked = now
        silent_s, limit_s = now - self._heard, self._config.engine_heartbeat_timeout_sec
        if self._spoken and limit_s and silent_s > limit_s:
            return f"the engine hung: it gave no sign of life for engine_heartbeat_timeout_sec={limit_s:g}"
        if self._loading:
            limit_s = self._config.load_timeout_sec
            if limit_s and max(self._step_s, 0.0 if self._spoken else silent_s) > limit_s:
                return f"the engine hung: it came no further in its start for load_timeout_sec={limit_s:g}"
        elif self._config.compute_timeout_sec and self._step_s > self._config.compute_timeout_sec:
            return f"the engine hung: a step took longer than compute_timeout_sec={self._config.compute_timeout_sec:g}"
        return None
