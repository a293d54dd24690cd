"""A backend that computes elsewhere: a trainer and a sampler, worker processes behind pipes, hold all by handles.

Nothing here waits for them, and nothing here is policy: a quantum is a command and its arguments.
"""

import contextlib
import dataclasses
import itertools
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from skyrl.backends import operations
from skyrl.backends.executor import Executor, FairQueue, Quantum, Work, failure
from skyrl.backends.operations import Completion, ModelOperation, Progress, Sample
from skyrl.backends.statistics import Statistics
from skyrl.errors import BackendLost, RequestError
from skyrl.types import BackendInfo, ForwardBackwardOutput, LoraConfig, ModelOutput, OptimStepOutput, Result, SaveOutput
from tests.remote_worker import BASE_ID, TILE, Adapter, RemoteConfig

UNSERVED = ["tempered_logprobs", "topk_sample_logprobs", "topk_prompt_logprobs", "prompt_alt_tokens_k"]
UNSERVED += ["target_prompt_logprobs", "prompt_logprobs_last_n", "top_k", "top_p"]
MAX_RANK = 64


class Remote:
    """A worker process. Answers are futures, which a thread resolves; what it says unasked goes to `hear`."""

    def __init__(self, name: str, config: RemoteConfig, hear: Callable[[Any], None], lost: Callable[..., None]):
        ours, its = socket.socketpair()
        program = f"from tests.remote_worker import work; work({its.fileno()}, {config.model_dump_json()!r})  # {name}"
        options = {"pass_fds": [its.fileno()], "cwd": Path(__file__).parents[1], "stdin": subprocess.DEVNULL}
        self.process = subprocess.Popen([sys.executable, "-c", program], **options)
        its.close()
        self._name, self._hear, self._lost = name, hear, lost
        self._pipe, self._numbers, self._closing = Connection(ours.detach()), itertools.count(), False
        self._futures: dict[int, Future[list[Any]]] = {}
        self.gate: threading.Semaphore | None = None
        """Gate that each message of the worker has to pass."""
        self._end: BackendLost | None = None
        self._lock, self._thread = threading.Lock(), threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def ask(self, *commands: tuple[Any, ...]) -> "Future[list[Any]]":
        with self._lock:
            if self._end is not None:
                raise self._end
            self._futures[number := next(self._numbers)] = future = Future()
        self._send((number, commands))
        return future

    def tell(self, *command: Any) -> None:
        self._send((None, [command]))

    def close(self) -> None:
        self._closing = True
        self.process.kill()
        self.open_gate()
        self._thread.join()
        self._pipe.close()

    def open_gate(self) -> None:
        """Let through all that the worker has said and will say."""
        gate, self.gate = self.gate, None
        if gate is not None:
            gate.release()

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # it has ended, as `_read` is about to say
            self._pipe.send(message)

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, answer = self._pipe.recv()
                if (gate := self.gate) is not None:
                    gate.acquire()
                if number is None:
                    self._hear(answer)
                elif isinstance(answer, Exception):
                    self._futures.pop(number).set_exception(answer)
                else:
                    self._futures.pop(number).set_result(answer)
        status = self.process.wait()
        if self._closing:
            return
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        with self._lock:
            self._end = BackendLost(f"the {self._name} (process {self.process.pid}) {how}", ())
        for future in self._futures.values():
            future.set_exception(BackendLost(str(self._end)))
        self._lost(self._end)


