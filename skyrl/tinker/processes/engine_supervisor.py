"""Keeps one engine process running next to the API process.

When the engine's stream ends, the supervisor reaps the child, reports the reason to `on_crash`, and starts a new child
after a growing pause. It also retries if the system lacks processes or descriptors for a child. It kills an engine that
hangs (`heartbeat`). The child exits when its end of the stream closes, so it never outlives this process, however this
process ends. Frames go only to the current engine and are not kept for the next one. Senders are notified of `Ready`
and decide which requests to send again.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable
from typing import Literal

from skyrl.backends.statistics import Statistics
from skyrl.tinker.config import EngineConfig
from skyrl.tinker.processes.channel import ApiChannel
from skyrl.tinker.processes.engine_process import EngineProcess
from skyrl.tinker.processes.heartbeat import Watch, interval_s
from skyrl.tinker.processes.messages import (
    Alive,
    Failed,
    FromEngine,
    Lost,
    Metrics,
    Progress,
    Ready,
    Shutdown,
    ToEngine,
)
from skyrl.types import BackendInfo
from skyrl.utils.backoff import pause_s
from skyrl.utils.slow_calls import SlowCall

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "restarting", "failed", "stopped"]

STARTS = 3
"""Number of consecutive failed starts after which the supervisor gives up. After the first `Ready`, it never gives up.
"""
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
TERMINATE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""
READY, SILENT = "ready", "the engine gives no sign of life"
"""Values of `progress` in the state "ready"."""
NO_THREAD = "can't start new thread"
"""Python's error message when a limit on processes is reached."""
GRACE = 0.75
"""Fraction of `shutdown_timeout_sec` after which an engine that does not exit is killed."""


