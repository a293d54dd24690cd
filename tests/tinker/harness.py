"""A real server over HTTP with the fake backend: uvicorn and the engine loop each in a thread of this process."""

import asyncio
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn

from skyrl.tinker.config import EngineConfig
from skyrl.tinker.database.database import Database
from skyrl.tinker.engine import TinkerEngine
from skyrl.tinker.http.app import create_app
from skyrl.tinker.http.connections import Connection
from skyrl.tinker.processes.channel import ApiChannel, ChannelClosed, EngineChannel
from skyrl.tinker.processes.messages import Done, FromEngine, Metrics, Ready, Shutdown, ToEngine
from skyrl.tinker.wire.proto import skyrl_tinker_pb2 as pb
from skyrl.types import BackendInfo
from tests.fakes import FakeBackend, FakeConfig

PROTOBUF = "application/x-protobuf"
BASE_MODEL = "fake/model"
PAUSE_S = 0.002
"""Between two looks at whether a server has come up."""


class ThreadEngine:
    """The engine loop in a thread, behind the interface of `EngineSupervisor`. Tests make it crash and recover."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_frame: Callable[[FromEngine], None],
        on_crash: Callable[[str], None],
        on_failure: Callable[[str], None],
    ):
        self.config = config
        self.state = "starting"
        self.progress = "starting the engine"
        self.info: BackendInfo | None = None
        self.metrics: dict[str, int] = {}
        self.statistics: dict[str, int] = {}
        self.slow_calls = ()
        self.pid: int | None = None
        self.sent: list[ToEngine] = []
        self.done: list[str] = []
        """Requests in the order of their ends."""
        self.gate: threading.Semaphore | None = None
        """Gate that calls of the backend that compute have to pass."""
        self._on_frame = on_frame
        self._on_crash = on_crash
        self._on_failure = on_failure
        self._channel: ApiChannel | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self.config.backend != "held back":
            self.loop = asyncio.get_running_loop()
            self._task = asyncio.create_task(self._run())

    def send(self, frame: ToEngine) -> None:
        if self._channel is not None and self.state == "ready":
            self.sent.append(frame)
            self._channel.send(frame)

    def kill(self) -> None:
        """The server is told to stop at once; there is no process to kill."""

    async def stop(self) -> None:
        if self._channel is not None:
            self._channel.send(Shutdown())
        if self._task is not None:
            await self._task

    def fail(self, message: str) -> None:
        """No engine can be started."""
        self.state = "failed"
        self._on_failure(message)

    def hold(self) -> None:
        """Stop the engine at its next call that computes."""
        self.gate = self.backend.gate = threading.Semaphore(0)

    def let_go(self) -> None:
        """Let it work again."""
        gate, self.gate, self.backend.gate = self.gate, None, None
        assert gate is not None
        gate.release()

    async def crash(self, reason: str = "the engine was killed by SIGKILL") -> None:
        """The engine ends by itself."""
        assert self._channel is not None and self._task is not None
        channel, self._channel = self._channel, None
        await channel.close()
        await self._task
        self.state = self.progress = "restarting"
        self._on_crash(reason)

    async def recover(self) -> None:
        """A new engine takes over."""
        self._task = asyncio.create_task(self._run())
        while self.state != "ready":
            await asyncio.sleep(0.001)

    async def _run(self) -> None:
        ours, its = socket.socketpair()
        channel = EngineChannel(its)
        channel.listen()
        self.inbox = channel._inbox
        self.backend = backend = FakeBackend(BASE_MODEL, FakeConfig(**self.config.backend_config))
        backend.gate = self.gate
        thread = threading.Thread(target=_work, args=[TinkerEngine(backend, channel, self.config)])
        thread.start()
        self._channel = api = await ApiChannel.open(ours)
        async for frame in api.frames():
            if isinstance(frame, Ready):
                self.info, self.state, self.progress = frame.info, "ready", "ready"
            elif isinstance(frame, Metrics):
                self.metrics, self.statistics = frame.values, frame.statistics
            elif isinstance(frame, Done):
                self.done.append(frame.request_id)
            self._on_frame(frame)
        await asyncio.to_thread(thread.join)
        await api.close()


def _work(engine: TinkerEngine) -> None:
    try:
        engine.run()
    except (ChannelClosed, ValueError):
        pass  # the test has closed the other end
    finally:
        engine.channel.close()


@cache
def empty_database() -> bytes:
    """The file of a database that a server has just made: migrations take longer than all else about a start."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "server.db"
        Database(f"sqlite:///{file}").close()
        return file.read_bytes()