class RemoteSampler:
    """Draws nothing here: hands requests on, as many as run at a time, and takes in what comes back."""

    running = ()

    def __init__(self, backend: "RemoteBackend"):
        self._backend = backend
        self._waiting: FairQueue[tuple[Sample, int | None]] = FairQueue()
        self._asked: dict[str, Sample] = {}
        self._dropped: set[int] = set()
        self.news: deque[Progress | BackendLost | tuple[str, Result | Exception]] = deque()

    @property
    def busy(self) -> bool:
        return bool(self.news or (self._waiting and len(self._asked) < self._backend.config.samples))

    @property
    def elsewhere(self) -> tuple[str, ...]:
        return tuple(self._asked)

    @property
    def statistics(self) -> Statistics:
        return {}

    def add(self, request: Sample) -> None:
        filters = {"top_k": request.params.top_k > 0, "top_p": request.params.top_p < 1}
        if given := [name for name, value in {**vars(request), **filters}.items() if name in UNSERVED and value]:
            raise RequestError(f"{given} is not served by this backend; leave it out")
        self._waiting.add(request, (request, self._backend.version(request)))
        self._hand_on()

    def weigh(self, weights: Mapping[str, float]) -> None:
        self._waiting.weigh(weights)

    def _hand_on(self) -> None:
        free = max(0, self._backend.config.samples - len(self._asked))
        for request, handle in itertools.islice(self._waiting.order(), free):
            self._waiting.begin(request.request_id)
            self._asked[request.request_id] = request
            self._backend.sampling.tell("draw", request, handle)
        for handle in self._dropped - {handle for _, handle in self._waiting}:
            self._dropped.remove(handle)
            self._backend.sampling.tell("free", handle)

    def drop(self, handle: int) -> None:
        """Free a version once nobody waits for it."""
        self._dropped.add(handle)
        self._hand_on()

    def cancel(self, request_id: str) -> None:
        self._waiting.remove(request_id)
        if self._asked.pop(request_id, None):
            self._backend.sampling.tell("cancel", request_id)

    def burst(self) -> list[Completion]:
        completions = []
        while self.news:
            news = self.news.popleft()
            if isinstance(news, BackendLost):
                raise BackendLost(str(news), self.elsewhere)
            if isinstance(news, Progress):
                if request := self._asked.get(news.request_id):
                    self._waiting.charge(request.tenant, len(news.tokens))
                    self._backend.on_progress(news)
            elif request := self._asked.pop(news[0], None):
                result = failure(request, news[1]) if isinstance(news[1], Exception) else news[1]
                completions.append(Completion(news[0], result))
        self._hand_on()
        return completions


