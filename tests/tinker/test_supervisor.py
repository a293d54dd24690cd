"""The supervisor with real child processes that run the fake backend."""

import asyncio
import functools
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl.backends.operations import Sample
from skyrl.tinker.config import EngineConfig
from skyrl.tinker.processes.engine_process import EngineProcess
from skyrl.tinker.processes.engine_supervisor import READY, SILENT, STARTS, EngineSupervisor
from skyrl.tinker.processes.messages import Done, Enqueue, FromEngine, Ready
from skyrl.types import SamplingParams
from tests.fakes import KILL
from tests.waiting import BOUND_S

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def engines_find_the_fake_backend(monkeypatch):
    monkeypatch.chdir(ROOT)


class Log:
    """Everything a supervisor reports, with a way to wait for it."""

    def __init__(self):
        self.frames: list[FromEngine] = []
        self.crashes: list[str] = []
        self.failures: list[str] = []
        self.changed = asyncio.Event()

    def note(self, where: list) -> Callable[[object], None]:
        def add(item: object) -> None:
            where.append(item)
            self.changed.set()

        return add

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), BOUND_S)

    async def ready(self, times: int = 1) -> None:
        await self.until(lambda: sum(isinstance(frame, Ready) for frame in self.frames) >= times)

    async def result(self, request_id: str) -> object:
        def found() -> list[object]:
            return [frame.result for frame in self.frames if isinstance(frame, Done) and frame.request_id == request_id]

        await self.until(lambda: bool(found()))
        return found()[0]


