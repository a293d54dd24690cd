"""The engine over a socketpair, in a thread, with the fake backend."""

import socket
import struct
import threading
from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import pytest

from skyrl.backends.operations import (
    CreateModel,
    ForwardBackward,
    LoadCheckpoint,
    Operation,
    OptimStep,
    Publish,
    Rejected,
    Sample,
    SaveCheckpoint,
)
from skyrl.errors import RequestError
from skyrl.tinker.config import EngineConfig
from skyrl.tinker.engine import TinkerEngine, open_backend, serve
from skyrl.tinker.processes.channel import EngineChannel
from skyrl.tinker.processes.messages import (
    Cancel,
    Done,
    DropVersion,
    Enqueue,
    Failed,
    FromEngine,
    Held,
    Progress,
    Ready,
    Shutdown,
    Start,
    ToEngine,
)
from skyrl.types import (
    AdamParams,
    Datum,
    ErrorResponse,
    ForwardBackwardOutput,
    LoraConfig,
    ModelOutput,
    OptimStepOutput,
    SampleOutput,
    SamplingParams,
    SaveOutput,
)
from tests.backends.torch_models import make_model
from tests.fakes import POISON, FakeBackend, FakeConfig
from tests.waiting import BOUND_S

Frame = TypeVar("Frame", bound=FromEngine)


class Wire:
    """The API's end of the channel, blocking."""

    def __init__(self, connection: socket.socket):
        connection.settimeout(BOUND_S)
        self._channel = EngineChannel(connection)

    def send(self, *frames: ToEngine) -> None:
        for frame in frames:
            self._channel.send(frame)  # pyright: ignore[reportArgumentType]

    def ask(self, operation: Operation, seq_id: int | None = None) -> None:
        self.send(Enqueue(operation, seq_id))

    def read(self) -> FromEngine:
        return self._channel.receive()  # pyright: ignore[reportReturnType]

    def until(self, kind: type[Frame]) -> Frame:
        """The next frame of a kind; others are skipped."""
        while not isinstance(frame := self.read(), kind):
            pass
        return frame

    def results(self, *request_ids: str) -> dict[str, object]:
        """Results of these requests, in the order in which they came; other frames are skipped."""
        results: dict[str, object] = {}
        while not set(request_ids) <= results.keys():
            frame = self.read()
            if isinstance(frame, Done):
                results[frame.request_id] = frame.result
        return results

    def close(self) -> None:
        self._channel.close()


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend("fake", FakeConfig())


@pytest.fixture
def gap_timeout_s() -> float:
    """Of the engine. Tests that mean a gap to expire say a shorter one."""
    return BOUND_S


@pytest.fixture
def config(tmp_path, gap_timeout_s) -> EngineConfig:
    return EngineConfig(
        base_model="fake",
        backend="tests.fakes:FakeBackend",
        checkpoints_base=tmp_path / "checkpoints",
        gap_timeout_s=gap_timeout_s,
    )


@pytest.fixture
def wire(backend: FakeBackend, config: EngineConfig) -> Iterator[Wire]:
    """A running engine, shut down at the end."""
    ours, its = socket.socketpair()
    channel, wire = EngineChannel(its), Wire(ours)
    channel.listen()
    engine = threading.Thread(target=TinkerEngine(backend, channel, config).run)
    engine.start()
    yield wire
    wire.send(Shutdown())
    engine.join(BOUND_S)
    assert not engine.is_alive()
    wire.close()
    channel.close()


def create(model_id: str = "m") -> CreateModel:
    return CreateModel(request_id=f"{model_id}/create", model_id=model_id, lora_config=LoraConfig(seed=1))


def a_pass(request_id: str, model_id: str = "m", tokens: int = 3, first: int = 1) -> ForwardBackward:
    ids = np.full(tokens, first, np.int32)
    datum = Datum(ids, {"target_tokens": ids.astype(np.int64), "weights": np.ones(tokens, np.float32)})
    return ForwardBackward(request_id=request_id, model_id=model_id, data=[datum], loss_fn="cross_entropy")


def optim(request_id: str, model_id: str = "m") -> OptimStep:
    return OptimStep(request_id=request_id, model_id=model_id, adam_params=AdamParams(learning_rate=0.1))


def sample(request_id: str, max_tokens: int = 4, version: str | None = None) -> Sample:
    params = SamplingParams(max_tokens=max_tokens, seed=0, stop=[])
    return Sample(request_id=request_id, version=version, prompt=np.asarray([1, 2], np.int32), params=params)