class RemoteBackend(Executor):
    """Commands of its workers in place of arithmetic."""

    config: RemoteConfig

    def __init__(self, base_model: str, config: RemoteConfig, progress: Callable[[str], None] = lambda message: None):
        super().__init__(base_model, config)
        progress("starting the workers")
        self.sampler: RemoteSampler = RemoteSampler(self)
        self.training = Remote("trainer", config, print, self.lose)
        self.sampling = Remote("sampler", config, self._heard, self._heard)
        self.models, self.versions = dict[str, int](), dict[str, int]()
        self._handles = itertools.count()
        self.configure(config)
        _ = self.training.ask().result(), self.sampling.ask().result()  # they are there

    def configure(self, config: RemoteConfig) -> None:
        """Go on like this."""
        self.config, self.in_flight, self.deadline_s = config, config.in_flight, config.deadline_s
        self.training.tell("configure", config)
        self.sampling.tell("configure", config)

    def info(self) -> BackendInfo:
        return BackendInfo(self.base_model, "Bigram", self.config.vocab_size, 1024, MAX_RANK, "", base_id=BASE_ID)

    def has_model(self, model_id: str) -> bool:
        return model_id in self.models

    def close(self) -> None:
        super().close()
        self.training.close()
        self.sampling.close()

    def discard_gradients(self, model_id: str) -> None:
        if model_id in self.models:
            self.training.tell("clear", self.models[model_id])

    def most_together(self, kind: Hashable) -> int:
        return self.config.ranks

    def compute(self, quanta: list[Quantum]) -> "Future[list[Any]]":
        return self.training.ask(*(quantum.inputs for quantum in quanta))

    def may_wait(self, operation: ModelOperation) -> bool:
        return isinstance(operation, operations.LoadCheckpoint | operations.LoadSnapshot)

    def run(self, operation: ModelOperation) -> Work:
        model_id = operation.model_id
        match operation:
            case operations.CreateModel(lora_config=config, value_head=value_head):
                if model_id in self.models:
                    raise RequestError(f"model_id={model_id} exists already; choose another id")
                if not 0 < config.rank <= MAX_RANK or value_head:
                    raise RequestError(f"rank={config.rank}: choose 1 to max_lora_rank={MAX_RANK}, without value_head")
                self._put(model_id, config)
                return ModelOutput(model_id)
            case operations.LoadCheckpoint() | operations.LoadSnapshot():
                return (yield from self._load(operation))
        if model_id not in self.models:
            raise RequestError(f"model_id={model_id} is not loaded; create it, or load it from a checkpoint, first")
        handle = self.models[model_id]
        match operation:
            case operations.ForwardBackward():
                return (yield from self._pass(operation, handle))
            case operations.OptimStep(adam_params=params, skip_if_not_finite=skip):
                stepped = next(self._handles)  # until it is there, and wanted, the model is as it was
                norm = yield Quantum(1, None, ("step", handle, stepped, params, skip))
                self.models[model_id] = stepped
                self.training.tell("free", handle)
                return OptimStepOutput({"skyrl.ai/grad_norm": norm, "skyrl.ai/learning_rate": params.learning_rate})
            case operations.DeleteModel():
                self.training.tell("free", self.models.pop(model_id))
                return ModelOutput(model_id)
        adapter: Adapter = yield Quantum(1, None, ("get", handle))
        match operation:
            case operations.SaveCheckpoint(path=path):
                return self._writer.submit(model_id, path, lambda: dataclasses.replace(adapter, sums=None).write(path))
            case operations.SaveSnapshot(path=path):
                return self._writer.snapshot(model_id, path, lambda: adapter.write(path))
            case operations.Publish(version=version, path=path):
                self._publish(version, adapter)
                if path is not None and operation.persist:
                    return self._writer.submit(model_id, path, lambda: adapter.write(path))
                if path is not None:
                    self._writer.keep_version(version, model_id, path, lambda: adapter.write(path))
                return SaveOutput(path or "")
        raise RequestError(f"{type(operation).__name__} is not served by this backend; use another")

    def _pass(self, operation: operations.ForwardBackward, handle: int) -> Work:
        if operation.loss_fn != "cross_entropy" or operation.reference:
            raise RequestError("loss_fn, reference: this backend serves cross_entropy only; use it, or another backend")
        data, rows, sums = operation.data, self.config.rows, next(self._handles)
        tiles = [data[first : first + rows] for first in range(0, len(data), rows)]
        try:
            answers = yield [
                Quantum(sum(len(datum.tokens) for datum in tile), TILE, (TILE, handle, sums, number, tile))
                for number, tile in enumerate(tiles)
            ]
            if not operation.forward_only:
                self.training.tell("add", handle, sums)
        finally:
            self.training.tell("free", sums)
        outputs = [output for tile in answers for output in tile]
        return ForwardBackwardOutput(
            outputs, {"loss:sum": float(sum(one["elementwise_loss"].sum() for one in outputs))}
        )

    def _load(self, operation: operations.LoadCheckpoint | operations.LoadSnapshot) -> Work:
        yield (reading := self._writer.read(operation.path, lambda: Adapter.read(operation.path, operation.digest)))
        adapter = reading.result()
        if isinstance(operation, operations.LoadCheckpoint) and not operation.load_optimizer:
            adapter = adapter.anew()
        self.training.tell("free", self.models.get(operation.model_id))
        self._put(operation.model_id, adapter)
        return ModelOutput(operation.model_id)

    def _put(self, model_id: str, adapter: Adapter | LoraConfig) -> None:
        self.models[model_id] = next(self._handles)
        self.training.tell("put", self.models[model_id], adapter)

    def version(self, request: Sample) -> int | None:
        """The handle of what a sample is drawn from."""
        if request.version is None or request.version in self.versions:
            return self.versions.get(request.version or "")
        if request.path is None:
            raise RequestError(f"version={request.version} is not known here; name a checkpoint that exists")
        self._publish(request.version, Adapter.read(request.path))
        return self.versions[request.version]

    def _publish(self, version: str, adapter: Adapter) -> None:
        self.drop_version(version)
        self.versions[version] = next(self._handles)
        self.sampling.tell("put", self.versions[version], adapter)

    def drop_version(self, version: str) -> None:
        self._writer.forget_version(version)
        if version in self.versions:
            self.sampler.drop(self.versions.pop(version))

    def _heard(self, news: Any) -> None:
        self.sampler.news.append(news)
        self.notify()
