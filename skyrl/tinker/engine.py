"""The engine process: takes operations off the channel, orders them, and drives the backend one quantum at a time.

`TinkerEngine.turn` is the whole loop: frames in, what may go to the backend, one quantum, results out. With nothing to
do it sleeps until a frame arrives, background work ends or a held request expires; nothing polls. It knows no SQL and
no HTTP, and is started by `skyrl.tinker.supervisor`.

To add a backend, register its class below, or name it as "module:attribute" in the configuration. It is called with
(base_model, config, progress) and the class of its configuration is read from the annotation of `config`.
"""

import argparse
import contextlib
import inspect
import logging
import math
import os
import pkgutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence

from pydantic import ValidationError

from skyrl.backends.executor import Executor
from skyrl.backends.operations import Operation
from skyrl.errors import RequestError, StorageError
from skyrl.tinker.channel import (
    Cancel,
    ChannelClosed,
    Done,
    DropVersion,
    EngineChannel,
    Enqueue,
    Failed,
    Held,
    Progress,
    Ready,
    Shutdown,
    Start,
    ToEngine,
)
from skyrl.tinker.config import EngineConfig, describe
from skyrl.tinker.scheduler import Item, Scheduler
from skyrl.utils.log import setup_logging
from skyrl.utils.registry import Registry

log = logging.getLogger("skyrl.tinker.engine")  # __name__ is __main__ in the engine process

BACKENDS: Registry[str] = Registry("backend")
"""module:attribute of each backend class, imported only when it is asked for."""
BACKENDS.register("jax")("skyrl.backends.jax:JaxBackend")

NICENESS = 5
"""Keeps the API process quick while computation uses every core."""
ORPHAN_S = 10.0
"""Seconds that the engine may go on computing after the API process has gone."""


class TinkerEngine:
    """Serves the operations that arrive on `channel` with `backend`, in the order that a `Scheduler` decides."""

    def __init__(self, backend: Executor, channel: EngineChannel, gap_timeout_s: float):
        self.backend = backend
        self.channel = channel
        self.scheduler = Scheduler(gap_timeout_s)
        self._submitted: dict[str, Operation] = {}
        self._stopping = False
        backend.on_wake = channel.wake.set

    def run(self) -> None:
        """Work until a `Shutdown` frame, or until the other process has gone; then finish background writes."""
        try:
            self.channel.send(Ready(self.backend.info()))
            while not self._stopping and not self.channel.closed:
                if not self.backend.busy:
                    self.channel.wake.wait(self._patience_s())
                self.channel.wake.clear()
                self.turn()
        except ChannelClosed:
            log.warning("the API process has gone")
        finally:
            self.backend.close()

    def turn(self) -> None:
        """Take in what has arrived, run one quantum, send what is finished."""
        for frame in self.channel.take():
            self._handle(frame)
        self.scheduler.expire(time.monotonic())
        for request_id, reason in self.scheduler.notices():
            self.channel.send(Held(request_id, reason))
        self._submit()
        if self.backend.busy:
            for completion in self.backend.step():
                operation = self._submitted.pop(completion.request_id, None)  # None: cancelled just before its end
                if operation is not None and self.scheduler.done(operation):
                    self.channel.send(Done(completion.request_id, completion.result))
            self._submit()

    def _submit(self) -> None:
        while (operation := self.scheduler.next()) is not None:
            self._submitted[operation.request_id] = operation
            self.backend.submit(operation)

    def _handle(self, frame: ToEngine) -> None:
        if isinstance(frame, Enqueue):
            self.scheduler.add(Item(frame.tenant, frame.operation, frame.seq_id), time.monotonic())
        elif isinstance(frame, Cancel):
            self._cancel(frame.request_id)
        elif isinstance(frame, DropVersion):
            self.backend.drop_version(frame.version)
        elif isinstance(frame, Shutdown):
            self._stopping = True
        else:
            raise AssertionError(frame)

    def _cancel(self, request_id: str) -> None:
        if not self.scheduler.drop_sample(request_id) and request_id in self._submitted:
            self.backend.cancel(request_id)
            self.scheduler.done(self._submitted.pop(request_id))

    def _patience_s(self) -> float | None:
        """Seconds until a held request expires; None if none is held."""
        deadline = self.scheduler.deadline()
        return None if deadline == math.inf else max(0.0, deadline - time.monotonic())


def open_backend(config: EngineConfig, progress: Callable[[str], None]) -> Executor:
    """Load the base model with the configured backend. Raises `RequestError` for a bad option or model."""
    progress(f"importing the {config.backend} backend")
    try:
        where = config.backend if ":" in config.backend else BACKENDS[config.backend]
        backend = pkgutil.resolve_name(where)
    except KeyError as error:
        raise RequestError(f"backend={config.backend}: {error.args[0]}, or module:attribute") from None
    except (ImportError, AttributeError) as error:
        raise RequestError(
            f"backend={config.backend}: cannot import it ({error}); check its name and that it is installed"
        ) from error
    options = inspect.signature(backend, eval_str=True).parameters["config"].annotation
    try:
        backend_config = options.model_validate(config.backend_config)
    except ValidationError as error:
        known = ", ".join(options.model_fields)
        raise RequestError(f"backend_config: {describe(error)} (options of {config.backend}: {known})") from None
    return backend(config.base_model or _builtin_model(progress), backend_config, progress)


def _builtin_model(progress: Callable[[str], None]) -> str:
    from skyrl.tx.make_model import builtin_model

    progress("preparing the built-in model")
    return str(builtin_model())


def serve(channel: EngineChannel, on_close: Callable[[], None] = lambda: None) -> int:
    """The life of an engine on its channel. Returns its exit status. `on_close` is called when the API has gone."""
    try:
        start = channel.receive()
    except ChannelClosed:
        return 0
    assert isinstance(start, Start), start
    config = start.config
    setup_logging(config.log_level, process="engine")
    channel.listen(on_close)

    def progress(message: str) -> None:
        log.info("%s", message)
        channel.send(Progress(message))

    try:
        backend = open_backend(config, progress)
    except ChannelClosed:
        return 1
    except (RequestError, StorageError) as error:
        message = str(error)
    except Exception as error:
        log.exception("cannot load the backend")
        message = f"cannot load the {config.backend} backend: {type(error).__name__}: {error}"
    else:
        TinkerEngine(backend, channel, config.gap_timeout_s).run()
        return 0
    with contextlib.suppress(ChannelClosed):
        channel.send(Failed(message))
    return 1


def _leave_soon() -> None:
    """End the process even if a long computation keeps it from seeing that nobody waits for it."""
    timer = threading.Timer(ORPHAN_S, os._exit, [1])
    timer.daemon = True
    timer.start()


def _deliver_shutdown(channel: EngineChannel) -> None:
    """From a thread, because the main thread, which runs signal handlers, may hold the locks that this needs."""
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
    channel = EngineChannel(socket.socket(fileno=fd))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, stack: _deliver_shutdown(channel))
    os.nice(NICENESS)
    return serve(channel, on_close=_leave_soon)


if __name__ == "__main__":
    raise SystemExit(main())