def test_the_first_frame_is_ready_with_facts_about_the_model(wire, backend):
    assert wire.read() == Ready(backend.info())


def test_a_training_run_gets_a_result_of_the_right_kind_for_every_request(wire, tmp_path):
    operations = [
        create(),
        a_pass("pass"),
        optim("optim"),
        SaveCheckpoint(request_id="save", model_id="m", path=str(tmp_path / "save")),
        Publish(request_id="publish", model_id="m", version="v", path=str(tmp_path / "v")),
    ]
    for seq_id, operation in enumerate(operations):
        wire.ask(operation, seq_id)
    results = wire.results("m/create", "pass", "optim", "save", "publish")
    kinds = [type(results[operation.request_id]) for operation in operations]
    assert kinds == [ModelOutput, ForwardBackwardOutput, OptimStepOutput, SaveOutput, SaveOutput]


def test_requests_that_arrive_out_of_order_run_in_seq_id_order(wire):
    wire.ask(create(), 0)
    wire.ask(optim("3"), 3)
    wire.ask(a_pass("2"), 2)
    wire.ask(a_pass("1"), 1)
    results = wire.results("1", "2", "3")
    assert [request_id for request_id in results if request_id != "m/create"] == ["1", "2", "3"]
    assert isinstance(results["3"], OptimStepOutput) and results["3"].metrics["skyrl.ai/grad_norm"] > 0


@pytest.mark.parametrize("gap_timeout_s", [0.2])
def test_a_gap_is_announced_then_fails_and_the_model_goes_on(wire):
    wire.ask(create(), 0)
    wire.ask(a_pass("2"), 2)
    frames = []
    while not (frames and isinstance(frames[-1], Done) and frames[-1].request_id == "2"):
        frames.append(wire.read())
    assert [frame.reason is None for frame in frames if isinstance(frame, Held)] == [False, True]
    failure = frames[-1].result
    assert failure.status == "user" and "seq_id=1 did not arrive within 0.2 s" in failure.error
    wire.ask(optim("3"), 3)
    assert "incomplete and were dropped" in wire.results("3")["3"].error
    wire.ask(a_pass("4"), 4)
    wire.ask(optim("5"), 5)
    assert isinstance(wire.results("5")["5"], OptimStepOutput)


@pytest.mark.parametrize("gap_timeout_s", [0.2])
def test_an_expired_gap_before_an_optimizer_step_drops_the_gradients_of_both_sides(wire, backend):
    wire.ask(create(), 0)
    wire.ask(a_pass("1"), 1)
    wire.ask(optim("3"), 3)
    assert "seq_id=2 did not arrive" in wire.results("3")["3"].error
    assert backend.models["m"].gradient_sums is None and backend.models["m"].step == 0


@pytest.mark.parametrize("long", [sample("long", max_tokens=200), a_pass("long")], ids=["sample", "pass"])
def test_a_short_sample_overtakes_a_long_request_of_its_own_tenant(long, config):
    backend = FakeBackend("fake", FakeConfig(quanta_per_pass=100))
    ours, its = socket.socketpair()
    channel, wire = EngineChannel(its), Wire(ours)
    engine = TinkerEngine(backend, channel, config)
    for operation, seq_id in [(create(), 0), (long, 1), (sample("short", max_tokens=2), None)]:
        channel.deliver(Enqueue(operation, seq_id))
    engine.turn()
    while backend.busy:
        engine.turn()
    order = list(wire.results("long", "short"))
    assert order.index("short") < order.index("long")
    wire.close()
    channel.close()
    backend.close()


def test_a_cancelled_sample_gets_no_result(wire, backend):
    wire.ask(sample("endless", max_tokens=10**9))
    wire.send(Cancel("endless"))
    wire.ask(sample("after"))
    assert list(wire.results("after")) == ["after"]
    assert not backend.busy


def test_a_rejected_request_takes_its_place_and_fails_the_next_optimizer_step(wire):
    wire.ask(create(), 0)
    wire.ask(Rejected(request_id="bad", model_id="m", error="datum 0: too long", gradients="incomplete"), 1)
    wire.ask(optim("optim"), 2)
    results = wire.results("bad", "optim")
    assert results["bad"] == ErrorResponse("datum 0: too long", "user", "incomplete")
    assert isinstance(results["optim"], ErrorResponse) and "datum 0: too long" in results["optim"].error


