"""The engine loop: receives operations from the API process, orders them, and runs the backend one quantum (a step of
bounded duration) at a time.

`TinkerEngine.turn` is one iteration: handle frames, submit operations to the backend, run one quantum, send results.
Without work, the loop first lets the backend prepare for later requests, and then sleeps until a frame arrives,
background work ends or a held request expires; nothing polls. The engine has no SQL and no HTTP.
`skyrl.tinker.processes.engine_supervisor` starts it.

To add a backend, register its class below, or name the class as "module:attribute" in the configuration. The class is
called with (base_model, config, progress). The annotation of its parameter `config` determines the class of the
configuration.
"""

import argparse
import contextlib
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from pydantic import ValidationError

from skyrl.backends import operations
from skyrl.backends.backend import AbstractBackend
from skyrl.backends.operations import (
    Completion,
    CreateModel,
    DeleteModel,
    LoadCheckpoint,
    LoadSnapshot,
    ModelOperation,
    Operation,
    Sample,
)
from skyrl.backends.registry import default_backend, find_backend, options_of
from skyrl.errors import BackendLost, RequestError, StorageError
from skyrl.tinker.config import EngineConfig, describe
from skyrl.tinker.engine.maintenance import Maintenance
from skyrl.tinker.engine.scheduler import Scheduler
from skyrl.tinker.engine.snapshot_policy import SnapshotPolicy
from skyrl.tinker.processes import heartbeat
from skyrl.tinker.processes.channel import ChannelClosed, EngineChannel
from skyrl.tinker.processes.messages import (
    Cancel,
    Done,
    DropVersion,
    Enqueue,
    Failed,
    Held,
    Lost,
    Metrics,
    NewTokens,
    Park,
    Progress,
    Ready,
    Refuse,
    RetryLater,
    Revive,
    Running,
    Shutdown,
    Start,
    Stored,
    ToEngine,
)
from skyrl.types import ErrorResponse, Result, SampleOutput, SaveOutput
from skyrl.utils.failpoints import crash_point
from skyrl.utils.locks.lease import engine_lock
from skyrl.utils.log import setup_logging
from skyrl.utils.machine import allow_many_files
from skyrl.utils.processes import die_with_parent

log = logging.getLogger("skyrl.tinker.engine")  # __name__ is __main__ in the engine process

LARGE_RESULT_BYTES = 2**20
"""Results of samples above this size are sent in pieces, with other frames in between."""
NICENESS = 5
"""Niceness of the engine process, so that the API process responds quickly while computation uses every core."""
QUIET_S = 0.25
"""Idle seconds before the engine prepares for later requests. One step of preparation takes longer than `QUIET_S`. It
should not delay clients that have just connected, or clients that send their next request when they receive a result.
"""
TELL_S = 0.25
"""Minimum seconds between two `Metrics` frames while the engine works."""
DRAIN = 0.6
"""Fraction of `shutdown_timeout_sec` for the last snapshots and writes of an orderly stop."""


