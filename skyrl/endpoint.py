"""The trainer's HTTP endpoint: the policy of a run behind the OpenAI, Anthropic and generate routes.

It is the server's application with another engine: `PolicyEngine` passes samples to the policy, which draws them with
the weights that were published last. Captures, retries, streams, limits and errors are those of the server.
"""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from skyrl.backends.operations import Sample
from skyrl.backends.statistics import Statistics
from skyrl.errors import ConfigError, RequestError
from skyrl.tinker.config import EngineConfig, url_of
from skyrl.tinker.http.app import create_app
from skyrl.tinker.http.connections import Connection
from skyrl.tinker.processes.messages import Cancel, Done, Enqueue, FromEngine, NewTokens, Ready, ToEngine
from skyrl.tinker.server import TinkerServer
from skyrl.train.policies.policy import Endpoint
from skyrl.types import BackendInfo, ErrorResponse, Result
from skyrl.utils.slow_calls import SlowCall

log = logging.getLogger(__name__)

FIELD = "generator.inference_engine.http_endpoint_port"


class PolicyEngine:
    """The policy of a run, behind the interface of an engine process.

    Args:
        policy: The policy.
        temperatures: Temperatures at which the run samples.
        loop: Event loop of the trainer, on which the policy is called.
        config: Options of the server.
        on_frame: Called on the server's event loop with the ends of samples.
    """

    def __init__(
        self,
        policy: Endpoint,
        temperatures: Collection[float],
        loop: asyncio.AbstractEventLoop,
        config: EngineConfig,
        *,
        on_frame: Callable[[FromEngine], None],
        on_crash: Callable[[str], None],
        on_failure: Callable[..., None],
    ):
        self._policy = policy
        self._temperatures = temperatures
        self._policy_loop = loop
        self._on_frame = on_frame
        self._running: dict[str, Future[Result]] = {}
        self.state = self.progress = "ready"
        self.info: BackendInfo | None = None
        self.metrics: dict[str, int] = {}
        self.statistics: Statistics = {}
        self.slow_calls: tuple[SlowCall, ...] = ()
        self.pid: int | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.info = self._policy.info()
        self._on_frame(Ready(self.info))

    def send(self, frame: ToEngine) -> None:
        if isinstance(frame, Cancel) and (running := self._running.pop(frame.request_id, None)) is not None:
            running.cancel()
        if isinstance(frame, Enqueue):
            assert isinstance(frame.operation, Sample)
            request_id = frame.operation.request_id
            drawing = asyncio.run_coroutine_threadsafe(self._draw(frame.operation), self._policy_loop)
            self._running[request_id] = drawing
            drawing.add_done_callback(lambda _: self._call(self._ended, request_id, drawing))

    def kill(self) -> None:
        for drawing in self._running.values():
            drawing.cancel()

    async def stop(self) -> None:
        self.kill()

    async def _draw(self, sample: Sample) -> Result:
        if sample.params.temperature not in self._temperatures:
            return ErrorResponse(
                f"temperature={sample.params.temperature:g}: this run samples, and computes log-probabilities, at "
                f"{' or '.join(f'{one:g}' for one in sorted(self._temperatures))}; send that",
                "user",
            )
        try:
            return await self._policy.draw(sample, lambda report: self._call(self._on_frame, NewTokens((report,))))
        except RequestError as error:
            return ErrorResponse(str(error), "user")
        except Exception as error:
            log.error("a request of the endpoint failed", exc_info=error)
            return ErrorResponse(str(error))

    def _ended(self, request_id: str, drawing: "Future[Result]") -> None:
        if self._running.pop(request_id, None) is not None:
            result = ErrorResponse("the run has ended") if drawing.cancelled() else drawing.result()
            self._on_frame(Done(request_id, result))

    def _call(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the server's event loop, unless the server has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)


@contextmanager
def serve_policy(
    policy: Endpoint, temperatures: Collection[float], folder: Path, host: str, port: int, names: tuple[str, ...]
) -> Iterator[str]:
    """Serve a policy. The context is the address.

    Args:
        policy: The policy. It is called on the running event loop.
        temperatures: Temperatures at which the run samples. Requests with others are rejected.
        folder: Folder of the endpoint's database.
        host: Address to listen on.
        port: Port; 0 for a free one.
        names: Names of the model for clients.

    Raises:
        ConfigError: The port is in use.
    """
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        why = f"{FIELD}={port} on {host}: {error.strerror}; set another one, or 0 for a free one"
        raise ConfigError(why) from error
    folder.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {
        "base_model": names[0],
        "model_aliases": names[1:],
        "host": host,
        "insecure": True,
        "checkpoints_base": folder / "checkpoints",
        "database_url": f"sqlite:///{folder / 'endpoint.db'}",
    }
    config = EngineConfig(**options)
    app = create_app(config, partial(PolicyEngine, policy, temperatures, asyncio.get_running_loop()), only_samples=True)
    quiet: dict[str, Any] = {"log_config": None, "log_level": "warning", "access_log": False}
    http = uvicorn.Server(uvicorn.Config(app, http=Connection, lifespan="off", timeout_graceful_shutdown=1, **quiet))
    begun: Future[None] = Future()

    async def serve() -> None:
        server: TinkerServer = app.state.server
        try:
            await server.start()
        except BaseException as error:
            begun.set_exception(error)
            return
        begun.set_result(None)
        try:
            await http.serve(sockets=[listener])
        finally:
            await server.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="endpoint", daemon=True)
    with listener:
        thread.start()
        try:
            begun.result()
            url = url_of(*listener.getsockname()[:2])
            log.info("the policy is served at %s/v1", url)
            yield url
        finally:
            http.should_exit = True
            thread.join()
