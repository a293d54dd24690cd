"""Recovery from the end of the engine, and of the server."""

import asyncio
import shutil
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx
import pytest

from skyrl.tinker.processes.messages import Enqueue, Revive
from tests.tinker.harness import BASE_MODEL, PROTOBUF, LiveServer, loss_request, pass_request, wait_until_ready
from tests.tinker.in_process import InProcessServer
from tests.tinker.test_api_checkpoints import save
from tests.tinker.test_api_sampling import snapshot, trained

REFUSED = ("custom", "cross_entropy")


def restarted(server: LiveServer) -> LiveServer:
    """The same server after a stop and a start."""
    server.__exit__()
    server.__enter__()
    wait_until_ready(server)
    return server


# -- the engine ends --------------------------------------------------------------------------------------------------


def test_a_pending_sample_is_finished_by_the_next_engine(own_server):
    sampler = own_server.sampler(own_server.session(), 0, base_model=BASE_MODEL)
    long = {"max_tokens": 1000, "temperature": 0.0, "stop": []}
    request = own_server.submit_sample(sampler, 0, sampling_params=long, num_samples=8)["request_id"]
    own_server.crash()
    assert own_server.poll(request).json()["queue_state"] == "paused_capacity"
    own_server.recover()
    assert own_server.outcome(request).status_code == 200


def test_requests_wait_while_the_engine_restarts(own_server):
    session = own_server.session()
    own_server.crash()
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 4}}
    request = own_server.ok("/create_model", body)["request_id"]
    answer = own_server.poll(request)
    assert (answer.status_code, answer.json()["queue_state"]) == (408, "paused_capacity")
    assert own_server.http.get("/healthz").status_code == 503
    own_server.recover()
    assert own_server.result(request)["model_id"] == f"{session}:train:0"


