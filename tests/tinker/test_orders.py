"""Requests that an operator cancels, and models that one unloads."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker

from skyrl import cli
from skyrl.tinker.local_server import close_client
from skyrl.tinker.requests.outcomes import CANCELLED
from tests.tinker.harness import BASE_MODEL, LiveServer, wait_until_ready
from tests.tinker.in_process import InProcessServer
from tests.tinker.test_status import requests, until

OPERATOR, ALICE = "tml-operator", "tml-alice"
CANCELLED_ANSWER = {"error": CANCELLED, "category": "user"}
QUANTA = 1000
"""Pieces of a pass, more than the engine computes before it reads the next frame."""


def order(server: LiveServer, path: str, code: int = 200, key: str | None = None) -> dict[str, Any]:
    headers = {} if key is None else {"X-API-Key": key}
    response = server.http.post(f"{server.url}/operator/{path}", headers=headers)
    assert response.status_code == code, response.text
    return response.json()


def ordered(server: LiveServer, path: str) -> Callable[[], dict[str, Any]]:
    """Give an order whose end has to be waited for. Returns what waits for its answer."""
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(order(server, path)))
    thread.start()

    def answer() -> dict[str, Any]:
        thread.join()
        return answers[0]

    return answer


def noted(server: LiveServer, request_id: str) -> None:
    """Wait until a cancellation has reached the queue and the log, and an engine that is held."""
    pending = server.app.state.server.queue.training
    until(lambda: {owed.request_id: owed.cancelled for owed in pending.waiting()}.get(request_id), bool)
    frames = server.engine.sent if server.engine.gate is None else server.engine.inbox
    until(lambda: frames and type(frames[-1]).__name__, lambda name: name == "Refuse")


def running(server: LiveServer, request_id: str) -> None:
    until(lambda: requests(server)[request_id]["state"], lambda state: state == "running")


def trained(server: LiveServer, batches: list[list[int]]) -> list[float]:
    """Log-probabilities after a step for each batch, by a model of its own."""
    model, place = server.model(), 1
    for tokens in batches:
        place = server.train(model, place, tokens)
    return server.logprobs(model, place)


@pytest.mark.full
def test_a_queued_pass_fails_and_what_comes_later_goes_on_as_if_it_had_failed(own_server):
    model = own_server.model()
    own_server.engine.hold()
    first, second = own_server.submit_pass(model, 1, [1, 2, 3]), own_server.submit_pass(model, 2, [7, 8])
    steps = [own_server.submit_step(model, 3)]
    running(own_server, first)
    answer = ordered(own_server, f"requests/{second}/cancel")
    noted(own_server, second)
    own_server.engine.let_go()
    assert answer() == {"request_id": second, "state": "failed", "cancelled": True, "error": CANCELLED}
    assert own_server.failure(second) == CANCELLED_ANSWER
    own_server.pass_result(first)
    assert "incomplete" in own_server.failure(steps[0])["error"]  # never a step on a part of a batch
    own_server.train(model, 4, [4, 5])
    assert own_server.logprobs(model, 6) == trained(own_server, [[4, 5]])


@pytest.mark.full
def test_a_pass_that_runs_is_computed_no_further(tmp_path):
    with LiveServer(tmp_path, backend_config={"quanta_per_pass": QUANTA}) as server:
        wait_until_ready(server)
        model = server.model()
        server.engine.hold()
        request = server.submit_pass(model, 1)
        running(server, request)
        answer = ordered(server, f"requests/{request}/cancel")
        noted(server, request)
        server.engine.let_go()
        assert answer()["cancelled"] and server.failure(request) == CANCELLED_ANSWER
        computed = [entry for entry in server.engine.backend.journal if isinstance(entry, tuple) and request in entry]
        assert len(computed) < QUANTA
        server.failure(server.submit_step(model, 2))
        server.train(model, 3, [4, 5])
        assert server.logprobs(model, 5) == trained(server, [[4, 5]])


def test_a_cancelled_step_takes_the_gradients_of_its_batch_with_it(own_server):
    model = own_server.model()
    own_server.engine.hold()
    own_server.submit_pass(model, 1, [1, 2, 3])
    step = own_server.submit_step(model, 2)
    answer = ordered(own_server, f"requests/{step}/cancel")
    noted(own_server, step)
    own_server.engine.let_go()
    assert answer()["cancelled"]
    own_server.train(model, 3, [4, 5])
    assert own_server.logprobs(model, 5) == trained(own_server, [[4, 5]])


def test_what_waits_for_a_missing_request_fails_in_its_place(own_server):
    model = own_server.model()
    early = own_server.submit_pass(model, 2, forward_only=True)
    until(lambda: requests(own_server)[early]["waits_for"], lambda reason: "seq_id=1" in str(reason))
    answer = ordered(own_server, f"requests/{early}/cancel")
    noted(own_server, early)
    own_server.pass_result(own_server.submit_pass(model, 1))
    assert answer()["cancelled"] and own_server.failure(early) == CANCELLED_ANSWER
    own_server.result(own_server.submit_step(model, 3))


@pytest.mark.parametrize("ends", ["engine", "server"])
def test_a_cancelled_request_fails_after_the_end_of_a_process(tmp_path, ends):
    """Nobody told the engine: it is another one that lets it fail."""
    with InProcessServer(tmp_path / "state") as server:
        model = server.model()
        server.crash()
        steps = [server.submit_step(model, place) for place in (1, 2)]
        server._runner.run(server.app.state.server.queue.cancel(steps[0]))
        server.kill() if ends == "server" else server.recover()
        assert server.outcome(steps[0]).json() == CANCELLED_ANSWER
        assert "error" not in server.outcome(steps[1]).json()


def test_a_request_that_was_done_all_the_same_is_done_again_by_the_next_engine(own_server):
    """An engine that has gone too far with a cancelled request ends it: so does a revival of its model."""
    model = own_server.model()
    own_server.train(model, 1, [1, 2, 3])
    queue = own_server.app.state.server.queue
    own_server.engine.send = lambda frame, send=own_server.engine.send: (
        None if type(frame).__name__ == "Refuse" else send(frame)
    )
    own_server.engine.hold()
    passed = own_server.submit_pass(model, 3, [7, 8])
    own_server.on_loop(queue.cancel(passed))
    own_server.engine.let_go()
    own_server.pass_result(passed)
    own_server.result(own_server.submit_step(model, 4))
    own_server.crash()
    own_server.recover()
    assert own_server.logprobs(model, 5) == trained(own_server, [[1, 2, 3], [7, 8]])


def test_a_cancelled_save_leaves_nothing_and_its_name_is_free(own_server):
    model = own_server.model()
    own_server.engine.hold()
    own_server.submit_pass(model, 1)
    save = own_server.ok("/save_weights", {"model_id": model, "seq_id": 2, "path": "a"})["request_id"]
    answer = ordered(own_server, f"requests/{save}/cancel")
    noted(own_server, save)
    own_server.engine.let_go()
    assert answer()["cancelled"]
    assert own_server.http.get("/checkpoints").json()["checkpoints"] == []
    assert own_server.run("/save_weights", {"model_id": model, "seq_id": 3, "path": "a"})["path"].endswith("/a")


def test_a_sample_is_cancelled(tmp_path):
    with LiveServer(tmp_path, backend_config={"max_context_length": 10**9, "burst_s": 0.005}) as server:
        wait_until_ready(server)
        sampler = server.sampler(server.session(), 0, base_model=BASE_MODEL)
        endless = {"max_tokens": 10**8, "temperature": 0.0, "stop": []}
        request = server.submit_sample(sampler, 0, sampling_params=endless)["request_id"]
        assert order(server, f"requests/{request}/cancel")["cancelled"]
        assert server.failure(request) == CANCELLED_ANSWER
        server.sample(sampler, 1)
        server.on_loop(server.engine.stop())  # the backend has nothing left, so its loop ends


def test_what_cannot_be_cancelled_says_why(own_server):
    model = own_server.model()
    ended = own_server.submit_pass(model, 1)
    own_server.outcome(ended)
    assert "may have ended" in order(own_server, f"requests/{ended}/cancel", 404)["detail"]
    assert "may have ended" in order(own_server, "requests/sample-x:sample:0-1/cancel", 404)["detail"]
    own_server.engine.hold()
    own_server.submit_pass(model, 2)
    body = {"session_id": own_server.session(), "model_seq_id": 0, "base_model": BASE_MODEL}
    creation = own_server.ok("/create_model", {**body, "lora_config": {"rank": 4}})["request_id"]
    refused = until(
        lambda: own_server.http.post(f"{own_server.url}/operator/requests/{creation}/cancel"),
        lambda response: response.status_code == 400,
    )
    own_server.engine.let_go()
    assert "unload that instead" in refused.json()["detail"]


@pytest.mark.full
def test_a_model_is_unloaded_and_later_requests_are_refused(own_server):
    model = own_server.model()
    own_server.train(model, 1)
    assert order(own_server, f"models/{model}/unload")["state"] == "done"
    assert not own_server.engine.backend.has_model(model)
    assert "was unloaded" in own_server.failure(own_server.submit_pass(model, 3))["error"]
    assert order(own_server, f"models/{model}/unload")["state"] == "done"  # it is the same order
    assert "is not known" in order(own_server, "models/nobodys:train:0/unload", 404)["detail"]


def test_a_model_of_a_finished_session_is_unloaded(own_server):
    model = own_server.model()
    assert own_server.post(f"/sessions/{model.partition(':')[0]}/finish", {}).status_code == 204
    unloaded = order(own_server, f"models/{model}/unload")
    assert (unloaded["state"], unloaded["error"]) == ("done", None)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("guarded")
    with LiveServer(folder, api_keys=[ALICE], operator_keys=[OPERATOR]) as server:
        wait_until_ready(server)
        yield server


def test_the_sdks_future_raises_and_its_client_goes_on(guarded, monkeypatch, capsys):
    """By the command, and over the stock SDK."""
    monkeypatch.setenv("SKYRL_OPERATOR_KEYS", OPERATOR)
    service = tinker.ServiceClient(base_url=guarded.url, api_key=ALICE)
    trainer = service.create_lora_training_client(BASE_MODEL, rank=4).result()
    tokens = np.asarray([1, 2, 3])
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens.tolist()),
        loss_fn_inputs={"target_tokens": tokens, "weights": np.ones(3, np.float32)},
    )
    guarded.engine.hold()
    kept, lost = [trainer.forward([datum], "cross_entropy") for _ in range(2)]
    look = lambda: [*requests(guarded, key=OPERATOR, model=trainer.model_id)]  # noqa: E731
    _, request = until(look, lambda found: len(found) == 2)
    pending = guarded.app.state.server.queue.training
    until(lambda: [owed.logged for owed in pending.waiting()], lambda logged: logged == [True, True])
    run = threading.Thread(target=cli.main, args=[["requests", "cancel", request, "--base-url", guarded.url]])
    run.start()
    noted(guarded, request)
    guarded.engine.let_go()
    run.join()
    assert capsys.readouterr().out == f"{request} is cancelled\n"
    assert kept.result().loss_fn_outputs
    with pytest.raises(tinker.RequestFailedError, match="cancelled by the operator of the server"):
        lost.result()
    assert trainer.forward([datum], "cross_entropy").result().loss_fn_outputs
    cli.main(["models", "unload", trainer.model_id, "--base-url", guarded.url])
    assert capsys.readouterr().out == f"{trainer.model_id} is unloaded\n"
    with pytest.raises(tinker.RequestFailedError, match="was unloaded"):
        trainer.forward([datum], "cross_entropy").result()
    close_client(service)
