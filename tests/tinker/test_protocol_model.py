"""Any history of requests against a small model of the protocol (`reference_model.py`).

Two tenants send requests to several models, in order, early or twice, poll, sample, load and unload. Whatever the
history, each acknowledged request must have the outcome that the reference gives it, once and for all, and the weights
must be the reference's: so one model's requests, failures included, mean nothing to another.
"""

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from skyrl.tinker.proto import skyrl_tinker_pb2 as pb
from tests.tinker import reference_model as ref
from tests.tinker.harness import BASE_MODEL, PROTOBUF, pass_request, sample_request
from tests.tinker.in_process import InProcessServer

KEYS = ("tml-one", "tml-two")
PROMPT = [1, 2, 3]


@dataclass
class Sent:
    """An acknowledged training request."""

    request_id: str
    key: str
    model: ref.ReferenceModel | None = None
    seq_id: int = -1
    settled: ref.Outcome | None = None
    """Its outcome, where that does not depend on its place in a model's order."""
    seen: bytes | None = None
    """What the server has answered."""
    crashes: int = 0
    """Ends of engines that it has seen."""

    @property
    def expected(self) -> ref.Outcome | None:
        """None while it waits for an earlier request."""
        return self.settled if self.model is None or self.settled else self.model.outcomes.get(self.seq_id)


@dataclass
class Sampler:
    sampler_id: str
    key: str
    state: ref.State | None
    """None for the base model."""
    follows: ref.ReferenceModel | None = None
    """The model whose newest inflight version it samples."""
    next_seq_id: int = 0

    @property
    def weights(self) -> np.ndarray:
        state = self.follows.inflight if self.follows else self.state
        return np.zeros(ref.WIDTH) if state is None else state.weights


@dataclass
class SentSample:
    """An acknowledged sample, and what it must give."""

    request_id: str
    key: str
    body: dict[str, Any]
    tokens: list[list[int]]
    seen: bytes | None = None
    may_be_lost: bool = False
    """Samples live in memory: after a restart their client sends them again."""
    crashes: int = 0


tokens = st.lists(st.integers(20, 60), min_size=1, max_size=3)
seq_places = st.sampled_from(["next", "next", "next", "early", "earlier"])
rows = st.lists(tokens, min_size=1, max_size=2)
passes = st.one_of(
    st.builds(ref.Pass, rows, st.booleans()),
    st.builds(ref.Pass, rows),
    st.builds(ref.Pass, st.just([[ref.POISON]]), st.booleans()),
    st.builds(ref.Pass, st.just([[21]]), st.booleans(), st.just("no such loss")),
)
steps = st.builds(ref.Step, st.sampled_from([0.1, 0.5, 0.0]))
saves = st.one_of(
    st.builds(ref.Save, st.sampled_from(["a", "b"]), st.booleans()),
    st.builds(ref.PublishAs, st.sampled_from(["a", "b", "c"])),
    st.builds(lambda inflight: ref.PublishSampler(-1, inflight), st.booleans()),
)
actions = st.one_of(passes, steps, saves)
numbers = st.integers(0, 10**6)
"""Indices, taken modulo what there is to choose from."""