class TinkerEngine:
    """Runs operations from `channel` on `backend`, in the order of a `Scheduler`."""

    def __init__(self, backend: AbstractBackend, channel: EngineChannel, config: EngineConfig):
        self.backend = backend
        self.channel = channel
        self._drain_s = DRAIN * config.shutdown_timeout_sec
        self.scheduler = Scheduler(config.gap_timeout_s, backend.info().samples_at_a_time)
        self.policy = SnapshotPolicy(
            every_steps=config.snapshot_every_steps,
            every_requests=config.snapshot_every_requests,
            every_bytes=config.snapshot_every_mib * 2**20,
        )
        self.maintenance = Maintenance(backend, self.scheduler, self.policy, config.path_of, channel.send)
        self._submitted: dict[str, Operation] = {}
        self._running: set[str] = set()
        """Requests in the last `Running` frame."""
        self._metrics = Metrics({}, {})
        """The last `Metrics` frame, sent at time `_told_at`."""
        self._told_at = -math.inf
        self._progress: deque[operations.Progress] = deque()
        """New tokens to send."""
        self._stored: deque[Stored] = deque()
        """`Stored` frames to send; a writer thread appends to this queue."""
        self._sent: deque[Operation] = deque()
        """Samples whose large results have been sent; the thread that sends appends to this queue."""
        self._stopping = False
        self._worked_at = time.monotonic()
        """Time of the last frame or computation."""
        self._unprepared = True
        """True if the backend may have something left to prepare."""
        self.step_began: float | None = None
        """Start of the current step on the monotonic clock; None while the engine waits."""
        backend.weigh(config.weights)
        backend.on_wake = channel.wake.set
        backend.on_quantum = self._about_to_run
        backend.on_stored = self._version_stored
        backend.on_progress = self._note_progress

    def run(self) -> None:
        """Run until a `Shutdown` frame arrives or the other process exits; then finish background writes.

        Raises:
            BackendLost: The backend cannot continue. Background writes are not finished, because a new engine recovers
                from snapshots and the log.
        """
        try:
            self.channel.send(Ready(self.backend.info()))
            while not self._stopping and not self.channel.closed:
                if not self.backend.busy:
                    self._tell_computed(self.backend.computed)
                    self._tell_counts()
                    self._rest()
                self.channel.wake.clear()
                self.step_began = time.monotonic()
                self.turn()
                self.step_began = None
            if self._stopping:
                self._snapshot_all()
        except ChannelClosed:
            log.warning("the API process has gone")
        except BackendLost as error:
            if error.request_ids is not None:
                self._tell_computed(error.request_ids)
            raise
        self.backend.close()
        if self._stopping:
            self.backend.abandon()
            with contextlib.suppress(ChannelClosed):
                self._deliver(self.backend.step())  # completions of these writes

    def turn(self) -> None:
        """Handle frames that have arrived, run one quantum, and send finished results."""
        frames = self.channel.take()
        for frame in frames:
            self._handle(frame)
        while self._sent:
            self.scheduler.done(self._sent.popleft())
        self.scheduler.expire(time.monotonic())
        for request_id, reason in self.scheduler.notices():
            self.channel.send(Held(request_id, reason))
        self._submit()
        busy = self.backend.busy
        self._deliver(self.backend.step() if busy else [])
        if busy or frames:
            self._worked_at = time.monotonic()
        self.maintenance.snapshot_due(time.monotonic())
        self._submit()
        if time.monotonic() - self._told_at > TELL_S:
            self._tell_counts()

    def _tell_counts(self) -> None:
        statistics = {**self.backend.statistics, "snapshots_failed": self.maintenance.snapshots_failed}
        metrics = Metrics(self.backend.metrics, statistics)
        if metrics != self._metrics:
            self._metrics, self._told_at = metrics, time.monotonic()
            self.channel.send(metrics)

    def _submit(self) -> None:
        while (operation := self.scheduler.next()) is not None:
            self._submitted[operation.request_id] = operation
            self.backend.submit(operation)

    def _deliver(self, completions: list[Completion]) -> None:
        if progress := tuple(one for one in self._take_progress() if one.request_id in self._submitted):
            self.channel.send(NewTokens(progress))
        if completions:
            crash_point("engine: quantum done, result not sent")
        for completion in completions:
            if completion.request_id in self.maintenance:
                self.maintenance.ended(completion)
                continue
            operation = self._submitted.pop(completion.request_id, None)
            if operation is None:  # cancelled just before it ended
                continue
            if isinstance(completion.result, SampleOutput) and completion.result.nbytes > LARGE_RESULT_BYTES:
                self._send_apart(operation, completion)
                continue
            asked_for = self.scheduler.done(operation)
            if isinstance(operation, ModelOperation):
                self._follow(operation, completion.result)
            if asked_for:
                self.channel.send(Done(completion.request_id, completion.result, completion.device_s))
        while self._stored:  # after the request that published it
            self.channel.send(self._stored.popleft())

    def _note_progress(self, progress: operations.Progress) -> None:
        self._progress.append(progress)

    def _take_progress(self) -> Iterator[operations.Progress]:
        while self._progress:
            yield self._progress.popleft()

    def _send_apart(self, operation: Operation, completion: Completion) -> None:
        """Send a sample's large result in the background.

        The sample counts against its tenant's `SampleWindow` until the result is sent.
        """

        def sent() -> None:
            self._sent.append(operation)
            self.channel.wake.set()

        self.channel.send_apart(Done(completion.request_id, completion.result, completion.device_s), sent)

    def _follow(self, operation: ModelOperation, result: Result) -> None:
        """Update the scheduler and the snapshot policy after an operation that may create, change or delete a model."""
        model_id = operation.model_id
        makes = isinstance(operation, CreateModel | LoadCheckpoint | LoadSnapshot)
        if isinstance(operation, DeleteModel):
            self.maintenance.forget(model_id, "its model was deleted")
        elif makes and isinstance(result, ErrorResponse) and not self.backend.has_model(model_id):
            self.maintenance.forget(model_id, "its model could not be made")
        elif self.scheduler.knows(model_id):
            self.policy.note(operation, whole=self.backend.has_own_base(model_id))
            if self.scheduler.finished(model_id) is None:
                crash_point("engine: model half revived")

    def _handle(self, frame: ToEngine) -> None:
        if isinstance(frame, Enqueue):
            self.scheduler.add(frame.operation, frame.seq_id, time.monotonic())
        elif isinstance(frame, Revive):
            self.scheduler.revive(frame.model_id, frame.next_seq_id, frame.operations)
        elif isinstance(frame, Park):
            self.maintenance.park(frame.model_id)
        elif isinstance(frame, Cancel):
            self._cancel(frame.request_id)
        elif isinstance(frame, Refuse):
            if not self.scheduler.refuse(frame.refusal):
                self.backend.refuse(frame.refusal)
        elif isinstance(frame, DropVersion):
            self.backend.drop_version(frame.version)
        elif isinstance(frame, RetryLater):
            self.scheduler.turned_away(frame.model_id, time.monotonic())
        elif isinstance(frame, Shutdown):
            self._stopping = True
        else:
            raise AssertionError(frame)

    def _cancel(self, request_id: str) -> None:
        if not self.scheduler.drop_sample(request_id) and request_id in self._submitted:
            self.backend.cancel(request_id)
            self.scheduler.done(self._submitted.pop(request_id))

    def _about_to_run(self, request_ids: tuple[str, ...]) -> None:
        """Report the requests that the backend is about to compute.

        The engine's own operations (snapshots, parking) are not reported, so a crash in them is not attributed to a
        request.
        """
        for request_id in request_ids:
            if request_id in self.maintenance:
                self.maintenance.begins(request_id)
        self._tell_computed((*request_ids, *self.backend.computed))
        crash_point("engine: before a quantum")

    def _tell_computed(self, request_ids: Iterable[str]) -> None:
        running = {request_id for request_id in request_ids if request_id not in self.maintenance}
        if running != self._running:
            self._running = running
            self.channel.send(Running(tuple(sorted(running))))

    def _version_stored(self, version: str, saved: SaveOutput) -> None:
        assert saved.digest is not None and saved.size_bytes is not None, saved
        self._stored.append(Stored(version, saved.path, saved.digest, saved.size_bytes))
        self.channel.wake.set()

    def _snapshot_all(self) -> None:
        """Drop unfinished operations, snapshot every changed model, and wait for all writes, within the time limit.

        Dropped requests stay pending; the next engine runs them.
        """
        for operation in self._submitted.values():
            if isinstance(operation, Sample):
                self.backend.cancel(operation.request_id)
        for operation in self.backend.abandon():
            if operation.request_id in self.maintenance:
                self.maintenance.abandoned(operation.request_id)
        deadline, tried = time.monotonic() + self._drain_s, set[str]()
        while (left_s := deadline - time.monotonic()) > 0:
            for model_id in self.policy.changed():
                if model_id not in tried and not self.policy.under_way(model_id):
                    tried.add(model_id)
                    self.maintenance.snapshot(model_id)
            under_way = any(self.policy.under_way(model_id) for model_id in tried)
            if not (under_way or self.backend.busy or self.backend.writing):
                return
            if self.backend.wait(left_s):
                self._deliver(self.backend.step())
        log.warning("%d models have no snapshot of their last steps; they are repeated", len(self.policy.changed()))

    def _rest(self) -> None:
        """Sleep until an event, or prepare for later requests if the engine has been idle for `QUIET_S`."""
        patience_s = self._patience_s()
        if self._unprepared and not self.channel.wake.is_set() and not self.backend.computed:
            left_s = self._worked_at + QUIET_S - time.monotonic()
            if left_s <= 0:
                self.step_began = time.monotonic()
                self._unprepared = self.backend.prepare()
                self.step_began = None
                return
            patience_s = left_s if patience_s is None else min(patience_s, left_s)
        self.channel.wake.wait(patience_s)

    def _patience_s(self) -> float | None:
        """Return the seconds until the next deadline of a held request, a snapshot's retry or the backend. None: there
        is no deadline."""
        now = time.monotonic()
        deadline = min(self.scheduler.deadline(), self.policy.deadline(now))
        if (left_s := self.backend.time_left()) is not None:
            deadline = min(deadline, now + left_s)
        return None if deadline == math.inf else max(0.0, deadline - now)