class EngineSupervisor:
    """Starts, watches, restarts and stops the engine. All methods are called on one asyncio loop.

    Args:
        config: Configuration for each engine.
        on_frame: Called on the loop with every frame of the engine.
        on_crash: Called with the reason when an engine exits unexpectedly. The engine's running work is lost.
        on_failure: Called once, with a message for the user who started the server, if no engine can be started.
            If `again` is True, the failure may be limited to this API process, and a new one may succeed.
        first: Process of the first engine, if it was started already.
        again: True if an engine with this configuration was ready before. Failures to start then count as
            temporary, and the supervisor retries without limit.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_frame: Callable[[FromEngine], None],
        on_crash: Callable[[str], None],
        on_failure: Callable[..., None],
        first: EngineProcess | None = None,
        again: bool = False,
    ):
        self.config = config
        self.state: State = "starting"
        self.progress = "starting the engine"
        """Description of the engine's startup. Once the engine is ready: `READY` or `SILENT`."""
        self.info: BackendInfo | None = None
        """Facts about the loaded model, from the first `Ready` on."""
        self.metrics: dict[str, int] = {}
        """Number of programs that the running engine's backend has compiled, by name of the counter."""
        self.statistics: Statistics = {}
        """Statistics that the running engine has reported."""
        self.slow_calls: tuple[SlowCall, ...] = ()
        """Calls of the running engine to services that take longer than expected."""
        self.restarts = 0
        self._on_frame = on_frame
        self._on_crash = on_crash
        self._on_failure = on_failure
        self._channel: ApiChannel | None = None
        self._first = first
        self._was_ready = again
        """True if an engine has ever been ready."""
        self._process: EngineProcess | None = None
        self._failure: str | None = None
        self._hung: str | None = None
        """Reason why the current engine has to be killed, if there is one."""
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the running engine."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the first engine and supervise it in the background.

        Returns at once. When an engine is ready, `on_frame` is called with a `Ready` frame.
        """
        self._task = asyncio.create_task(self._supervise(), name="engine supervisor")
        self._task.add_done_callback(self._supervision_ended)

    def send(self, frame: ToEngine) -> None:
        """Send a frame to the engine. The frame is dropped if no engine is ready. Never blocks."""
        if self._channel is not None and self.state == "ready":
            self._channel.send(frame)

    def kill(self) -> None:
        """Kill the engine and its children at once. A later `stop` then returns immediately."""
        self.state = "stopped"
        if self._process is not None:
            self._process.kill()

    async def stop(self) -> None:
        """Stop the engine: ask it to take last snapshots and exit, and kill it when its time is up."""
        loading = self.state in ("starting", "restarting")
        self.state = "stopped"
        if (process := self._process) and self._channel:
            self._channel.send(Shutdown())
            if loading:  # a loading engine reads no frames and has no state to save
                process.kill()
            with contextlib.suppress(TimeoutError):
                await process.wait(GRACE * self.config.shutdown_timeout_sec)
            process.kill()
            if self._task:  # its last frames may still be on their way to `on_frame`
                await asyncio.wait([self._task], timeout=TERMINATE_S)
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _supervise(self) -> None:
        failed_starts = pauses = 0
        while True:
            failed_starts, pauses = failed_starts + 1, pauses + 1
            try:
                reason, became_ready = await self._run_engine()
            except (OSError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and str(error) != NO_THREAD:
                    raise
                # The system lacks descriptors, memory, processes or threads, perhaps temporarily.
                reason, became_ready = f"the engine cannot be started: {error}", False
                failed_starts -= 1
            if self.state == "stopped":
                return
            if became_ready:
                failed_starts = pauses = 0
            if not self._was_ready and (self._failure or failed_starts == STARTS):
                self.state = "failed"
                self._on_failure(self._failure or f"the engine does not start: {reason}; its log above says why")
                return
            self.state = "restarting"
            self.progress = f"restarting the engine: {reason}"
            log.error("%s; restarting it", reason)
            self._on_crash(reason)
            await asyncio.sleep(pause_s(pauses, FIRST_PAUSE_S, LONGEST_PAUSE_S))
            self.restarts += 1

    async def _run_engine(self) -> tuple[str, bool]:
        """Run one engine until it exits. Returns (reason for the exit, True if the engine had been ready)."""
        process, self._first = self._first or EngineProcess(self.config), None
        self._process, self._hung = process, None
        watch = Watch(self.config, asyncio.get_running_loop().time())
        watcher = asyncio.create_task(self._kill_if_it_hangs(process, watch), name="engine watch")
        try:
            channel = self._channel = await ApiChannel.open(process.socket)
            try:
                became_ready = await self._converse(channel, watch)
                await _end(process)
            finally:
                self._channel, self.slow_calls = None, ()
                process.signal(signal.SIGKILL)
                await channel.close()
                status = await process.wait()
        finally:
            watcher.cancel()
            self._process = None
            process.close()
        return self._failure or self._hung or _reason(status), became_ready

    async def _kill_if_it_hangs(self, process: EngineProcess, watch: Watch) -> None:
        clock = asyncio.get_running_loop().time
        while self._hung is None:
            await asyncio.sleep(interval_s(self.config))
            complaint = watch.complaint(now := clock())
            if self.state == "stopped":
                continue
            if complaint is not None:  # change the state now: a process that waits for a device may survive SIGKILL
                self._hung, self.state, self.progress = complaint, "restarting", f"restarting the engine: {complaint}"
                log.error("%s; killing it", complaint)
                process.signal(signal.SIGKILL)
            elif self.state == "ready":
                self.progress = SILENT if watch.silent(now) else READY

    async def _converse(self, channel: ApiChannel, watch: Watch) -> bool:
        """Handle frames until the engine closes its end. Returns True if the engine has been ready."""
        self._failure = None
        became_ready = False
        async for frame in channel.frames():
            if isinstance(frame, Alive):
                watch.heard(frame, asyncio.get_running_loop().time())
                self.slow_calls = frame.slow_calls
                continue
            if isinstance(frame, Ready):
                became_ready = True
                watch.ready()
            self._note(frame)
            self._on_frame(frame)
        return became_ready

    def _note(self, frame: FromEngine) -> None:
        if isinstance(frame, Progress):
            self.progress = frame.message
        elif isinstance(frame, Metrics):
            self.metrics, self.statistics = frame.values, frame.statistics
        elif isinstance(frame, Failed):
            self._failure = frame.message
        elif isinstance(frame, Lost):
            self._hung = f"the backend is lost: {frame.message}"
        elif isinstance(frame, Ready):
            self.info, self._was_ready = frame.info, True
            self.metrics, self.statistics = {}, {}
            if self.state != "stopped" and self._hung is None:
                self.state, self.progress = "ready", READY

    def _supervision_ended(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("the engine's supervisor failed", exc_info=error)
        self.state = "failed"
        self._on_failure(f"the engine's supervisor failed: {error!r}", again=True)


async def _end(process: EngineProcess) -> None:
    """Wait for the process to exit, then send SIGTERM, then SIGKILL."""
    for number, patience_s in ((None, TERMINATE_S), (signal.SIGTERM, TERMINATE_S), (signal.SIGKILL, None)):
        if number is not None:
            process.signal(number)
        with contextlib.suppress(TimeoutError):
            await process.wait(patience_s)
            return


def _reason(status: int) -> str:
    if status < 0:
        return f"the engine was killed by {signal.Signals(-status).name}"
    return f"the engine exited with status {status}"
