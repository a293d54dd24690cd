"""Bodies that are on their way: who may send, and how much, is known before they are read."""

import asyncio
import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from starlette.exceptions import HTTPException

from skyrl.tinker.http import body_limit
from skyrl.tinker.http.body_limit import BodyLimit
from skyrl.tinker.wire import sharing
from tests.tinker.harness import LiveServer
from tests.tinker.in_process import InProcessServer
from tests.tinker.test_http_fuzz import address
from tests.traced import least
from tests.waiting import BOUND_S, until

KIB = 2**10
LARGE = 128 * KIB
KEYS = ("tml-a", "tml-b")


@pytest.fixture
def small_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    """A server with keys that has room for four large bodies."""
    monkeypatch.setattr(sharing, "MAX_BYTES", 4 * LARGE)
    with LiveServer(tmp_path, api_keys=KEYS) as server:
        server.http.headers["X-API-Key"] = KEYS[1]
        yield server


def begin(server: LiveServer, stack: ExitStack, key: str, length: str) -> socket.socket:
    """A request of which only the headers have come."""
    connection = stack.enter_context(socket.create_connection(address(server), timeout=BOUND_S))
    head = f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: x\r\nX-API-Key: {key}\r\n{length}\r\n\r\n"
    connection.sendall(head.encode())
    return connection


def status(connection: socket.socket) -> int:
    return int(connection.recv(4096).split()[1])


def wait_until_taken(server: LiveServer, size: int) -> None:
    """Wait until bodies have so much of the room."""
    quota = server.app.state.server.service.body_quota.quota
    until(lambda: quota.total == size, f"bodies have room for {size} bytes")


def silent(connection: socket.socket) -> bool:
    connection.settimeout(0.2)
    try:
        return not connection.recv(1)
    except TimeoutError:
        return True


def test_a_wrong_key_is_refused_before_its_body_has_come(small_room):
    with ExitStack() as stack:
        assert status(begin(small_room, stack, "tml-wrong", f"Content-Length: {LARGE}")) == 401


def test_bodies_that_do_not_come_take_only_their_senders_room(small_room):
    with ExitStack() as stack:
        for _ in range(2):
            begin(small_room, stack, KEYS[0], f"Content-Length: {LARGE}")
        wait_until_taken(small_room, 2 * LARGE)
        assert status(begin(small_room, stack, KEYS[0], f"Content-Length: {LARGE}")) == 429
        begin(small_room, stack, KEYS[1], f"Content-Length: {LARGE}")
        wait_until_taken(small_room, 3 * LARGE)


def test_a_body_that_announces_no_length_takes_room_as_it_comes(small_room):
    with ExitStack() as stack:
        for _ in range(2):
            begin(small_room, stack, KEYS[0], f"Content-Length: {LARGE}")
        wait_until_taken(small_room, 2 * LARGE)
        chunked = begin(small_room, stack, KEYS[0], "Transfer-Encoding: chunked")
        assert silent(chunked)
        chunked.sendall(b"%x\r\n" % LARGE + bytes(LARGE) + b"\r\n")
        chunked.settimeout(BOUND_S)
        assert status(chunked) == 429


def test_a_sender_without_room_may_still_make_sessions(small_room):
    small_room.http.headers["X-API-Key"] = KEYS[0]
    with ExitStack() as stack:
        for _ in range(2):
            begin(small_room, stack, KEYS[0], f"Content-Length: {LARGE}")
        wait_until_taken(small_room, 2 * LARGE)
        small_room.session()


def test_room_comes_back_when_the_sender_leaves(small_room):
    for _ in range(4):
        with ExitStack() as stack:
            begin(small_room, stack, KEYS[0], f"Content-Length: {2 * LARGE}")
            wait_until_taken(small_room, 2 * LARGE)
        wait_until_taken(small_room, 0)


def test_a_body_that_trickles_is_given_up(monkeypatch):
    monkeypatch.setattr(body_limit, "MIN_BYTES_PER_S", 1000)

    async def application(scope, receive, send) -> None:
        while (await receive()).get("more_body"):
            pass

    async def receive() -> dict[str, object]:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b"1", "more_body": True}

    bounded = BodyLimit(application, lambda path: 10**9, patience_s=0.1)
    scope = {"type": "http", "path": "/", "headers": []}
    with pytest.raises(HTTPException, match="1000 bytes per second") as refusal:
        asyncio.run(asyncio.wait_for(bounded(scope, receive, None), BOUND_S))
    assert refusal.value.status_code == 408


def test_a_body_is_there_once_when_it_has_come(tmp_path):
    """To join its pieces stops the event loop, and would have it there twice."""
    size = 64 * 2**20
    left, statuses = size, list[int | None]()

    async def receive() -> dict[str, object]:
        nonlocal left
        left -= 2**20
        return {"type": "http.request", "body": bytes(2**20), "more_body": left > 0}

    async def send(message) -> None:
        statuses.append(message.get("status"))

    with InProcessServer(tmp_path) as server:
        while server.engine.state != "ready":
            server.let_it_work(0.001)
        headers = [(b"content-type", b"text/plain"), (b"host", b"127.0.0.1")]
        scope = {"type": "http", "method": "POST", "path": "/api/v1/forward_backward", "headers": headers}
        scope |= {"query_string": b"", "client": ("127.0.0.1", 1), "http_version": "1.1", "scheme": "http"}

        def peak() -> int:
            nonlocal left
            left = size
            statuses.clear()
            tracemalloc.start()
            server._runner.run(server.app(dict(scope), receive, send))
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert statuses[0] == 400 and left == 0
            return most

        assert least(peak, 1.3 * size) < 1.3 * size
