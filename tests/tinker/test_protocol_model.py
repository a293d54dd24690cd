"""Any history of requests against a small model of the protocol (`reference_model.py`).

Two tenants send requests to several models, in order, early or twice, poll, sample, cancel, load and unload. Whatever
the history, each acknowledged request must have the outcome that the reference gives it, once and for all, and the
weights must be the reference's: so one model's requests, failures included, mean nothing to another.
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

from skyrl.tinker.wire.proto import skyrl_tinker_pb2 as pb
from tests.tinker import reference_model as ref
from tests.tinker.harness import BASE_MODEL, PROTOBUF, pass_request, sample_request
from tests.tinker.in_process import InProcessServer

KEYS = ("tml-one", "tml-two")
PROMPT = [1, 2, 3]
FAR = 10**8
"""Tokens that no sample comes to."""
MOST_ENDLESS = 3
"""Samples without an end that run at a time."""


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
    """Answer of the server."""
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
    """An acknowledged sample, and what may come of it."""

    request_id: str
    sampler: Sampler
    body: dict[str, Any]
    state: ref.ReferenceSample
    seen: bytes | None = None
    crashes: int = 0

    @property
    def key(self) -> str:
        return self.sampler.key

    @property
    def endless(self) -> bool:
        """True if it runs until it is cancelled."""
        return self.state.runs and self.state.tokens is None


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

    OPTIONS: ClassVar[dict[str, Any]] = {"backend_config": {"max_context_length": 10 * FAR, "burst_s": 0.001}}
    down = False
    """True while there is no engine."""

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
        """Poll a sample and compare with the reference. One that was lost with its server is sent again."""
        if not sample.state.known:
            assert self.server.poll(sample.request_id, sample.key).status_code == 410, sample
            self.send_sample_again(sample)
        if wait and sample.state.runs:
            self.cancel_endless()
            self.may_wait()
        wait = (wait or sample.state.cancelled) and not sample.endless  # the end of a cancelled one takes no engine
        response = (self.server.outcome if wait else self.server.poll)(sample.request_id, sample.key)
        if response.status_code == 408 and not wait and sample.state.outcome is None:
            return
        assert response.status_code == 200 and sample.seen in (None, response.content), (sample, response.content)
        sample.seen = response.content
        sample.state.answered(end_of(response))

    def cancel_endless(self) -> None:
        """Make way for samples that end: what has no end takes all the room."""
        for sample in self.samples:
            if sample.endless:
                self.cancel(sample)

    def cancel(self, sample: SentSample) -> None:
        """As the client that sent it. Once that is acknowledged there is an outcome, with an engine or without."""
        self.cancel_as(sample.key, sample.request_id)
        sample.state.cancel()
        if sample.state.known:
            self.read_sample(sample, wait=False)

    def cancel_as(self, key: str, request_id: str) -> None:
        assert self.server.post("/cancel_future", {"request_id": request_id}, key).status_code == 204

    def read_all(self) -> None:
        """Wait for everything that can end."""
        self.cancel_endless()
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
            self.create_sampler(key, None)
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
        self.create_sampler(model.owner, self.some_checkpoint(model.owner, source, "sampler_weights"))

    def create_sampler(self, key: str, checkpoint: ref.Checkpoint | None) -> None:
        origin = {"base_model": BASE_MODEL} if checkpoint is None else {"model_path": checkpoint.path}
        self.sampler_numbers += 1
        body = {"session_id": self.sessions[key], "sampling_session_seq_id": self.sampler_numbers, **origin}
        sampler_id = self.post("/create_sampling_session", body, key)["sampling_session_id"]
        self.add_sampler(sampler_id, key, checkpoint and checkpoint.state)

    @rule(which=numbers, seed=st.integers(0, 3), temperature=st.sampled_from([0.0, 1.0]), length=st.integers(1, 5))
    def sample_something(self, which: int, seed: int, temperature: float, length: int) -> None:
        self.sample(which, seed, temperature, length)

    def sample(self, which: int, seed: int, temperature: float, length: int) -> None:
        sampler = self.samplers[which % len(self.samplers)]
        params = {"max_tokens": length, "temperature": temperature, "seed": seed, "stop": []}
        body = sample_request(sampler.sampler_id, sampler.next_seq_id, sampling_params=params, num_samples=2)
        sampler.next_seq_id += 1
        request_id, state = self.send_sample(sampler, body)
        self.samples.append(SentSample(request_id, sampler, body, state))
        self.send_sample_again(self.samples[-1])

    def send_sample(self, sampler: Sampler, body: dict[str, Any]) -> tuple[str, ref.ReferenceSample]:
        """Send a sample. Its tokens are decided now, whatever the model's weights become meanwhile."""
        if sampler.follows:
            self.await_saves(sampler.follows)
        request_id = self.post("/asample", body, sampler.key)["request_id"]
        params = body["sampling_params"]
        dice, length = params["seed"] if params["temperature"] else None, params["max_tokens"]
        expected = None
        if length != FAR:
            expected = [ref.continuation(sampler.weights, PROMPT, dice, index, length) for index in range(2)]
        return request_id, ref.ReferenceSample(expected, begun=not self.down)

    def send_sample_again(self, sample: SentSample) -> None:
        """While the server knows it, it is the same sample, cancelled or not; then it is a new one of the same name."""
        if sample.state.known:
            request_id = self.post("/asample", sample.body, sample.key)["request_id"]
        else:
            request_id, sample.state = self.send_sample(sample.sampler, sample.body)
            sample.seen = None
        assert request_id == sample.request_id

    @precondition(lambda self: self.samples)
    @rule(which=numbers)
    def poll_a_sample(self, which: int) -> None:
        self.read_sample(self.samples[which % len(self.samples)], wait=False)

    @precondition(lambda self: sum(sample.endless for sample in self.samples) < MOST_ENDLESS)
    @rule(which=numbers)
    def sample_without_end(self, which: int) -> None:
        self.sample(which, seed=0, temperature=0.0, length=FAR)

    @precondition(lambda self: self.samples)
    @rule(which=numbers, times=st.integers(1, 2), again=st.booleans())
    def cancel_a_sample(self, which: int, times: int, again: bool) -> None:
        """Of the last ones, which may be waiting or running, finished, cancelled before, or lost with their server."""
        sample = self.samples[-1 - which % min(4, len(self.samples))]
        for _ in range(times):
            self.cancel(sample)
        if again:
            self.send_sample_again(sample)

    @rule(which=numbers)
    def cancel_what_cannot_be_cancelled(self, which: int) -> None:
        """Training requests, what there is not, and samples of another tenant."""
        sent = self.some_request(which)
        for request_id in (sent.request_id, "sample-nobody:sample:0-0", "nonsense"):
            self.cancel_as(sent.key, request_id)
        for sample in self.samples:
            if sample.state.runs:
                self.cancel_as(next(key for key in KEYS if key != sample.key), sample.request_id)
                self.read_sample(sample, wait=False)

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
        finally:
            self.server.__exit__()
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
        for sampler in self.samplers:
            self.check_ends(sampler)
        self.await_idle_engine()

    def await_idle_engine(self) -> None:
        """Nothing that was cancelled is still worked on."""
        for _ in range(400):
            if not self.server.app.state.server.service.crash_record.running:
                return
            self.server.let_it_work(0.01)
        raise AssertionError(self.server.app.state.server.service.crash_record.running)

    def check_ends(self, sampler: Sampler) -> None:
        """Clients that wait for all of their samples at once are told of the same ends."""
        body = {"target": {"sampling_session_id": sampler.sampler_id}, "timeout": 0}
        ends = self.post("/retrieve_futures", body, sampler.key)["completions"]
        told = {end["request_id"]: end["state"] for end in ends}
        for sample in self.samples:
            if sample.sampler is sampler and sample.state.known:
                state = "failed" if sample.state.outcome == ref.CANCELLED else "finished"
                assert told[sample.request_id] == state, (sample, told)