class LiveServer:
    """A server on a free port. State is in `folder`, so a second one continues where the first stopped.

    All tests with real processes make their databases as servers do.
    """

    def __init__(self, folder: Path, **options: Any):
        self.folder = folder
        self._database = folder / "server.db"
        self.config = EngineConfig(
            **{
                "base_model": BASE_MODEL,
                "model_aliases": ["alias"],
                "checkpoints_base": folder / "checkpoints",
                "database_url": f"sqlite:///{self._database}",
                "long_poll_s": 0.1,
                "port": 0,
                **options,
            }
        )

    def __enter__(self) -> "LiveServer":
        own = self.config.database_url == f"sqlite:///{self._database}"
        if own and self.folder.is_dir() and not self._database.exists():
            self._database.write_bytes(empty_database())
        self.app = create_app(self.config, ThreadEngine)
        self._listener = socket.create_server(("127.0.0.1", self.config.port))
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self._listener.getsockname()[1]}/api/v1",
            headers={"X-API-Key": "tml-test"},
            timeout=60,
        )
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(self.app, http=Connection, log_config=None, timeout_graceful_shutdown=1)
        )
        self._thread = threading.Thread(target=self._uvicorn.run, kwargs={"sockets": [self._listener]})
        self._thread.start()
        while not self._uvicorn.started:
            assert self._thread.is_alive(), "the server did not start"
            time.sleep(PAUSE_S)  # which it has the interpreter for
        return self

    def __exit__(self, *_: object) -> None:
        if self.engine.gate is not None:  # of a test that failed
            self.engine.let_go()
        self.http.close()
        self._uvicorn.should_exit = True
        self._thread.join()
        self._listener.close()

    @property
    def url(self) -> str:
        """Address for clients of the SDK."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def engine(self) -> ThreadEngine:
        return self.app.state.server.service.engine

    def on_loop(self, coroutine: Any) -> Any:
        """Run a coroutine on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.engine.loop).result(60)

    def crash(self) -> None:
        self.on_loop(self.engine.crash())

    def recover(self) -> None:
        self.on_loop(self.engine.recover())

    # -- requests -----------------------------------------------------------------------------------------------------

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self.http.request(method, path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.request("POST", path, json=body, **options)

    def ok(self, path: str, body: Any = None, **options: Any) -> Any:
        response = self.post(path, body, **options)
        assert response.status_code == 200, response.text
        return response.json()

    def at_once(self, *calls: Callable[[], Any]) -> list[Any]:
        """Results of calls made at the same time."""
        with ThreadPoolExecutor(len(calls)) as pool:
            return [future.result() for future in [pool.submit(call) for call in calls]]

    def poll(self, request_id: str, accept: str = PROTOBUF) -> httpx.Response:
        return self.post("/retrieve_future", {"request_id": request_id}, headers={"Accept": accept})

    def outcome(self, request_id: str, accept: str = PROTOBUF) -> httpx.Response:
        """The final answer to `retrieve_future`."""
        for _ in range(600):
            if (response := self.poll(request_id, accept)).status_code != 408:
                return response
        raise AssertionError(f"{request_id} does not finish: {response.text}")

    def result(self, request_id: str) -> Any:
        """The JSON result of a request that succeeds."""
        response = self.outcome(request_id)
        assert response.status_code == 200 and "error" not in response.json(), response.text
        return response.json()

    def failure(self, request_id: str) -> dict[str, str]:
        """The body of a failed future."""
        response = self.outcome(request_id)
        assert response.status_code == 200 and response.headers["content-type"] == "application/json", response.text
        assert set(response.json()) == {"error", "category"}, response.text
        return response.json()

    def run(self, path: str, body: Any) -> Any:
        """Submit and await."""
        return self.result(self.ok(path, body)["request_id"])

    # -- shorthands ---------------------------------------------------------------------------------------------------

    def session(self) -> str:
        return self.ok("/create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"})["session_id"]

    def model(self, session: str | None = None, number: int = 0, **options: Any) -> str:
        body = {"session_id": session or self.session(), "model_seq_id": number, "base_model": BASE_MODEL}
        return self.run("/create_model", {**body, "lora_config": {"rank": 4, "seed": 1}, **options})["model_id"]

    def submit_pass(self, model: str, seq_id: int, tokens: list[int] | None = None, **options: Any) -> str:
        """Submit a forward_backward in protobuf. Returns its request id."""
        body = pass_request(model, seq_id, [tokens or [1, 2, 3]], **options).SerializeToString()
        response = self.request("POST", "/forward_backward", content=body, headers={"Content-Type": PROTOBUF})
        assert response.status_code == 200, response.text
        return response.json()["request_id"]

    def pass_result(self, request_id: str) -> pb.ForwardBackwardOutput:
        response = self.outcome(request_id)
        assert response.headers["content-type"] == PROTOBUF, response.text
        return pb.ForwardBackwardOutput.FromString(response.content)

    def submit_step(self, model: str, seq_id: int, learning_rate: float = 0.1) -> str:
        body = {"model_id": model, "seq_id": seq_id, "adam_params": {"learning_rate": learning_rate}}
        return self.ok("/optim_step", body)["request_id"]

    def train(self, model: str, seq_id: int, tokens: list[int] | None = None) -> int:
        """A pass and a step. Returns the next seq_id."""
        self.pass_result(self.submit_pass(model, seq_id, tokens))
        self.result(self.submit_step(model, seq_id + 1))
        return seq_id + 2

    def logprobs(self, model: str, seq_id: int) -> list[float]:
        """Return the log-probabilities that the model's weights give a fixed datum."""
        result = self.pass_result(self.submit_pass(model, seq_id, forward_only=True))
        return np.frombuffer(result.loss_fn_outputs[0].fields["logprobs"].data, "<f4").tolist()

    def sampler(self, session: str, number: int, **source: Any) -> str:
        body = {"session_id": session, "sampling_session_seq_id": number, **source}
        return self.ok("/create_sampling_session", body)["sampling_session_id"]

    def submit_sample(self, sampler: str, seq_id: int, **options: Any) -> dict[str, Any]:
        return self.ok("/asample", sample_request(sampler, seq_id, **options))

    def sample(self, sampler: str, seq_id: int, **options: Any) -> list[list[int]]:
        """Tokens of each sequence."""
        response = self.outcome(self.submit_sample(sampler, seq_id, **options)["request_id"])
        assert response.headers["content-type"] == PROTOBUF, response.text
        sequences = pb.SampleResponse.FromString(response.content).sequences
        return [np.frombuffer(sequence.tokens, "<i4").tolist() for sequence in sequences]