def test_a_dropped_version_cannot_be_sampled_any_more(wire, tmp_path):
    wire.ask(create(), 0)
    wire.ask(Publish(request_id="publish", model_id="m", version="v", path=str(tmp_path / "v")), 1)
    wire.results("publish")
    wire.ask(sample("now", version="v"))
    assert isinstance(wire.results("now")["now"], SampleOutput)
    wire.send(DropVersion("v"))
    wire.ask(sample("later", version="v"))
    assert "version=v is not known" in wire.results("later")["later"].error


def test_an_internal_error_fails_its_own_request_and_keeps_its_details_out_of_the_answer(wire):
    wire.ask(create(), 0)
    wire.ask(a_pass("poisoned", first=POISON), 1)
    wire.ask(create("n"), 0)
    results = wire.results("poisoned", "n/create")
    assert results["poisoned"].status == "server" and "poisoned)" in results["poisoned"].error
    assert "raise" not in results["poisoned"].error
    assert isinstance(results["n/create"], ModelOutput)


def test_a_failed_load_reports_the_missing_folder(wire, tmp_path):
    wire.ask(LoadCheckpoint(request_id="load", model_id="m", path=str(tmp_path / "nowhere")), 0)
    assert "nowhere" in wire.results("load")["load"].error


def test_shutdown_finishes_background_writes(backend, config, tmp_path):
    ours, its = socket.socketpair()
    channel, wire = EngineChannel(its), Wire(ours)
    channel.listen()
    engine = threading.Thread(target=TinkerEngine(backend, channel, config).run)
    engine.start()
    wire.ask(create(), 0)
    wire.ask(Publish(request_id="p", model_id="m", version="v", path=str(tmp_path / "v"), persist=False), 1)
    wire.results("p")
    wire.send(Shutdown())
    engine.join(BOUND_S)
    assert (tmp_path / "v" / "manifest.json").exists()
    wire.close()
    channel.close()


def test_the_engine_ends_when_the_other_side_closes(backend, config):
    ours, its = socket.socketpair()
    channel = EngineChannel(its)
    channel.listen()
    engine = threading.Thread(target=TinkerEngine(backend, channel, config).run)
    engine.start()
    ours.close()
    engine.join(BOUND_S)
    assert not engine.is_alive()
    channel.close()


def test_frames_larger_than_the_socket_buffer_arrive_whole(wire):
    wire.ask(create(), 0)
    wire.ask(a_pass("large", tokens=2_000_000), 1)
    (output,) = wire.results("large")["large"].loss_fn_outputs
    assert output["logprobs"].shape == (2_000_000,)


def test_frames_are_prefixed_with_the_number_of_their_parts_and_the_length_of_each(backend):
    ours, its = socket.socketpair()
    with ours, its:
        EngineChannel(its).send(Progress("x"))
        data = ours.recv(2**16)
    count, size = struct.unpack("<QQ", data[:16])
    assert (count, size) == (1, len(data) - 16)


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
            "backend=nope: no backend named 'nope'; known: fsdp, fsdp2, jax, skyrl_train, or module:attribute",
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


def test_a_model_that_cannot_be_loaded_is_reported_in_one_line(config):
    ours, its = socket.socketpair()
    channel, wire = EngineChannel(its), Wire(ours)
    wire.send(Start(config.model_copy(update={"base_model": "missing"})))
    assert serve(channel) == 1
    assert isinstance(wire.read(), Progress)
    assert wire.read() == Failed("base_model=missing: there is no such model; name another")
    wire.close()
    channel.close()


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


@pytest.fixture
def quiet(monkeypatch, request):
    """Time without requests after which something is prepared."""
    monkeypatch.setattr("skyrl.tinker.engine.loop.QUIET_S", request.param)


@pytest.fixture
def pieces(backend) -> Pieces:
    backend.prepare = Pieces()
    return backend.prepare


@pytest.mark.parametrize("quiet", [0.01], indirect=True)
def test_what_later_requests_need_is_prepared_when_nothing_has_come_for_a_while(quiet, pieces, wire):
    assert pieces.asked_for_more.wait(BOUND_S)


@pytest.mark.parametrize("quiet", [3600], indirect=True)
def test_nothing_is_prepared_between_requests_that_follow_each_other(quiet, pieces, wire):
    wire.ask(create(), seq_id=0)
    for number in range(1, 6):
        wire.ask(a_pass(str(number)), seq_id=number)
        wire.results(str(number))
    assert pieces.left == 3