def open_backend(config: EngineConfig, progress: Callable[[str], None]) -> AbstractBackend:
    """Load the base model with the configured backend. Raises `RequestError` for a bad option or model."""
    name = config.backend or default_backend()
    why = "" if config.backend else ", as none is named and torch sees " + ("no GPU" if name == "jax" else "a GPU")
    progress(f"importing the {name} backend{why}")
    backend = find_backend(name)
    options, given = options_of(backend), dict(config.backend_config)
    if config.engines and "engines" not in options.model_fields:
        raise RequestError(
            f"external_inference_url={', '.join(config.external_inference_url)}: the {name} backend samples by itself; "
            "leave it out, or serve with --backend torch"
        )
    if config.engines:
        given["engines"] = given.get("engines", {}) | config.engines
    try:
        backend_config = options.model_validate(given)
    except ValidationError as error:
        known = ", ".join(options.model_fields)
        problems = describe(error, known=options.model_fields)
        raise RequestError(f"backend_config: {problems} (options of {name}: {known})") from None
    return backend(config.base_model or _builtin_model(progress), backend_config, progress)


def _load_transformers_without_torch() -> None:
    """Import the configuration classes of transformers, but not torch, which takes a second to import."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # otherwise transformers advises to install torch
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType] (what Python does for a module that is not there)
    try:
        import skyrl.tx.models.configs  # noqa: F401
    finally:
        del sys.modules["torch"]


def _builtin_model(progress: Callable[[str], None]) -> str:
    from skyrl.tx.synthetic.make_model import builtin_model

    progress("preparing the built-in model")
    return str(builtin_model())


def serve(channel: EngineChannel, alone: bool = False) -> int:
    """Run an engine on a channel. Returns its exit status.

    Args:
        channel: Channel to the API process.
        alone: True if the process runs only this engine. It then exits at once when the API process has exited.
    """
    try:
        start = channel.receive()
    except ChannelClosed:
        return 0
    assert isinstance(start, Start), start
    config = start.config
    name = config.backend or default_backend()
    setup_logging(config.log_level, "engine", config.log_format)
    if alone:
        channel.listen(_leave)
        if name == "jax" and "torch" not in sys.modules:  # detection of GPUs may have imported torch
            _load_transformers_without_torch()
    else:
        channel.listen()

    loading_since = time.monotonic()

    def progress(message: str) -> None:
        nonlocal loading_since
        loading_since = time.monotonic()
        log.info("%s", message)
        channel.send(Progress(message))

    engine: TinkerEngine | None = None
    if alone:
        heartbeat.start(channel, config, lambda: engine.step_began if engine else loading_since)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(engine_lock(config.checkpoints_folder, progress))
            backend = open_backend(config, progress)
            progress("preparing for a first sample")
            backend.prepare_first()
        except ChannelClosed:
            return 1
        except (RequestError, StorageError) as error:
            message = str(error)
        except Exception as error:
            log.exception("cannot load the backend")
            message = f"cannot load the {name} backend: {type(error).__name__}: {error}"
        else:
            engine = TinkerEngine(backend, channel, config)
            try:
                engine.run()
                return 0
            except BackendLost as error:
                log.critical("the backend is lost: %s", error)
                with contextlib.suppress(ChannelClosed):
                    channel.send(Lost(str(error)))
                if alone:
                    _leave()
                raise
    with contextlib.suppress(ChannelClosed):
        channel.send(Failed(message))
    return 1


def _leave() -> None:
    """Exit at once, even during computations and writes, because no API process would record the results.

    Folders stay consistent: a folder gets its name only when it is complete.
    """
    os._exit(1)


def _deliver_shutdown(channel: EngineChannel) -> None:
    """Deliver a shutdown from a thread.

    A signal handler runs in the main thread, which may hold the locks that `deliver` needs.
    """
    threading.Thread(target=channel.deliver, args=[Shutdown()]).start()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m skyrl.tinker.engine`."""
    parser = argparse.ArgumentParser(
        prog="python -m skyrl.tinker.engine",
        description="The engine process. Started by the API process (skyrl serve); of no use by itself.",
    )
    parser.add_argument("--fd", type=int, required=True, help="Inherited socket to the API process.")
    fd = parser.parse_args(argv).fd
    os.set_inheritable(fd, False)
    link = socket.socket(fileno=fd)
    die_with_parent(link)
    channel = EngineChannel(link)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, stack: _deliver_shutdown(channel))
    os.nice(NICENESS)
    allow_many_files()
    return serve(channel, alone=True)