class CrashingProtocol(Protocol):
    """The same, while engines crash and servers stop, are killed and start again."""

    OPTIONS: ClassVar[dict[str, Any]] = {
        **Protocol.OPTIONS,
        "snapshot_every_steps": 2,
        "snapshot_every_requests": 6,
    }

    def may_wait(self) -> None:
        if self.down:
            self.recover()

    @precondition(lambda self: not self.down)
    @rule(at_once=st.booleans())
    def crash(self, at_once: bool) -> None:
        """The engine ends."""
        self.await_suspects()
        self.server.crash()
        self.down = True
        if at_once:
            self.recover()

    def await_suspects(self) -> None:
        """Await what has seen two ends: at the third it may be taken for the cause."""
        for sent in self.sent:
            if sent.seen is None and sent.crashes >= 2:
                self.read(sent, wait=True)
        for sample in self.samples:
            if sample.state.runs and sample.crashes >= 2:
                self.cancel(sample) if sample.endless else self.read_sample(sample, wait=True)
        for sent in self.sent:
            sent.crashes += sent.seen is None
        for sample in self.samples:
            sample.crashes += sample.state.runs

    @precondition(lambda self: self.down)
    @rule()
    def recover(self) -> None:
        self.server.recover()
        self.down = False
        for sample in self.samples:
            sample.state.begun = True

    @precondition(lambda self: self.down)
    @rule(which=numbers)
    def cancel_what_no_engine_has(self, which: int) -> None:
        """The next one does not get it either."""
        self.sample_without_end(which)
        self.cancel(self.samples[-1])
        self.may_wait()
        self.cancel_endless()
        self.await_idle_engine()

    @rule()
    def restart(self) -> None:
        self.may_wait()
        self.server.restart()
        self.forget_samples()

    @rule()
    def kill(self) -> None:
        self.may_wait()
        self.await_suspects()
        self.server.kill()
        self.forget_samples()

    def forget_samples(self) -> None:
        for sample in self.samples:
            sample.state.lose()


def end_of(response: httpx.Response) -> ref.Sampled | ref.Failed:
    """Return the end of a sample."""
    if response.headers["content-type"] != PROTOBUF:
        failure = response.json()
        return ref.Failed(failure["category"], failure["error"])
    sequences = pb.SampleResponse.FromString(response.content).sequences
    return ref.Sampled([np.frombuffer(sequence.tokens, "<i4").tolist() for sequence in sequences])


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


@pytest.mark.full
def test_any_history_of_requests_has_the_outcomes_of_the_reference():
    run_state_machine_as_test(Protocol, settings=options(examples=5, steps=30))


@pytest.mark.full
def test_crashes_and_restarts_change_no_outcome():
    run_state_machine_as_test(CrashingProtocol, settings=options(examples=5, steps=30))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", [Protocol, CrashingProtocol])
def test_many_long_histories_have_the_outcomes_of_the_reference(machine):
    phases = [Phase.generate, Phase.shrink]
    many = settings(options(100, 60), derandomize=False, phases=phases, print_blob=True)
    run_state_machine_as_test(machine, settings=many)