def wait_until_ready(server: LiveServer) -> None:
    while server.http.get("/healthz").status_code != 200:
        time.sleep(PAUSE_S)


def pass_request(
    model: str, seq_id: int, rows: list[list[int]], forward_only: bool = False, loss_fn: str = "cross_entropy"
) -> pb.ForwardBackwardRequest:
    """Rows of tokens that each predict themselves."""
    request = pb.ForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn=loss_fn, forward_only=forward_only)
    for tokens in rows:
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(tokens, "<i4").tobytes()
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dense, targets.dtype = np.asarray(tokens, "<i8").tobytes(), pb.DTYPE_INT64
        targets.shape.append(len(tokens))
    return request


def loss_request(session: str, number: int = 0) -> dict[str, Any]:
    """`create_custom_loss` of the sum of log-probabilities."""
    result = {"tuple": [{"ref": "sum"}, {"dict": {}}]}
    nodes = [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        {"op": "call_method", "name": "sum", "target": "sum", "args": [{"ref": "logprobs"}]},
        {"op": "output", "name": "output", "target": "output", "args": [result]},
    ]
    inputs = [{"name": "logprobs", "rank": 1}]
    place = {"session_id": session, "custom_loss_seq_id": number}
    return {**place, "name": "own", "inputs": inputs, "graph": {"nodes": nodes}}


def sample_request(sampler: str, seq_id: int, **options: Any) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4, "temperature": 0.0, "stop": []},
        **options,
    }
