"""A database that fails now and then: nothing that was acknowledged fails of it, is lost or is done twice."""

import asyncio
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import event
from sqlmodel import col, select

from skyrl.tinker.database.log import replay_log
from skyrl.tinker.database.tables import RequestRow
from tests.faults.failing_database import failing
from tests.tinker.harness import LiveServer, wait_until_ready
from tests.tinker.test_durability import Script, kill_engine


class Patient(httpx.HTTPTransport):
    """Sends again what is answered with 503, as the SDK does."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        while (response := super().handle_request(request)).status_code == 503:
            response.read()
            time.sleep(0.01)
        return response


def patient(server: LiveServer) -> LiveServer:
    server.http = httpx.Client(
        base_url=server.http.base_url, headers=server.http.headers, timeout=60, transport=Patient()
    )
    return server


def statuses(server: LiveServer) -> list[tuple[str, str]]:
    query = select(RequestRow.kind, RequestRow.status).order_by(col(RequestRow.seq_id))
    return [tuple(row) for row in server.app.state.server.service.database.read_now(lambda s: s.exec(query).all())]


def run_script(folder: Path, faults: dict[str, int], **options: object) -> list[object]:
    """Return the outcomes of all requests where the engine ends twice and the database has these `faults`."""
    with LiveServer(folder, snapshot_every_steps=2, **options) as server:
        wait_until_ready(patient(server))
        with failing(**faults) as database:
            script, sent = Script(server), 0
            while script.submit():
                sent += 1
                if sent in (7, 15):
                    kill_engine(server)
            outcome = script.finish()
        assert all(database.failed[kind] > 2 for kind in faults), database.failed
        return outcome


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[object]:
    return run_script(tmp_path_factory.mktemp("undisturbed"), {})


@pytest.mark.full("reads", "answers")
@pytest.mark.parametrize("kind", ["reads", "writes", "answers"])
def test_a_database_that_fails_every_so_often_changes_no_outcome(tmp_path, undisturbed, kind):
    assert run_script(tmp_path, {kind: 7}) == undisturbed


@pytest.mark.full
def test_a_model_is_brought_back_once_the_database_can_be_read_again(own_server):
    model = own_server.model()
    request = own_server.submit_pass(model, 2)  # it waits for the first one
    own_server.crash()
    with failing(reads=1):
        own_server.recover()
        time.sleep(0.3)
    own_server.pass_result(own_server.submit_pass(model, 1))
    own_server.pass_result(request)


def test_a_request_that_is_being_logged_when_its_model_is_given_up_has_one_outcome(own_server):
    model, released = own_server.model(), asyncio.Event()
    early = own_server.submit_pass(model, 3)
    own_server.crash()
    with closing(sqlite3.connect(own_server.folder / "server.db")) as database, database:
        database.execute("UPDATE requests SET body = x'' WHERE kind = 'create_model'")
    log = own_server.app.state.server.queue.training._log
    append = log.append

    async def append_later(*entry: Any) -> Any:
        await released.wait()
        return await append(*entry)

    log.append = append_later
    sent: list[str] = []
    sender = threading.Thread(target=lambda: sent.append(own_server.submit_pass(model, 1)))
    sender.start()
    while len(own_server.app.state.server.queue.training._pending.of_model(model)) < 2:
        time.sleep(0.001)
    own_server.recover()
    assert "cannot be recovered" in own_server.failure(early)["error"]
    own_server.engine.loop.call_soon_threadsafe(released.set)
    sender.join()
    assert "is lost" in own_server.failure(sent[0])["error"]
    assert [status for _, status in statuses(own_server)] == ["done", "failed", "failed"]


@pytest.mark.full
def test_what_follows_an_outcome_that_a_stopping_server_could_not_store_is_done_again_with_it(tmp_path):
    """A disk that has room for small rows and not for large ones."""
    with LiveServer(tmp_path / "calm") as server:
        wait_until_ready(server)
        model = server.model()
        server.pass_result(server.submit_pass(model, 1, [1, 2, 3] * 300))
        server.result(server.submit_step(model, 2))
        expected = server.logprobs(model, 3)
    with LiveServer(tmp_path / "full") as server:
        wait_until_ready(server)
        model = server.model()
        server.engine.hold()
        requests = [server.submit_pass(model, 1, [1, 2, 3] * 300), server.submit_step(model, 2)]
        engine = server.app.state.server.service.database._engine

        def limit(connection, record, proxy) -> None:
            [(pages,)] = connection.execute("PRAGMA page_count").fetchall()
            connection.execute(f"PRAGMA max_page_count = {pages}")

        event.listen(engine, "checkout", limit)
        server.engine.let_go()
        while len(server.engine.done) < 3:
            time.sleep(0.01)
        time.sleep(0.2)
        assert statuses(server)[1:] == [("forward_backward", "pending"), ("optim_step", "pending")]
    with LiveServer(tmp_path / "full") as server:
        wait_until_ready(server)
        server.pass_result(requests[0])
        server.result(requests[1])
        assert server.logprobs(model, 3) == expected


@pytest.mark.full
def test_a_pass_whose_answer_cannot_be_made_is_in_the_model_that_is_brought_back_as_in_the_one_that_was(
    own_server, monkeypatch
):
    twin, model = own_server.model(), own_server.model()
    own_server.train(twin, 1)

    async def broken(size: int, function: object) -> object:
        raise RuntimeError("no memory for it")

    with monkeypatch.context() as patch:
        patch.setattr("skyrl.tinker.requests.outcomes.encoded", broken)
        assert "internal error" in own_server.failure(own_server.submit_pass(model, 1))["error"]
    own_server.result(own_server.submit_step(model, 2))
    expected = own_server.logprobs(twin, 3)
    assert own_server.logprobs(model, 3) == expected
    kill_engine(own_server)
    assert own_server.logprobs(model, 4) == expected


def test_the_bodies_of_any_number_of_requests_can_be_read(own_server):
    names = [str(number) for number in range(40_000)]
    database = own_server.app.state.server.service.database
    assert database.read_now(lambda session: replay_log.bodies(session, names)) == {}


@pytest.mark.parametrize("path", ["/sessions", "/training_runs", "/checkpoints"])
def test_a_read_that_fails_is_answered_so_that_the_client_asks_again(server, path):
    with failing(reads=1):
        response = server.http.get(path)
    assert response.status_code == 503 and response.headers["retry-after"]
