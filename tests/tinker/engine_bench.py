"""Driving an engine in tests: one that is turned by hand, or one in a process of its own, and requests for it."""

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from skyrl.backends.operations import (
    CreateModel,
    ForwardBackward,
    LoadSnapshot,
    ModelOperation,
    OptimStep,
    Publish,
    Rejected,
    Sample,
)
from skyrl.tinker.config import EngineConfig
from skyrl.tinker.engine import TinkerEngine
from skyrl.tinker.processes.channel import EngineChannel
from skyrl.tinker.processes.messages import (
    Enqueue,
    FromEngine,
    Progress,
    Ready,
    Revive,
    Shutdown,
    Snapshotted,
    Start,
    ToEngine,
)
from skyrl.types import AdamParams, Datum, LoraConfig, SamplingParams
from tests.fakes import FakeBackend, FakeConfig, FakeModel


class Bench:
    """An engine that is turned by hand, and the API's end of its channel."""

    def __init__(self, folder: Path, **options):
        self.config = EngineConfig(**{"checkpoints_base": folder / "checkpoints", "gap_timeout_s": 60, **options})
        ours, its = socket.socketpair()
        ours.settimeout(30)
        self.channel, self._api = EngineChannel(its), EngineChannel(ours)
        self.backend = FakeBackend("fake", FakeConfig())
        self.engine = TinkerEngine(self.backend, self.channel, self.config)
        self.said: list[FromEngine] = []
        """All that it has said."""

    def turn(self, *frames: ToEngine) -> list[FromEngine]:
        """Deliver frames and turn once. Returns what the engine says."""
        for frame in frames:
            self.channel.deliver(frame)
        self.engine.turn()
        return self._hear()

    def rest(self, *frames: ToEngine) -> list[FromEngine]:
        """Deliver frames and turn until there is nothing to do and nothing left to write."""
        said = self.turn(*frames)
        while self.backend.busy or self.backend.writing:
            self.write()
            said += self.turn()
        self.write()
        return said + self.turn()

    def ask(self, *operations: ModelOperation, first: int = 0) -> list[FromEngine]:
        """Requests of one model, numbered from `first`; until they are done."""
        return self.rest(*self.enqueued(*operations, first=first))

    @staticmethod
    def enqueued(*operations: ModelOperation, first: int = 0) -> list[Enqueue]:
        return [Enqueue(operation, seq_id) for seq_id, operation in enumerate(operations, first)]

    def end(self) -> list[FromEngine]:
        """An orderly end."""
        self.channel.deliver(Shutdown())
        self.engine.run()
        return self._hear()

    def close(self) -> None:
        """As a crash: what is in memory is gone."""
        self.channel.close()
        self._api.close()
        self.backend.close()

    def hear(self) -> FromEngine:
        """Return the next message of an engine that runs by itself."""
        return self._api.receive()  # pyright: ignore[reportReturnType]

    def write(self) -> None:
        """Wait until what was handed over to be written is on disk, or cannot be."""
        self.backend._writer.wait()

    def _hear(self) -> list[FromEngine]:
        self.channel.send(Progress("that is all"))
        said: list[FromEngine] = []
        while (frame := self._api.receive()) != Progress("that is all"):
            said.append(frame)  # pyright: ignore[reportArgumentType]
        self.said += said
        return said


NUMBERS = itertools.count()


def fresh(kind: str) -> str:
    return f"{kind}-{next(NUMBERS)}"


def create(model_id: str = "m") -> CreateModel:
    return CreateModel(request_id=fresh("create"), model_id=model_id, lora_config=LoraConfig(seed=1))


def a_pass(token: int = 1, model_id: str = "m") -> ForwardBackward:
    tokens = np.full(3, token, np.int32)
    data = [Datum(tokens, {"target_tokens": tokens.astype(np.int64)})]
    return ForwardBackward(request_id=fresh("pass"), model_id=model_id, data=data, loss_fn="cross_entropy")


def a_step(model_id: str = "m") -> OptimStep:
    return OptimStep(request_id=fresh("step"), model_id=model_id, adam_params=AdamParams(learning_rate=0.1))


def refused(gradients="incomplete", error: str = "too long", model_id: str = "m") -> Rejected:
    return Rejected(request_id=fresh("refused"), model_id=model_id, error=error, gradients=gradients)


def a_version(path: Path, version: str = "v", model_id: str = "m") -> Publish:
    return Publish(request_id=fresh("publish"), model_id=model_id, version=version, path=str(path), persist=False)


def a_sample(max_tokens: int = 3, version: str | None = None) -> Enqueue:
    params = SamplingParams(max_tokens=max_tokens, seed=0, stop=[])
    sample = Sample(request_id=fresh("sample"), version=version, prompt=np.asarray([1, 2], np.int32), params=params)
    return Enqueue(sample)


def of(kind: type, frames: Sequence[FromEngine]) -> list:
    return [frame for frame in frames if isinstance(frame, kind)]


def revival(snapshot: Snapshotted, *operations: ModelOperation, next_seq_id: int | None = None) -> Revive:
    first: list[ModelOperation] = [
        LoadSnapshot(request_id=fresh("revive"), model_id=snapshot.model_id, path=snapshot.path, digest=snapshot.digest)
    ]
    if snapshot.failed_pass is not None:
        first.append(refused(error=snapshot.failed_pass))
    following = snapshot.seq_id + 1 if next_seq_id is None else next_seq_id
    return Revive(snapshot.model_id, following, [*first, *operations])


def same(one: FakeModel, other: FakeModel) -> bool:
    return one.to_files() == other.to_files()


@contextmanager
def engine_process(
    folder: Path, environment: Mapping[str, str] = os.environ, **backend_config: object
) -> Iterator[tuple[subprocess.Popen, EngineChannel]]:
    """A real engine, ready, and the API's end of its channel."""
    config = EngineConfig(
        base_model="fake",
        backend="tests.fakes:FakeBackend",
        backend_config=backend_config,
        checkpoints_base=folder / "checkpoints",
    )
    ours, its = socket.socketpair()
    ours.settimeout(60)
    command = [sys.executable, "-m", "skyrl.tinker.engine", "--fd", str(its.fileno())]
    with subprocess.Popen(command, pass_fds=[its.fileno()], env=environment) as process:
        its.close()
        api = EngineChannel(ours)
        tell(api, Start(config))
        while not isinstance(api.receive(), Ready):
            pass
        try:
            yield process, api
        finally:
            process.kill()
            api.close()


def tell(api: EngineChannel, *frames: ToEngine) -> None:
    for frame in frames:
        api.send(frame)  # pyright: ignore[reportArgumentType]
