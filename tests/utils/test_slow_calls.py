"""Calls to services that hang are listed and logged while they do."""

import asyncio
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from skyrl.errors import StorageError
from skyrl.tinker.config import EngineConfig
from skyrl.tinker.processes import heartbeat
from skyrl.tinker.processes.channel import ApiChannel, EngineChannel
from skyrl.utils import slow_calls
from skyrl.utils.files.object_store import ObjectStore
from skyrl.utils.slow_calls import calling
from tests.buckets import environment
from tests.waiting import BOUND_S, until


@pytest.fixture
def impatient(monkeypatch) -> None:
    monkeypatch.setattr(slow_calls, "EXPECTED_S", 0.0)
    monkeypatch.setattr(slow_calls, "INTERVAL_S", 0.01)


def test_a_call_is_listed_from_its_limit_to_its_end(monkeypatch):
    with calling("bucket", "read s3://b"):
        assert slow_calls.slow_calls() == ()
        monkeypatch.setattr(slow_calls, "EXPECTED_S", 0.0)
        with calling("database", "read sqlite:///x"):
            [slow] = slow_calls.slow_calls()
            assert slow[:2] == ("database", "read sqlite:///x")
    assert slow_calls.slow_calls() == ()


def test_a_transfer_has_time_for_its_bytes(impatient):
    with calling("bucket", "write s3://b/small"), calling("bucket", "write s3://b/large", 2**40):
        assert [call.what for call in slow_calls.slow_calls()] == ["write s3://b/small"]


def test_a_slow_call_is_logged_while_it_waits_and_when_it_ends(impatient, caplog):
    with calling("database", "read postgresql://host"):
        until(lambda: "the database has not answered for" in caplog.text, "the warning")
    assert re.search(r"has not answered for \d+ s: read postgresql://host\n", caplog.text)
    assert re.search(r"the database was waited for, for \d+ s: read postgresql://host\n", caplog.text)


def test_a_bucket_that_never_answers_is_a_slow_call(impatient, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for name, value in environment(f"http://127.0.0.1:{listener.getsockname()[1]}", 0.1).items():
            monkeypatch.setenv(name, value)
        store = ObjectStore("s3://bucket/prefix")
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(store.get, "key")
            until(lambda: slow_calls.slow_calls(), "the slow call")
            assert [call.what for call in slow_calls.slow_calls()] == ["read s3://bucket/prefix/key"]
            listener.close()  # resets the connection
            with pytest.raises(StorageError):
                answer.result(BOUND_S)


def test_heartbeats_of_an_engine_name_its_slow_calls(impatient):
    async def first_beat() -> Any:
        ours, its = socket.socketpair()
        api, engine = await ApiChannel.open(ours), EngineChannel(its)
        heartbeat.start(engine, EngineConfig.model_validate({}), lambda: None)
        try:
            return await anext(api.frames())
        finally:
            await api.close()
            engine.close()

    with calling("bucket", "write s3://b/model"):
        beat = asyncio.run(asyncio.wait_for(first_beat(), BOUND_S))
    assert [call[:2] for call in beat.slow_calls] == [("bucket", "write s3://b/model")]
