"""A backend in a thread of its own: results, errors, cancelled samples, and its end."""

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

import driver
from driver import new_id, random_datum
from skyrl.backends.async_client import BackendClient
from skyrl.backends.backend import CreateModel, DeleteModel, ForwardBackward
from skyrl.errors import RequestError, StorageError
from skyrl.types import ErrorResponse, ForwardBackwardOutput, LoraConfig, ModelOutput, SampleOutput
from tests.fakes import FakeBackend, FakeConfig

ENDLESS = 10**9
"""Tokens of a sample that does not end by itself."""


@pytest.fixture
def client() -> Iterator[BackendClient]:
    with BackendClient(FakeBackend("fake", FakeConfig(burst_s=0.001))) as client:
        yield client


def create(model_id: str = "model") -> CreateModel:
    return CreateModel(request_id=new_id(), model_id=model_id, lora_config=LoraConfig(seed=1))


def forward_backward(model_id: str = "model") -> ForwardBackward:
    data = [random_datum(5)]
    return ForwardBackward(request_id=new_id(), model_id=model_id, data=data, loss_fn="cross_entropy")


def breaking() -> Any:
    """A request that a step cannot get over, as no defect of a backend is foreseen."""
    return dataclasses.replace(driver.sampling(None), params=None)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Its result, if it is there within seconds."""
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_operations_of_a_model_take_effect_in_the_order_of_the_calls(client):
    async def all_at_once():
        operations = create(), forward_backward(), DeleteModel(request_id=new_id(), model_id="model"), create()
        return await asyncio.gather(*map(client.run, operations))

    kinds = [type(result) for result in run(all_at_once())]
    assert kinds == [ModelOutput, ForwardBackwardOutput, ModelOutput, ModelOutput]


def test_whoever_waits_gets_a_result_of_its_own(client):
    async def samples():
        return await asyncio.gather(*(client.run(driver.sampling(None, max_tokens=n, seed=n)) for n in range(1, 9)))

    results = run(samples())
    assert all(isinstance(result, SampleOutput) for result in results)
    assert [len(result.sequences[0].tokens) for result in results] == list(range(1, 9))


def test_what_is_wrong_with_a_request_is_a_request_error_and_others_go_on(client):
    async def both():
        return await asyncio.gather(client.run(forward_backward()), client.run(create()), return_exceptions=True)

    refused, made = run(both())
    assert isinstance(refused, RequestError) and "model_id=model is not loaded" in str(refused)
    assert isinstance(made, ModelOutput)


def test_what_is_wrong_with_the_backend_is_a_runtime_error(client):
    with pytest.raises(RuntimeError, match="internal error") as error:
        run(client.run(driver.sampling(None, prompt=[13])))
    assert not isinstance(error.value, RequestError)


def test_a_disk_that_refuses_a_checkpoint_is_a_storage_error(client, tmp_path):
    (tmp_path / "file").touch()
    save = driver.SaveCheckpoint(request_id=new_id(), model_id="model", path=str(tmp_path / "file" / "below"))
    run(client.run(create()))
    with pytest.raises(StorageError, match=r"cannot write .*/file/below: .*; free space or check permissions"):
        run(client.run(save))


def test_a_cancelled_sample_is_dropped_and_others_go_on(client):
    async def cancelled():
        endless = asyncio.ensure_future(client.run(driver.sampling(None, max_tokens=ENDLESS)))
        other = asyncio.ensure_future(client.run(driver.sampling(None, max_tokens=50)))
        await asyncio.sleep(0.01)
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless
        return await other

    assert len(run(cancelled()).sequences[0].tokens) == 50
    wait_until(lambda: not client.backend.sampler.busy)


def test_a_cancelled_pass_leaves_the_client_at_work(client):
    gate = client.backend.gate = threading.Semaphore(0)

    async def cancelled():
        await client.run(create())
        task = asyncio.ensure_future(client.run(forward_backward()))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.release(4)
        return await client.run(forward_backward())

    assert isinstance(run(cancelled()), ForwardBackwardOutput)


def test_closing_fails_what_is_not_complete():
    client = BackendClient(FakeBackend("fake", FakeConfig(burst_s=0.001)))

    async def closed():
        task = asyncio.ensure_future(client.run(driver.sampling(None, max_tokens=ENDLESS)))
        await asyncio.sleep(0.01)
        client.close()
        await task

    with pytest.raises(RuntimeError, match="closed"):
        run(closed())


def test_what_is_asked_for_after_the_end_fails_at_once():
    client = BackendClient(FakeBackend("fake", FakeConfig()))
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        run(client.run(create()))


def test_a_step_that_fails_is_told_to_all_who_wait_and_to_all_who_come(client):
    async def broken():
        others = [client.run(driver.sampling(None, max_tokens=ENDLESS)) for _ in range(3)]
        return await asyncio.gather(*others, client.run(breaking()), return_exceptions=True)

    errors = run(broken())
    assert all(isinstance(error, RuntimeError) and isinstance(error.__cause__, AttributeError) for error in errors)
    assert len(set(map(id, errors))) == 4
    with pytest.raises(RuntimeError, match="has stopped"):
        run(client.run(create()))


def test_a_write_in_the_background_wakes_the_client(client, tmp_path):
    run(client.run(create()))
    saved = run(client.run(driver.SaveCheckpoint(request_id=new_id(), model_id="model", path=str(tmp_path / "saved"))))
    assert not isinstance(saved, ErrorResponse) and (tmp_path / "saved").is_dir()
