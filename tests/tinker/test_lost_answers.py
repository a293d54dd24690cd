"""Databases that do not say whether they have taken a request: it is logged and done once all the same."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from sqlalchemy import Connection as EngineConnection
from sqlalchemy import Engine, Insert, event
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import SessionTransaction
from sqlmodel import Session, col, select

from skyrl.tinker.database.tables import RequestRow
from skyrl.tinker.identity.callers import EVERYBODY
from skyrl.tinker.operations.table import OPERATIONS
from skyrl.tinker.requests import training as training_queue
from skyrl.tinker.wire.parsing import Body
from tests.tinker.harness import PROTOBUF, LiveServer, pass_request
from tests.waiting import BOUND_S, until


class Connection:
    """To the database. It ends at the next so many commits of requests: before or after they take effect.

    After those before, so many meet a row of their own, which the database had still been storing.
    """

    def __init__(self) -> None:
        self.breaks_before = self.breaks_after = self.conflicts = 0
        self.broken = asyncio.Event()

    def begun(self, session: Session, transaction: SessionTransaction, connection: EngineConnection) -> None:
        connection.info.pop("logs", None)

    def executed(self, connection: EngineConnection, statement: object, *_: object) -> None:
        if isinstance(statement, Insert) and statement.table.name == RequestRow.__tablename__:
            connection.info["logs"] = True

    def before_commit(self, session: Session) -> None:
        session.flush()
        session.info["logs"] = session.connection().info.get("logs")
        if session.info.get("logs") and self.breaks_before:
            self.breaks_before -= 1
            self._end()
        if session.info.get("logs") and self.conflicts:
            self.conflicts -= 1
            raise IntegrityError("INSERT", {}, Exception("duplicate key value violates unique constraint"))

    def after_commit(self, session: Session) -> None:
        if session.info.get("logs") and self.breaks_after:
            self.breaks_after -= 1
            self._end()

    def _end(self) -> None:
        self.broken.set()
        raise OperationalError("COMMIT", {}, Exception("server closed the connection unexpectedly"))


@pytest.fixture
def connection() -> Iterator[Connection]:
    connection = Connection()
    listeners = [
        (Session, "after_begin", connection.begun),
        (Engine, "before_execute", connection.executed),
        (Session, "before_commit", connection.before_commit),
        (Session, "after_commit", connection.after_commit),
    ]
    for listener in listeners:
        event.listen(*listener)
    yield connection
    for listener in listeners:
        event.remove(*listener)


def logged(server: LiveServer) -> list[str]:
    """Kinds of the requests in the log, in the order of their seq_ids."""
    query = select(RequestRow.kind).order_by(col(RequestRow.seq_id))
    return list(server.app.state.server.service.database.read_now(lambda session: session.exec(query).all()))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_request_whose_commit_has_no_answer_is_logged_and_done_once(own_server, connection, when):
    model = own_server.model()
    setattr(connection, f"breaks_{when}", 2)
    own_server.train(model, 1)
    assert logged(own_server) == ["create_model", "forward_backward", "optim_step"]
    assert connection.broken.is_set()
    undisturbed = own_server.model()
    own_server.train(undisturbed, 1)
    assert own_server.logprobs(model, 3) == own_server.logprobs(undisturbed, 3)


def test_a_request_that_was_still_being_stored_when_it_was_tried_again_is_done_once(own_server, connection):
    model = own_server.model()
    connection.breaks_before = connection.conflicts = 1
    own_server.pass_result(own_server.submit_pass(model, 1))
    assert logged(own_server) == ["create_model", "forward_backward"]


def test_a_conflict_that_no_try_of_ours_explains_is_an_error_and_nothing_waits_for_it(own_server, connection):
    model = own_server.model()
    connection.conflicts = 4  # two tries of ours, and two of the writer, which does a group's jobs again alone
    body = pass_request(model, 1, [[1, 2, 3]]).SerializeToString()
    response = own_server.http.post("/forward_backward", content=body, headers={"Content-Type": PROTOBUF})
    assert response.status_code == 500
    connection.conflicts = 0
    own_server.http = httpx.Client(base_url=own_server.http.base_url, headers=own_server.http.headers)
    own_server.pass_result(own_server.submit_pass(model, 1))


def test_requests_of_one_transaction_that_has_no_answer_are_each_done(own_server, connection):
    models = [own_server.model() for _ in range(4)]
    begun, released = threading.Event(), threading.Event()
    database = own_server.app.state.server.service.database

    def hold(session: Session) -> None:
        begun.set()
        released.wait(BOUND_S)

    own_server.engine.loop.call_soon_threadsafe(lambda: asyncio.ensure_future(database.write(hold)))
    assert begun.wait(BOUND_S)
    connection.breaks_after = 1
    with ThreadPoolExecutor(len(models)) as pool:
        sent = [pool.submit(own_server.submit_pass, model, 1) for model in models]
        until(lambda: database._queue.qsize() == len(models), "all requests wait for the database")
        released.set()
        ids = [request.result() for request in sent]
    for request_id in ids:
        own_server.pass_result(request_id)
    for model in models:
        own_server.result(own_server.submit_step(model, 2))


def test_equal_requests_of_which_one_has_no_answer_are_one(own_server, connection):
    model = own_server.model()
    connection.breaks_after = 2
    ids = own_server.at_once(*[lambda: own_server.submit_pass(model, 1)] * 3)
    assert len(set(ids)) == 1
    own_server.pass_result(ids[0])
    own_server.result(own_server.submit_step(model, 2))


def test_a_request_whose_sender_has_left_before_the_answer_is_done(own_server, connection):
    model = own_server.model()
    connection.breaks_after = 1
    message = pass_request(model, 1, [[1, 2, 3]])

    async def submit_and_leave() -> None:
        body = Body(message.SerializeToString(), PROTOBUF)
        training = own_server.app.state.server.queue.training
        handler = asyncio.create_task(training.submit(OPERATIONS["forward_backward"], body, EVERYBODY))
        while not connection.broken.is_set():
            await asyncio.sleep(0.001)
        handler.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handler

    own_server.on_loop(submit_and_leave())
    own_server.pass_result(own_server.submit_pass(model, 1))  # its sender comes back
    own_server.result(own_server.submit_step(model, 2))
    assert logged(own_server) == ["create_model", "forward_backward", "optim_step"]


def test_a_request_that_the_database_does_not_answer_is_turned_away_and_done_all_the_same(
    own_server, connection, monkeypatch
):
    model = own_server.model()
    monkeypatch.setattr(training_queue, "PATIENCE_S", 0.2)
    connection.breaks_before = 3
    body = pass_request(model, 1, [[1, 2, 3]]).SerializeToString()
    response = own_server.http.post("/forward_backward", content=body, headers={"Content-Type": PROTOBUF})
    assert response.status_code == 429 and "database" in response.json()["detail"]
    monkeypatch.undo()
    own_server.result(own_server.submit_step(model, 2))
    own_server.pass_result(own_server.submit_pass(model, 1))
    assert logged(own_server) == ["create_model", "forward_backward", "optim_step"]


def test_an_unload_whose_commit_has_no_answer_is_done(own_server, connection):
    model = own_server.model()
    connection.breaks_after = 1
    assert own_server.run("/unload_model", {"model_id": model})["model_id"] == model


def test_a_refusal_whose_commit_has_no_answer_stays_one(own_server, connection):
    model = own_server.model()
    own_server.run("/unload_model", {"model_id": model})
    connection.breaks_after = 1
    assert "unloaded" in own_server.failure(own_server.submit_pass(model, 1))["error"]


def test_a_server_that_stops_while_it_waits_for_an_answer_does_the_request_after_its_start(tmp_path, connection):
    waiting = []
    with LiveServer(tmp_path) as server:
        model = server.model()
        connection.breaks_after = 10**6

        async def submit() -> None:
            body = Body(pass_request(model, 1, [[1, 2, 3]]).SerializeToString(), PROTOBUF)
            training = server.app.state.server.queue.training
            waiting.append(asyncio.create_task(training.submit(OPERATIONS["forward_backward"], body, EVERYBODY)))
            while not connection.broken.is_set():
                await asyncio.sleep(0.001)

        server.on_loop(submit())
    connection.breaks_after = 0
    with LiveServer(tmp_path) as server:
        server.result(server.submit_step(model, 2))