class Noted(EngineSupervisor):
    """A supervisor whose states and progress are all noted in `history`, however short they were."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "progress":
            self.__dict__.setdefault("history", []).append((self.state, value))


@asynccontextmanager
async def supervised(
    base_model: str = "fake",
    with_first: bool = False,
    again: bool = False,
    options: dict[str, float] | None = None,
    **backend_config,
):
    log = Log()
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            base_model=base_model,
            backend="tests.fakes:FakeBackend",
            backend_config=backend_config,
            checkpoints_base=folder,  # pyright: ignore[reportArgumentType]
            **(options or {}),  # pyright: ignore[reportArgumentType]
        )
        supervisor = Noted(
            config,
            on_frame=log.note(log.frames),
            on_crash=log.note(log.crashes),
            on_failure=log.note(log.failures),
            first=EngineProcess(config) if with_first else None,
            again=again,
        )
        supervisor.start()
        try:
            yield supervisor, log
        finally:
            await supervisor.stop()


def sample(request_id: str, token: int = 1, max_tokens: int = 2) -> Enqueue:
    params = SamplingParams(max_tokens=max_tokens, seed=0, stop=[])
    prompt = np.asarray([token], np.int32)
    return Enqueue(Sample(request_id=request_id, version=None, prompt=prompt, params=params))


async def changed(condition: Callable[[], bool]) -> None:
    """Return once a condition is true that nothing tells of."""
    async with asyncio.timeout(BOUND_S):
        while not condition():
            await asyncio.sleep(0.01)


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def scenario(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Turn a coroutine function into a test."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@pytest.mark.full
@scenario
async def test_once_ready_it_never_gives_up_however_often_engines_are_killed_while_they_load():
    async with supervised() as (supervisor, log):
        await log.ready()
        os.kill(supervisor.pid, signal.SIGKILL)
        for crashes in range(1, STARTS + 1):  # before they can be ready
            await log.until(lambda count=crashes: len(log.crashes) == count)
            await changed(lambda: supervisor.pid is not None)
            os.kill(supervisor.pid, signal.SIGKILL)
        await log.ready(times=2)
        assert log.failures == [] and supervisor.state == "ready"


@scenario
async def test_a_request_that_kills_the_engine_is_not_sent_to_the_next_one():
    async with supervised() as (supervisor, log):
        await log.ready()
        supervisor.send(sample("killer", token=KILL))
        await log.ready(times=2)
        supervisor.send(sample("after"))
        await log.result("after")
        assert len(log.crashes) == 1


@pytest.mark.full
@scenario
async def test_frames_reach_no_engine_but_the_one_that_is_ready():
    async with supervised() as (supervisor, log):
        supervisor.send(sample("before"))
        await log.ready()
        os.kill(supervisor.pid, signal.SIGKILL)
        await log.until(lambda: bool(log.crashes))
        assert supervisor.state == "restarting"
        supervisor.send(sample("meanwhile"))
        await log.ready(times=2)
        supervisor.send(sample("after"))
        await log.result("after")
        assert {frame.request_id for frame in log.frames if isinstance(frame, Done)} == {"after"}


@pytest.mark.full
@scenario
async def test_a_model_that_cannot_be_loaded_fails_once_with_the_engines_message():
    async with supervised(base_model="missing") as (supervisor, log):
        await log.until(lambda: bool(log.failures))
        assert log.failures == ["base_model=missing: there is no such model; name another"]
        assert log.crashes == [] and supervisor.state == "failed"


@pytest.mark.full
@scenario
async def test_it_gives_up_after_three_engines_that_never_became_ready():
    async with supervised(die_before_ready=True) as (supervisor, log):
        await log.until(lambda: bool(log.failures))
        assert "the engine was killed by SIGKILL" in log.failures[0]
        assert len(log.failures) == 1 and supervisor.restarts == 2


@pytest.mark.full
@scenario
async def test_where_an_engine_was_ready_before_one_that_cannot_load_is_tried_again():
    async with supervised(base_model="missing", again=True) as (supervisor, log):
        await log.until(lambda: len(log.crashes) == 2 or bool(log.failures))
        assert log.failures == [] and supervisor.state == "restarting"


@scenario
async def test_an_engine_that_hangs_and_cannot_be_killed_does_not_count_as_ready(monkeypatch):
    """As one that waits for a device: to the system it is beyond signals."""
    async with supervised(options={"engine_heartbeat_timeout_sec": 4}) as (supervisor, log):
        await log.ready()
        engine = supervisor.pid
        with monkeypatch.context() as patch:
            patch.setattr(EngineProcess, "signal", lambda process, number: None)
            os.kill(engine, signal.SIGSTOP)
            await changed(lambda: supervisor._hung is not None)
            assert supervisor.state == "restarting"
            assert {progress for state, progress in supervisor.history if state == "ready"} == {READY, SILENT}
            assert supervisor.pid == engine and log.crashes == []
        os.kill(engine, signal.SIGKILL)
        await log.ready(times=2)
        assert (supervisor.state, supervisor.progress) == ("ready", READY)


@pytest.mark.full
@scenario
async def test_the_engine_ignores_ctrl_c_and_ends_on_sigterm():
    async with supervised() as (supervisor, log):
        await log.ready()
        os.kill(supervisor.pid, signal.SIGINT)
        supervisor.send(sample("s"))
        await log.result("s")
        assert log.crashes == []
        os.kill(supervisor.pid, signal.SIGTERM)
        await log.until(lambda: bool(log.crashes))
        assert log.crashes == ["the engine exited with status 0"]


@pytest.mark.full
@scenario
async def test_an_engine_that_was_started_before_is_the_first_one():
    async with supervised(with_first=True) as (supervisor, log):
        first = supervisor._first.pid
        await log.ready()
        assert (supervisor.pid, log.crashes) == (first, [])


@pytest.mark.full
@scenario
async def test_an_engine_that_was_started_before_and_has_ended_since_is_replaced():
    async with supervised(with_first=True) as (supervisor, log):
        os.kill(supervisor._first.pid, signal.SIGKILL)
        await log.ready()
        assert log.crashes == ["the engine was killed by SIGKILL"]


@scenario
async def test_an_engine_that_is_stopped_as_soon_as_it_is_started_has_ended():
    async with supervised(with_first=True) as (supervisor, _):
        pid = supervisor._first.pid
        await asyncio.sleep(0)
    assert not exists(pid)


@pytest.mark.full
@scenario
async def test_the_end_of_an_engine_is_noticed_while_all_threads_of_the_process_are_at_work():
    async with supervised() as (supervisor, log):
        await log.ready()
        done = threading.Event()
        jobs = [asyncio.create_task(asyncio.to_thread(done.wait, BOUND_S)) for _ in range(64)]
        os.kill(supervisor.pid, signal.SIGKILL)
        await log.ready(2)
        assert not done.is_set()
        done.set()
        await asyncio.gather(*jobs)


@pytest.mark.full
@scenario
async def test_the_engine_runs_at_a_lower_priority_than_its_parent():
    async with supervised() as (supervisor, log):
        await log.ready()
        assert os.getpriority(os.PRIO_PROCESS, supervisor.pid) > os.getpriority(os.PRIO_PROCESS, 0)
