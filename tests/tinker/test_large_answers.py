"""Large answers: whose turn it is to be read, how much of them is held at a time, and for how long."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from skyrl.tinker.database.log.request_log import result_row
from skyrl.tinker.database.tables import RequestRow
from skyrl.tinker.http import connections
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.identity.ids import tenant_of_key
from skyrl.tinker.results import PROTOBUF, Answer
from skyrl.tinker.wire import sharing
from skyrl.tinker.wire.sharing import THREADS_FOR_BODIES
from tests.tinker.harness import LiveServer, wait_until_ready
from tests.tinker.stalls import OTHER, Stalls
from tests.tinker.test_http_fuzz import address
from tests.waiting import BOUND_S, until

MIB = 2**20
KEYS = ("tml-test", OTHER)


def stored(size: int, *names: str, key: str = "tml-test"):
    """A job that stores done requests of these names, with results of so many bytes."""
    body, tenant = bytes(range(256)) * (size // 256), tenant_of_key(key.encode())

    def job(session) -> None:
        for name in names:
            request = {
                "request_id": name,
                "kind": "forward_backward",
                "tenant": tenant,
                "model_id": "m",
                "seq_id": None,
            }
            sent = {"body": b"", "content_type": "", "content_encoding": "", "created_at": time.time()}
            session.add(RequestRow(**request, **sent, status="done", gradients="kept", finished_at=time.time()))
            session.add(result_row(name, body, PROTOBUF, time.time()))

    return job


@pytest.fixture
def in_process(tmp_path: Path) -> Iterator[Stalls]:
    server = Stalls(tmp_path)
    with server:
        while server.engine.state != "ready":
            server.let_it_work(0.001)
        yield server


@pytest.mark.full
def test_the_answer_of_another_is_read_among_a_flood_of_one(in_process: Stalls):
    names = [f"forward_backward-{number}" for number in range(24)]
    other, order = "forward_backward-other", []

    async def poll(name: str, key: str = "tml-test") -> None:
        body = json.dumps({"request_id": name}).encode()
        response = await in_process.sent("/retrieve_future", body, key, headers={"Accept": PROTOBUF})
        assert len(response.content) == 4 * MIB, response.text
        order.append(name)

    async def run() -> None:
        service = in_process.app.state.server.service
        await service.database.write(stored(4 * MIB, *names))
        await service.database.write(stored(4 * MIB, other, key=OTHER))
        pool, go_on = service.decode_pool, threading.Event()
        hold = partial(go_on.wait, BOUND_S)
        polls = [asyncio.ensure_future(pool.run("nobody", MIB, hold)) for _ in range(THREADS_FOR_BODIES)]
        polls += [asyncio.ensure_future(poll(name)) for name in names] + [asyncio.ensure_future(poll(other, OTHER))]
        lines = pool._lines
        await asyncio.to_thread(until, lambda: sum(map(len, list(lines.values()))) == 25, "all wait for a thread")
        go_on.set()
        await asyncio.gather(*polls)

    in_process._runner.run(run())
    assert order.index(other) < 12, order


def test_those_who_ask_at_the_same_time_share_a_copy(in_process: Stalls):
    async def run() -> list[Answer]:
        server = in_process.app.state.server
        await server.service.database.write(stored(MIB, "forward_backward-a"))
        caller = Caller(tenant_of_key(b"tml-test"))
        reads = [server.queue.read("forward_backward-a", MIB, caller) for _ in range(3)]
        first, *others = await asyncio.gather(*reads)
        return [first, *others, await server.queue.read("forward_backward-a", MIB, caller)]

    answers = in_process._runner.run(run())
    assert len({id(answer) for answer in answers}) == 1 and len(answers[0].body) == MIB


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    """A server that has room for two large answers, and one of each key."""
    monkeypatch.setattr(sharing, "MAX_BYTES", 40 * MIB)
    with LiveServer(tmp_path, api_keys=KEYS) as server:
        wait_until_ready(server)
        database = server.app.state.server.service.database
        server.on_loop(database.write(stored(16 * MIB, "mine")))
        server.on_loop(database.write(stored(16 * MIB, "other", key=OTHER)))
        yield server


def ask(server: LiveServer, stack: ExitStack, name: str = "mine", key: str = "tml-test") -> socket.socket:
    """Poll, and read no more than the head of the answer."""
    connection = stack.enter_context(socket.socket())
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    connection.settimeout(BOUND_S)
    connection.connect(address(server))
    body = json.dumps({"request_id": name}).encode()
    head = f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: x\r\nX-API-Key: {key}\r\nAccept: {PROTOBUF}\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def status(connection: socket.socket) -> int:
    return int(connection.recv(32).split()[1])


def received(connection: socket.socket) -> int:
    """Return the number of bytes that come until it ends."""
    size = 0
    try:
        while piece := connection.recv(2**16):
            size += len(piece)
    except ConnectionError:
        pass
    return size


def wait_until_empty(server: LiveServer) -> None:
    """Wait until nobody has any of the room for answers."""
    room = server.app.state.server.service.answers.room
    until(lambda: room.quota.total == 0, "the room for answers is empty")


def test_who_does_not_take_his_answers_is_given_no_more_and_others_are(live):
    with ExitStack() as stack:
        assert [status(ask(live, stack)) for _ in range(2)] == [200, 429]
        assert status(ask(live, stack, "other", OTHER)) == 200
    wait_until_empty(live)


@pytest.mark.full
def test_a_client_that_takes_nothing_loses_its_connection(live, monkeypatch):
    monkeypatch.setattr(connections, "PATIENCE_S", 0.2)
    monkeypatch.setattr(connections, "MIN_BYTES_PER_S", 2**30)
    with ExitStack() as stack:
        connection = ask(live, stack)
        assert status(connection) == 200
        wait_until_empty(live)
        assert received(connection) < 16 * MIB


@pytest.mark.full
def test_a_client_that_takes_its_answer_slowly_gets_all_of_it(live, monkeypatch):
    monkeypatch.setattr(connections, "PATIENCE_S", 0.5)
    monkeypatch.setattr(connections, "MIN_BYTES_PER_S", 2**14)
    with ExitStack() as stack:
        connection, size = ask(live, stack), 0
        while size < 16 * MIB and (piece := connection.recv(2**17)):
            size += len(piece)
            time.sleep(0.01)
        assert size >= 16 * MIB
    wait_until_empty(live)
