"""Engines that share their devices with the trainer: they sleep while it trains, and draw what they drew before."""

import asyncio
import threading
import time

import numpy as np
import pytest

from skyrl.backends.operations import ForwardBackward, Publish
from skyrl.backends.torch import TorchBackend
from skyrl.errors import RequestError
from skyrl.types import Datum, Result, SampleOutput
from tests.backends.engines.engine_server import EngineProcess
from tests.backends.engines.test_backend_with_engines import check, done, opened, sample, train
from tests.waiting import BOUND_S

pytestmark = pytest.mark.full


def publish(backend: TorchBackend, *names: str) -> None:
    for number, name in enumerate(names):
        train(backend, name, number)
        done(backend, Publish(request_id=f"publish {name}", model_id=name, version=name, path=None))


def a_pass(number: int) -> ForwardBackward:
    tokens = np.arange(1, 21, dtype=np.int32)
    datum = Datum(tokens[:-1], {"target_tokens": tokens[1:].astype(np.int64), "weights": np.ones(19, np.float32)})
    return ForwardBackward(request_id=f"pass {number}", model_id="one", data=[datum], loss_fn="cross_entropy")


def test_engines_sleep_while_the_trainer_trains(model, process, tmp_path):
    process.anew()
    with opened(model, tmp_path / "engines", process, colocated=True) as backend:
        told = process.ask()
        assert (told["sleeping"], told["paused"]) == (1, True), "nothing is sampled yet"
        publish(backend, "one", "two")
        assert process.ask()["sleeping"] == 1
        for turn in range(3):
            for name in ("one", "two"):
                (result,) = done(backend, sample(name, params={"seed": turn}))
                told = process.ask()
                assert (told["sleeping"], told["paused"]) == (None, False)
                check(backend, name, result)
            done(backend, a_pass(turn))
            assert process.ask()["sleeping"] == 1
    assert process.ask()["sleeping"] is None, "engines are left awake"


def test_models_are_in_host_memory_while_engines_sample(model, process, tmp_path, monkeypatch):
    monkeypatch.setattr(TorchBackend, "_offloads", True)  # as on a GPU
    process.anew()
    with opened(model, tmp_path / "engines", process, colocated=True) as backend:
        publish(backend, "one", "two")
        (result,) = done(backend, sample("one"))
        assert backend.group.run("offload").result() == 0
        check(backend, "one", result)
        done(backend, a_pass(0))
        assert backend.group.run("offload").result() > 0


def test_versions_and_the_base_model_are_compared_again_after_a_sleep(model, process, tmp_path):
    process.anew()
    with opened(model, tmp_path / "engines", process, colocated=True) as backend:
        publish(backend, "one")

        def drawn(name: str | None) -> int:
            before = process.ask()["drawn"]
            done(backend, sample(name))
            return process.ask()["drawn"] - before

        assert [drawn(name) for name in ("one", "one", None, None)] == [3, 2, 3, 2]
        done(backend, a_pass(0))
        assert [drawn(name) for name in ("one", "one", None, None)] == [3, 2, 3, 2]


def test_samples_that_run_as_devices_change_hands_keep_their_tokens(model, process, tmp_path):
    process.anew(token_s=0.05)
    with opened(model, tmp_path / "engines", process, colocated=True, phase_s=2.5) as backend:
        publish(backend, "one")
        before = process.ask()
        long = sample("one", params={"max_tokens": 48}, num_samples=1)
        backend.submit(long)
        result = until_done(backend, long.request_id, process)
        after = process.ask()
    naps, tokens = after["naps"] - before["naps"], after["tokens"] - before["tokens"]
    assert isinstance(result, SampleOutput) and len(result.sequences[0].tokens) == 48, result
    assert naps, "devices have changed hands in the middle of it"
    assert tokens <= 48 + 32 * (1 + naps) + 4 * naps, "it is compared after each sleep, and nothing is drawn again"


def until_done(backend: TorchBackend, long: str, process: EngineProcess) -> Result:
    """Step until a sample has ended, with something to train whenever it is drawn."""
    begun, number = time.monotonic(), 0
    while True:
        assert time.monotonic() - begun < 240
        if process.ask()["running"] and number < 4:
            backend.submit(a_pass(number))
            number += 1
        if backend.wait(0.2):
            for completion in backend.step():
                if completion.request_id == long:
                    return completion.result


def test_an_engine_that_ends_while_it_sleeps_is_used_again(model, process, tmp_path):
    process.anew()
    with opened(model, tmp_path / "engines", process, colocated=True) as backend:
        publish(backend, "one")
        process.kill()
        process.start()
        (result,) = done(backend, sample("one"))
        check(backend, "one", result)


def test_an_engine_that_a_killed_driver_has_left_asleep_is_woken(model, process, tmp_path):
    process.anew()
    for path in ("/pause?mode=abort", "/sleep?level=1"):
        process.tell(path)
    with opened(model, tmp_path / "engines", process, colocated=True) as backend:
        publish(backend, "one")
        (result,) = done(backend, sample("one"))
        check(backend, "one", result)


def test_an_engine_that_cannot_sleep_is_named(model, process, tmp_path):
    process.anew(sleeps=False)
    with (
        pytest.raises(RequestError, match=rf"colocated=True .*{process.url} cannot sleep .* --enable-sleep-mode"),
        opened(model, tmp_path / "engines", process, colocated=True),
    ):
        pass


def test_a_comparison_that_is_given_up_halfway_is_no_failure_of_the_backend(model, process, tmp_path):
    process.anew()
    with opened(model, tmp_path / "engines", process, colocated=True) as backend:
        engines = backend._engines
        assert engines is not None
        asked = threading.Event()

        async def give_up() -> None:
            scoring = asyncio.create_task(engines._score(None, np.arange(8, dtype=np.int32)))
            await asyncio.sleep(0)
            scoring.cancel()
            asked.set()

        asyncio.run_coroutine_threadsafe(give_up(), engines.fleet._loop)
        assert asked.wait(BOUND_S)
        (result,) = done(backend, sample(None))
        check(backend, None, result)