class Protocol(RuleBasedStateMachine):
    """Rules that need no crash."""

    OPTIONS: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="protocol-model-"))
        self.server = self.start()
        self.sessions: dict[str, str] = {}
        self.models: list[ref.ReferenceModel] = []
        self.sent: list[Sent] = []
        self.samplers: list[Sampler] = []
        self.samples: list[SentSample] = []
        self.sampler_numbers = 0

    def start(self) -> InProcessServer:
        return InProcessServer(self.folder, api_keys=KEYS, **self.OPTIONS).__enter__()

    def may_wait(self) -> None:
        """Called before something is waited for."""

    # -- sending ------------------------------------------------------------------------------------------------------

    def post(self, path: str, body: Any, key: str) -> Any:
        response = self.server.post(path, body, key)
        assert response.status_code == 200, (path, response.status_code, response.text)
        return response.json()

    def submit(self, model: ref.ReferenceModel, seq_id: int, action: ref.Action) -> str:
        """Send a request. Returns its request id."""
        place = {"model_id": model.model_id, "seq_id": seq_id}
        match action:
            case ref.Create(seed=seed, rank=rank):
                path, body = "create_model", {"base_model": BASE_MODEL, "lora_config": {"rank": rank, "seed": seed}}
                place = {"session_id": model.session, "model_seq_id": model.number}
            case ref.CreateFrom(checkpoint=checkpoint, optimizer=optimizer):
                path, body = "load_weights", {"path": checkpoint.path, "optimizer": optimizer}
                place = {"session_id": model.session, "model_seq_id": model.number}
            case ref.Pass(rows=rows, forward_only=forward_only, loss=loss):
                message = pass_request(model.model_id, seq_id, rows, forward_only, loss)
                response = self.server.request(
                    "POST",
                    "/forward_backward",
                    model.owner,
                    content=message.SerializeToString(),
                    headers={"Content-Type": PROTOBUF},
                )
                assert response.status_code == 200, response.text
                return response.json()["request_id"]
            case ref.Step(rate=rate):
                path, body = "optim_step", {"adam_params": {"learning_rate": rate}}
            case ref.Save(name=name, overwrite=overwrite):
                path, body = "save_weights", {"path": name, "overwrite": overwrite}
            case ref.PublishAs(name=name):
                path, body = "save_weights_for_sampler", {"path": name}
            case ref.PublishSampler(number=number, inflight=inflight):
                path = "save_weights_for_sampler"
                body = {"sampling_session_seq_id": number, "kind": "inflight" if inflight else "snapshot"}
            case ref.Load(checkpoint=checkpoint, optimizer=optimizer):
                path, body = "load_weights", {"path": checkpoint.path, "optimizer": optimizer}
            case _:
                raise AssertionError(action)
        return self.post(f"/{path}", {**place, **body}, model.owner)["request_id"]

    def send(self, model: ref.ReferenceModel, seq_id: int, action: ref.Action) -> Sent:
        """Send a new request to the server and to the reference."""
        if isinstance(action, ref.PublishSampler) and action.number < 0:
            self.sampler_numbers += 1
            action = ref.PublishSampler(self.sampler_numbers, action.inflight)
        sent = Sent(self.submit(model, seq_id, action), model.owner, model, seq_id)
        assert all(sent.request_id != other.request_id for other in self.sent)
        model.arrive(seq_id, action)
        self.sent.append(sent)
        return sent

    def new_model(self, key: str, action: ref.Action) -> ref.ReferenceModel:
        model = ref.ReferenceModel(self.sessions[key], len(self.models), key)
        self.models.append(model)
        self.send(model, 0, action)
        return model

    def create(self, key: str, seed: int) -> None:
        """A model that is there: it can take requests before its creation has ended, as clients see to."""
        self.new_model(key, ref.Create(seed))

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self, sent: Sent, wait: bool) -> None:
        """Poll a request and compare with the reference."""
        expected = sent.expected
        if expected is None:
            response = self.server.poll(sent.request_id, sent.key)
            assert response.status_code == 408, (sent, response.text)
            return
        if wait:
            self.may_wait()
        response = (self.server.outcome if wait else self.server.poll)(sent.request_id, sent.key)
        if response.status_code == 408 and not wait and sent.seen is None:
            return
        assert response.status_code == 200, (sent, response.status_code, response.text)
        assert sent.seen in (None, response.content), (sent, response.content)
        if sent.seen is None:
            sent.seen = response.content
            check(response, expected, sent)

    def read_sample(self, sample: SentSample, wait: bool) -> None:
        if wait:
            self.may_wait()
        response = (self.server.outcome if wait else self.server.poll)(sample.request_id, sample.key)
        if response.status_code == 408 and not wait and sample.seen is None:
            return
        if response.status_code == 410 and sample.may_be_lost:
            sample.request_id = self.post("/asample", sample.body, sample.key)["request_id"]
            sample.may_be_lost, sample.seen = False, None
            self.read_sample(sample, wait)
            return
        assert response.headers["content-type"] == PROTOBUF, (sample, response.status_code, response.text)
        assert sample.seen in (None, response.content), sample
        sample.seen = response.content
        sequences = pb.SampleResponse.FromString(response.content).sequences
        assert [np.frombuffer(sequence.tokens, "<i4").tolist() for sequence in sequences] == sample.tokens, sample

    def read_all(self) -> None:
        """Wait for everything that can end."""
        for sent in self.sent:
            self.read(sent, wait=True)
        for sample in self.samples:
            self.read_sample(sample, wait=True)

    def await_saves(self, model: ref.ReferenceModel) -> None:
        """Wait for what the model's requests have made so far."""
        for sent in self.sent:
            if sent.model is model and sent.expected is not None and sent.seen is None:
                self.read(sent, wait=True)

    # -- rules --------------------------------------------------------------------------------------------------------

    @initialize()
    def two_tenants_with_models(self) -> None:
        for key in KEYS:
            self.sessions[key] = self.post("/create_session", {}, key)["session_id"]
        for number, key in enumerate([KEYS[0], KEYS[0], KEYS[1]]):
            self.create(key, seed=number)

    @rule(which=numbers, place=seq_places, action=passes)
    def compute(self, which: int, place: str, action: ref.Action) -> None:
        self.submit_at(which, place, action)

    @rule(which=numbers, place=seq_places, action=steps)
    def step(self, which: int, place: str, action: ref.Action) -> None:
        self.submit_at(which, place, action)

    @rule(which=numbers, place=seq_places, action=saves)
    def save(self, which: int, place: str, action: ref.Action) -> None:
        self.submit_at(which, place, action)

    def submit_at(self, which: int, place: str, action: ref.Action) -> None:
        model = self.models[which % len(self.models)]
        seq_id = model.missing()
        wanted = {"next": 0, "early": 1, "earlier": 2}[place]
        while wanted or seq_id in model.arrived:
            seq_id += 1
            wanted -= 0 if seq_id in model.arrived else 1
        self.send(model, seq_id, action)

    @rule(which=numbers, rows=rows, rate=st.sampled_from([0.1, 1.0]))
    def submit_a_chunked_batch(self, which: int, rows: list[list[int]], rate: float) -> None:
        """As clients send one: later chunks first, then the first chunk, then the step."""
        model = self.models[which % len(self.models)]
        seq_id = model.missing()
        if any(other > seq_id for other in model.arrived):
            return
        for offset in (1, 2, 0):
            self.send(model, seq_id + offset, ref.Pass(rows))
        self.send(model, seq_id + 3, ref.Step(rate))

    @rule(which=numbers, action=actions)
    def send_again(self, which: int, action: ref.Action) -> None:
        """A retry, even one with other contents, is the request that came before."""
        sent = self.some_request(which)
        assert sent.model is not None
        first = sent.model.arrived[sent.seq_id]
        again = action if type(action) is type(first) else first
        if isinstance(again, ref.PublishSampler) and again.number < 0:
            again = first
        assert self.submit(sent.model, sent.seq_id, again) == sent.request_id

    @rule(which=numbers)
    def send_another_kind(self, which: int) -> None:
        """A seq_id that a request of another kind has is refused, and changes nothing."""
        sent = self.some_request(which)
        assert sent.model is not None
        if sent.seq_id == 0:
            return
        first = sent.model.arrived[sent.seq_id]
        other = ref.Save("z") if isinstance(first, ref.Step) else ref.Step(0.1)
        request_id = self.submit(sent.model, sent.seq_id, other)
        assert request_id != sent.request_id
        self.sent.append(Sent(request_id, sent.key, settled=ref.Failed("user")))

    @rule(which=numbers)
    def poll_one(self, which: int) -> None:
        self.read(self.sent[which % len(self.sent)], wait=False)

    @rule(which=numbers)
    def another_tenant_finds_nothing(self, which: int) -> None:
        sent = self.some_request(which)
        assert sent.model is not None
        stranger = next(key for key in KEYS if key != sent.key)
        assert self.server.poll(sent.request_id, stranger).status_code == 404
        model_id = sent.model.model_id
        body = {"model_id": model_id, "seq_id": sent.model.missing()}
        assert self.server.post("/optim_step", body, stranger).status_code == 404

    @rule(which=numbers, source=numbers, optimizer=st.booleans(), new=st.booleans())
    def load(self, which: int, source: int, optimizer: bool, new: bool) -> None:
        """In place, or as a new model; of any model of the tenant that has saved."""
        model = self.models[which % len(self.models)]
        checkpoint = self.some_checkpoint(model.owner, source, "weights")
        if checkpoint is None:
            self.send(model, model.missing(), ref.Save("a"))
            return
        if not new:
            self.send(model, model.missing(), ref.Load(checkpoint, optimizer))
        elif len(self.models) < 6:
            self.new_model(model.owner, ref.CreateFrom(checkpoint, optimizer))

    @rule(which=numbers, really=st.integers(0, 3))
    def unload(self, which: int, really: int) -> None:
        model = self.models[which % len(self.models)]
        if really or model.unloaded or len(self.models) >= 6:
            return
        request_id = self.post("/unload_model", {"model_id": model.model_id}, model.owner)["request_id"]
        model.unload()
        self.sent.append(Sent(request_id, model.owner, settled=ref.JsonDone({"model_id": model.model_id})))
        self.create(model.owner, seed=len(self.models))

    @rule(which=numbers, source=numbers)
    def make_a_sampler(self, which: int, source: int) -> None:
        """Of the base model, a checkpoint, or what a model has published."""
        model = self.models[which % len(self.models)]
        if source % 3:
            self.send(model, model.missing(), ref.PublishSampler(-1, source % 3 == 2))
        self.await_saves(model)
        for number in [number for number in model.samplers if number not in model.inflight_numbers]:
            self.add_sampler(f"{model.session}:sample:{number}", model.owner, model.samplers[number])
        for number in model.inflight_numbers:
            self.add_sampler(f"{model.session}:sample:{number}", model.owner, None, model)
        checkpoint = self.some_checkpoint(model.owner, source, "sampler_weights")
        origin = {"base_model": BASE_MODEL} if checkpoint is None else {"model_path": checkpoint.path}
        self.sampler_numbers += 1
        body = {"session_id": model.session, "sampling_session_seq_id": self.sampler_numbers, **origin}
        sampler_id = self.post("/create_sampling_session", body, model.owner)["sampling_session_id"]
        self.add_sampler(sampler_id, model.owner, checkpoint and checkpoint.state)

    @precondition(lambda self: self.samplers)
    @rule(which=numbers, seed=st.integers(0, 3), temperature=st.sampled_from([0.0, 1.0]), length=st.integers(1, 5))
    def sample_something(self, which: int, seed: int, temperature: float, length: int) -> None:
        self.sample(which, seed, temperature, length)

    def sample(self, which: int, seed: int, temperature: float, length: int) -> None:
        """What comes back is decided now, whatever the model's weights become meanwhile."""
        sampler = self.samplers[which % len(self.samplers)]
        if sampler.follows:
            self.await_saves(sampler.follows)
        params = {"max_tokens": length, "temperature": temperature, "seed": seed, "stop": []}
        body = sample_request(sampler.sampler_id, sampler.next_seq_id, sampling_params=params, num_samples=2)
        sampler.next_seq_id += 1
        request_id = self.post("/asample", body, sampler.key)["request_id"]
        dice = seed if temperature else None
        expected = [ref.continuation(sampler.weights, PROMPT, dice, index, length) for index in range(2)]
        self.samples.append(SentSample(request_id, sampler.key, body, expected))
        assert self.post("/asample", body, sampler.key)["request_id"] == request_id

    @precondition(lambda self: self.samples)
    @rule(which=numbers)
    def poll_a_sample(self, which: int) -> None:
        self.read_sample(self.samples[which % len(self.samples)], wait=False)

    # -- choices ------------------------------------------------------------------------------------------------------

    def some_request(self, which: int) -> Sent:
        requests = [sent for sent in self.sent if sent.model is not None]
        return requests[which % len(requests)]

    def some_checkpoint(self, key: str, which: int, kind: str) -> ref.Checkpoint | None:
        """One that the server knows of by now, too."""
        for model in self.models:
            if model.owner == key:
                self.await_saves(model)
        found = [
            checkpoint
            for model in self.models
            if model.owner == key
            for (of_kind, _), checkpoint in model.checkpoints.items()
            if of_kind == kind
        ]
        return found[which % len(found)] if found else None

    def add_sampler(
        self, sampler_id: str, key: str, state: ref.State | None, follows: ref.ReferenceModel | None = None
    ) -> None:
        if all(sampler.sampler_id != sampler_id for sampler in self.samplers):
            self.samplers.append(Sampler(sampler_id, key, state, follows))

    # -- the end ------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            if self.sessions:
                self.settle()
            self.server.__exit__()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def settle(self) -> None:
        """Fill all gaps, read every outcome twice, and compare the weights."""
        self.read_all()
        for model in self.models:
            while model.held():
                self.send(model, model.missing(), ref.Pass([[7]], forward_only=True))
            if not model.unloaded:
                self.send(model, model.missing(), ref.Step(0.0))
                self.send(model, model.missing(), ref.Pass([[5, 6]]))
                self.send(model, model.missing(), ref.Step(0.1))
                self.send(model, model.missing(), ref.Pass([[5, 6]], forward_only=True))
        for which in range(len(self.samplers)):
            self.sample(which, seed=which, temperature=1.0, length=2)
        for _ in range(2):
            self.read_all()