def test_a_model_whose_creation_is_being_logged_when_the_engine_is_ready_is_not_revived(own_server, caplog):
    """If it were, its creation would fail where it is logged just after a look for the model in the log."""
    body = {"session_id": own_server.session(), "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 4}}
    queue, database = own_server.app.state.server.queue, own_server.app.state.server.service.database
    stored = threading.Event()
    asyncio.run_coroutine_threadsafe(database.write(lambda _: stored.wait(60)), own_server.engine.loop)
    own_server.crash()
    with ThreadPoolExecutor() as pool:
        creation = pool.submit(own_server.ok, "/create_model", body)
        while not queue.training.waiting():
            time.sleep(0.001)
        own_server.recover()
        own_server.on_loop(queue.training.engine_models.drain())
        stored.set()
        assert own_server.result(creation.result()["request_id"])["model_id"]
    assert "cannot be recovered" not in caplog.text


@pytest.mark.full
def test_a_loss_that_is_refused_now_was_accepted_before(tmp_path):
    """A model whose passes have to be done again comes back to a server that refuses their loss."""
    server = InProcessServer(tmp_path / "server")
    with server:
        session = server.post("/create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}).json()
        made = server.post("/create_custom_loss", loss_request(session["session_id"]))
        loss_id = server.outcome(made.json()["request_id"]).json()["loss_id"]
        model = {**session, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 4, "seed": 1}}
        made = server.post("/create_model", model)
        model_id = server.outcome(made.json()["request_id"]).json()["model_id"]

        def trained(seq_id: int, loss_fn: str) -> httpx.Response:
            request = pass_request(model_id, seq_id, [[1, 2, 3]], loss_fn=loss_fn)
            if loss_fn == "custom":
                request.loss_fn_config_v2["loss_id"].text = loss_id
            sent = server.request(
                "POST", "/forward_backward", content=request.SerializeToString(), headers={"Content-Type": PROTOBUF}
            )
            return server.outcome(sent.json()["request_id"])

        assert [trained(i + 1, loss).headers["content-type"] for i, loss in enumerate(REFUSED)] == [PROTOBUF] * 2

        def refuse() -> None:
            server.config = server.config.model_copy(update={"refused_losses": REFUSED})

        server.kill(refuse)
        answer = trained(3, "cross_entropy")
        assert "is refused by this server's operator" in answer.json()["error"], answer.text
        step = server.post("/optim_step", {"model_id": model_id, "seq_id": 4, "adam_params": {"learning_rate": 0.1}})
        assert "is refused by this server's operator" in server.outcome(step.json()["request_id"]).text
        step = server.post("/optim_step", {"model_id": model_id, "seq_id": 5, "adam_params": {"learning_rate": 0.1}})
        answer = server.outcome(step.json()["request_id"])
        assert "error" not in answer.json(), answer.text


@pytest.mark.full
def test_a_refused_seq_id_keeps_its_outcome_and_breaks_nothing(own_server):
    model = own_server.model()
    seq_id = own_server.train(model, 1)
    refused = own_server.submit_pass(model, seq_id - 1)  # that was the step
    before = own_server.failure(refused)
    assert restarted(own_server).failure(refused) == before
    own_server.train(model, seq_id)


# -- the server restarts ----------------------------------------------------------------------------------------------


def test_results_failures_and_ids_of_requests_survive_a_restart(own_server):
    model = own_server.model()
    done, failed = own_server.submit_pass(model, 1), own_server.submit_pass(model, 2, [100_000])
    before = own_server.outcome(done).content, own_server.failure(failed)
    restarted(own_server)
    assert (own_server.outcome(done).content, own_server.failure(failed)) == before
    assert own_server.submit_pass(model, 1) == done


def test_a_revival_waits_in_the_same_lane_as_the_requests_that_follow_it(tmp_path):
    """Else they could overtake it."""

    def lose_the_version() -> None:
        with closing(sqlite3.connect(tmp_path / "server" / "server.db")) as database, database:
            (folder,) = database.execute("SELECT folder FROM versions").fetchone()
            database.execute("UPDATE versions SET digest = NULL, size_bytes = NULL")
        shutil.rmtree(tmp_path / "server" / "checkpoints" / folder, ignore_errors=True)

    with InProcessServer(tmp_path / "server", api_keys=["tml-test"]) as server:
        session = server.post("/create_session", {}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": BASE_MODEL}
        server.outcome(server.post("/create_model", body).json()["request_id"])
        step = {"model_id": f"{session}:train:0", "adam_params": {"learning_rate": 0.1}}
        publish = {"model_id": f"{session}:train:0", "seq_id": 1, "sampling_session_seq_id": 0}
        server.outcome(server.post("/save_weights_for_sampler", publish).json()["request_id"])
        server.kill(meanwhile=lose_the_version)
        while not any(isinstance(frame, Revive) for frame in server.engine.sent):
            server.let_it_work(0.001)
        server.outcome(server.post("/optim_step", {**step, "seq_id": 2}).json()["request_id"])
        frames = [frame for frame in server.engine.sent if isinstance(frame, Revive | Enqueue)]
    revive, enqueue = frames
    assert isinstance(revive, Revive) and isinstance(enqueue, Enqueue)
    assert {operation.tenant for operation in revive.operations} == {enqueue.operation.tenant}


def test_sample_is_410_after_a_restart(own_server):
    sampler = own_server.sampler(own_server.session(), 0, base_model=BASE_MODEL)
    request = own_server.submit_sample(sampler, 0)["request_id"]
    own_server.outcome(request)
    assert restarted(own_server).poll(request).status_code == 410


def test_inflight_sampler_samples_the_same_after_a_restart(own_server):
    _, model, seq_id = trained(own_server)
    sampler = snapshot(own_server, model, seq_id, 0, "inflight")
    before = own_server.sample(sampler, 0)
    assert restarted(own_server).sample(sampler, 0) == before


def test_checkpoint_of_another_base_model_is_refused(own_server):
    _, model, seq_id = trained(own_server)
    path = own_server.result(save(own_server, model, seq_id))["path"]
    own_server.on_loop(forget_base_model(own_server))
    body = {"session_id": own_server.session(), "model_seq_id": 0, "path": path}
    failure = own_server.failure(own_server.ok("/load_weights", body)["request_id"])
    assert failure["category"] == "user" and "other/model" in failure["error"]


async def forget_base_model(server: LiveServer) -> None:
    """As if the checkpoints came from a server of another model."""

    def rename(session):
        session.connection().exec_driver_sql("UPDATE checkpoints SET base_model = 'other/model'")

    await server.app.state.server.service.database.write(rename)


def test_stop_lets_long_polls_go(tmp_path):
    with LiveServer(tmp_path, long_poll_s=40) as server:
        wait_until_ready(server)
        request = server.submit_pass(server.model(), 2)
        url, headers = f"{server.http.base_url}retrieve_future", {"X-API-Key": "tml-test"}

        def poll() -> httpx.Response:
            return httpx.post(url, json={"request_id": request}, headers=headers, timeout=60)

        def let_go() -> None:
            server.engine.loop.call_soon_threadsafe(server.app.state.server.queue.futures.close)

        assert server.at_once(poll, let_go)[0].status_code == 408
