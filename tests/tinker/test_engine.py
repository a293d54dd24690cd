"""The engine's turns: gaps, order, versions and preparation, and how its backend is opened."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from skyrl.errors import RequestError
from skyrl.tinker.config import EngineConfig
from skyrl.tinker.engine import open_backend, serve
from skyrl.tinker.processes.channel import EngineChannel
from skyrl.tinker.processes.messages import Done, DropVersion, Enqueue, Failed, Held, Progress, Shutdown, Start
from skyrl.types import OptimStepOutput, SampleOutput
from tests.backends.torch_models import make_model
from tests.fakes import FakeBackend, FakeConfig
from tests.tinker.engine_bench import Bench, a_pass, a_sample, a_step, a_version, create, of
from tests.waiting import BOUND_S


def test_a_gap_is_announced_then_fails_and_the_model_goes_on(bench):
    engine, late, step = bench(gap_timeout_s=0.05), a_pass(), a_step()
    said = engine.turn(*engine.enqueued(create()), Enqueue(late, 2), Enqueue(step, 3))
    while step.request_id not in [done.request_id for done in of(Done, said)]:
        said += engine.turn()
    assert [frame.reason is None for frame in of(Held, said) if frame.request_id == late.request_id] == [False, True]
    results = {done.request_id: done.result for done in of(Done, said)}
    assert "seq_id=1 did not arrive within 0.05 s" in results[late.request_id].error
    assert "incomplete and were dropped" in results[step.request_id].error
    *_, last = of(Done, engine.ask(a_pass(), a_step(), first=4))
    assert isinstance(last.result, OptimStepOutput)


@pytest.mark.parametrize("long", [a_sample(max_tokens=200), a_pass()], ids=["sample", "pass"])
def test_a_short_sample_overtakes_a_long_request_of_its_own_tenant(bench, long):
    engine, short = bench(), a_sample(max_tokens=2)
    engine.backend.config = FakeConfig(quanta_per_pass=100)
    engine.ask(create())
    long = long if isinstance(long, Enqueue) else Enqueue(long, 1)
    order = [done.request_id for done in of(Done, engine.rest(long, short))]
    assert order == [short.operation.request_id, long.operation.request_id]


def test_a_dropped_version_cannot_be_sampled_any_more(bench, tmp_path):
    engine = bench()
    engine.ask(create(), a_version(tmp_path / "v"))
    (now,) = of(Done, engine.rest(a_sample(version="v")))
    assert isinstance(now.result, SampleOutput)
    engine.rest(DropVersion("v"))
    (later,) = of(Done, engine.rest(a_sample(version="v")))
    assert "version=v is not known" in later.result.error


def test_shutdown_finishes_background_writes(bench, tmp_path):
    engine, publish = bench(), a_version(tmp_path / "v")
    said = engine.turn(*engine.enqueued(create(), publish))
    while publish.request_id not in [done.request_id for done in of(Done, said)]:
        said += engine.turn()
    engine.end()
    assert (tmp_path / "v" / "manifest.json").exists()


class Pieces:
    """Three pieces of what later requests need, as `prepare` of a backend."""

    def __init__(self):
        self.left = 3
        self.asked_for_more = threading.Event()

    def __call__(self) -> bool:
        if not self.left:
            self.asked_for_more.set()
            return False
        self.left -= 1
        return True


@contextmanager
def running(engine: Bench) -> Iterator[Pieces]:
    """An engine that runs in a thread, and what it prepares."""
    engine.backend.prepare = pieces = Pieces()
    thread = threading.Thread(target=engine.engine.run)
    thread.start()
    yield pieces
    engine.channel.deliver(Shutdown())
    thread.join(BOUND_S)
    assert not thread.is_alive()


def test_what_later_requests_need_is_prepared_when_nothing_has_come_for_a_while(bench, monkeypatch):
    monkeypatch.setattr("skyrl.tinker.engine.loop.QUIET_S", 0.01)
    with running(bench()) as pieces:
        assert pieces.asked_for_more.wait(BOUND_S)


def test_nothing_is_prepared_between_requests_that_follow_each_other(bench, monkeypatch):
    monkeypatch.setattr("skyrl.tinker.engine.loop.QUIET_S", 3600)
    engine = bench()
    with running(engine) as pieces:
        for frame in engine.enqueued(create(), *[a_pass() for _ in range(5)]):
            engine.channel.deliver(frame)
            while not isinstance(engine.hear(), Done):
                pass
        assert pieces.left == 3


# -- opening a backend ------------------------------------------------------------------------------------------------


def opened(**options) -> FakeBackend:
    return open_backend(EngineConfig(**options), lambda message: None)  # pyright: ignore[reportReturnType]


def test_a_backend_can_be_named_by_module_and_attribute():
    backend = opened(base_model="x", backend="tests.fakes:FakeBackend", backend_config={"vocab_size": 99})
    assert (backend.base_model, backend.info().vocab_size) == ("x", 99)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"backend": "nope"},
            "backend=nope: no backend named 'nope'; known: fsdp, fsdp2, jax, skyrl_train, torch, or module:attribute",
        ),
        ({"backend": "tests.nowhere:X"}, "backend=tests.nowhere:X: cannot import it"),
        ({"backend": "tests.fakes:Nowhere"}, "backend=tests.fakes:Nowhere: cannot import it"),
        (
            {"backend": "tests.fakes:FakeBackend", "backend_config": {"speed": 1}},
            r"backend_config: speed: there is no such option \(options of tests.fakes:FakeBackend: max_lora_rank, ",
        ),
        (
            {"backend": "tests.fakes:FakeBackend", "backend_config": {"vocab_sise": 1}},
            r"backend_config: vocab_sise: there is no such option; did you mean vocab_size\? \(options of",
        ),
        (
            {"backend": "tests.fakes:FakeBackend", "backend_config": {"vocab_size": "many"}},
            "backend_config: vocab_size=many: give a whole number",
        ),
    ],
)
def test_a_bad_backend_or_option_is_refused_by_name(options, message):
    with pytest.raises(RequestError, match=message):
        opened(base_model="x", **options)


def test_a_base_model_without_linear_maps_is_refused_before_its_weights_are_read(tmp_path):
    model = make_model(tmp_path, "gpt2")
    (model / "model.safetensors").unlink()
    with pytest.raises(RequestError, match=r"decoder blocks of GPT2LMHeadModel have no nn\.Linear"):
        opened(base_model=str(model), backend="skyrl_train")


def test_a_model_that_cannot_be_loaded_is_reported_in_one_line(tmp_path):
    ours, its = socket.socketpair()
    channel, api = EngineChannel(its), EngineChannel(ours)
    backend = "tests.fakes:FakeBackend"
    api.send(Start(EngineConfig(base_model="missing", backend=backend, checkpoints_base=tmp_path / "checkpoints")))
    assert serve(channel) == 1
    assert isinstance(api.receive(), Progress)
    assert api.receive() == Failed("base_model=missing: there is no such model; name another")
    api.close()
    channel.close()