class CrashingProtocol(Protocol):
    """The same, while engines crash and servers stop, are killed and start again."""

    OPTIONS: ClassVar[dict[str, Any]] = {"snapshot_every_steps": 2, "snapshot_every_requests": 6}
    down = False

    def may_wait(self) -> None:
        if self.down:
            self.recover()

    @precondition(lambda self: not self.down)
    @rule(at_once=st.booleans())
    def crash(self, at_once: bool) -> None:
        """The engine ends. What has seen two ends is awaited first: at the third it is taken for the cause."""
        for request in [*self.sent, *self.samples]:
            if request.seen is None and request.crashes == 2:
                self.read(request, wait=True) if isinstance(request, Sent) else self.read_sample(request, wait=True)
        for request in [*self.sent, *self.samples]:
            request.crashes += request.seen is None
        self.server.crash()
        self.down = True
        if at_once:
            self.recover()

    @precondition(lambda self: self.down)
    @rule()
    def recover(self) -> None:
        self.server.recover()
        self.down = False

    @rule()
    def restart(self) -> None:
        self.may_wait()
        self.server.restart()
        self.forget_samples()

    @rule()
    def kill(self) -> None:
        self.may_wait()
        self.server.kill()
        self.forget_samples()

    def forget_samples(self) -> None:
        for sample in self.samples:
            sample.may_be_lost = True


