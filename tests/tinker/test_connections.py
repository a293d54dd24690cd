"""Connections: silent ones go, one address cannot take all, and long polls stay."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from skyrl.tinker.http import connections
from tests.tinker.harness import LiveServer, wait_until_ready
from tests.tinker.test_http_fuzz import address
from tests.waiting import BOUND_S

HEALTH = b"GET /api/v1/healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.fixture
def hasty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    """A server that waits a moment for heads."""
    with LiveServer(tmp_path, long_poll_s=3.0) as server:
        wait_until_ready(server)
        server.http.close()
        monkeypatch.setattr(connections, "HEAD_S", 0.3)
        yield server


def connect(server: LiveServer, stack: ExitStack, source: str = "127.0.0.1") -> socket.socket:
    return stack.enter_context(socket.create_connection(address(server), timeout=BOUND_S, source_address=(source, 0)))


def received(connection: socket.socket) -> bytes:
    """Return the next bytes; nothing where the connection is closed."""
    try:
        return connection.recv(4096)
    except ConnectionError:
        return b""


@pytest.mark.full
@pytest.mark.parametrize("sent", [b"", b"GET /api", HEALTH[:-2]])
def test_a_connection_that_brings_no_request_is_closed(hasty, sent):
    with ExitStack() as stack:
        connection = connect(hasty, stack)
        connection.sendall(sent)
        assert received(connection) == b""


@pytest.mark.full
def test_a_second_request_that_does_not_come_whole_closes_its_connection(hasty, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_S", 2.0)
    with ExitStack() as stack:
        connection = connect(hasty, stack)
        connection.sendall(HEALTH)
        answer = b""
        while not answer.endswith(b"}"):  # head and body may come apart
            piece = received(connection)
            assert piece, "closed before its first request was answered"
            answer += piece
        assert answer.startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /api")
        assert received(connection) == b""


@pytest.mark.full
def test_a_poll_that_takes_longer_than_a_head_may_is_answered(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_S", 2.0)
    with LiveServer(tmp_path, long_poll_s=3.0) as server:
        wait_until_ready(server)
        model = server.model()
        assert server.poll(server.submit_pass(model, 2)).status_code == 408


def test_an_address_that_opens_all_it_can_leaves_room_to_others(own_server, monkeypatch):
    monkeypatch.setattr(connections, "most_connections", lambda: 20)
    own_server.http.close()
    with ExitStack() as stack:
        greedy = [connect(own_server, stack) for _ in range(30)]
        for connection in greedy[-10:]:
            assert received(connection) == b""
        for source in ("127.0.0.2", "127.0.0.3", "127.0.0.4"):
            other = connect(own_server, stack, source)
            other.sendall(HEALTH)
            assert received(other).startswith(b"HTTP/1.1 200")


def test_many_addresses_together_take_no_more_than_there_are(own_server, monkeypatch):
    monkeypatch.setattr(connections, "most_connections", lambda: 20)
    own_server.http.close()
    with ExitStack() as stack:
        many = [connect(own_server, stack, f"127.0.0.{number}") for number in range(2, 42)]
        for connection in many[-20:]:
            assert received(connection) == b""
        many[0].sendall(HEALTH)
        assert received(many[0]).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
    ],
)
def test_an_ipv6_network_of_64_bits_counts_as_one_address(one, other, same):
    assert (connections.network_of(one) == connections.network_of(other)) is same