def check(response: httpx.Response, expected: ref.Outcome, sent: Sent) -> None:
    """Compare an answer with the reference."""
    match expected:
        case ref.PassDone(logprobs=logprobs, loss=loss):
            assert response.headers["content-type"] == PROTOBUF, (sent, response.text)
            message = pb.ForwardBackwardOutput.FromString(response.content)
            found = b"".join(record.fields["logprobs"].data for record in message.loss_fn_outputs)
            np.testing.assert_array_equal(np.frombuffer(found, "<f4"), np.concatenate(logprobs).astype(np.float32))
            np.testing.assert_allclose(message.metrics["loss:sum"], loss, rtol=1e-5)
        case ref.Failed(category=category, says=says):
            failure = json.loads(response.content)
            assert "error" in failure and failure["category"] == category, (sent, failure)
            assert says in failure["error"], (sent, failure)
        case ref.JsonDone(entries=entries):
            result = json.loads(response.content)
            assert "error" not in result and entries.items() <= result.items(), (sent, result)


def options(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],  # to find a shorter history that fails takes minutes: the long test does it
        suppress_health_check=list(HealthCheck),
    )


def test_any_history_of_requests_has_the_outcomes_of_the_reference():
    run_state_machine_as_test(Protocol, settings=options(examples=12, steps=30))


def test_crashes_and_restarts_change_no_outcome():
    run_state_machine_as_test(CrashingProtocol, settings=options(examples=12, steps=30))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", [Protocol, CrashingProtocol])
def test_many_long_histories_have_the_outcomes_of_the_reference(machine):
    phases = [Phase.generate, Phase.shrink]
    many = settings(options(100, 60), derandomize=False, phases=phases, print_blob=True)
    run_state_machine_as_test(machine, settings=many)
