"""Requests with names, bodies and headers made to break things. Each is answered, nothing is damaged."""

import asyncio
import contextlib
import functools
import http.client
import itertools
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from skyrl.tinker.http.body_limit import BodyLimit
from tests.tinker.harness import LiveServer
from tests.tinker.test_openapi_fuzz import ENTRIES

PATIENCE_S = 30
KEY = {"X-API-Key": "tml-test"}
quick = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def nothing_outside_the_folder_changes(server: LiveServer) -> Iterator[None]:
    before = outside(server)
    yield
    assert outside(server) == before
    assert server.http.get("/healthz").status_code == 200


def outside(server: LiveServer) -> set[Path]:
    return {path for path in server.folder.parent.iterdir() if path != server.folder}


def address(server: LiveServer) -> tuple[str, int]:
    url = server.http.base_url
    return url.host, url.port or 0


def answer_to(server: LiveServer, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    """Status and body of the answer to a request whose path is sent as it is."""
    connection = http.client.HTTPConnection(*address(server), timeout=PATIENCE_S)
    try:
        connection.request(method, path, body, {**KEY, "Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def answers_to(server: LiveServer, data: bytes, then_leave: bool = False) -> bytes:
    """All that comes back, to the end of the connection, for bytes sent as they are."""
    with socket.create_connection(address(server), timeout=PATIENCE_S) as connection:
        connection.sendall(data)
        if then_leave:
            connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def check_refusal(server: LiveServer, status: int, body: bytes) -> None:
    """A refusal that clients can read, that they do not repeat for ever, and that tells nothing of this machine."""
    assert 400 <= status < 500 and status not in (402, 409), (status, body)
    assert set(json.loads(body)) == {"detail"} and b"\\n" not in body
    assert str(server.folder).encode() not in body


# -- names in paths ---------------------------------------------------------------------------------------------------

NAMES = [
    b"..",
    b".",
    b"../../../../etc/passwd",
    b"/etc/passwd",
    b"..\\..\\secret",
    b"%2e%2e%2f%2e%2e",
    b"a" * 20_000,
    b"\x00",
    b"a\x00b",
    b"\r\nX-Evil: 1",
    b"\xff\xfe",
    "naïve/☃/💥".encode(),
    b"' OR 1=1 --",
    b"tinker://x/weights/y",
    b"*",
    b"~root",
    b"manifest.json",
    b" ",
]
names = st.one_of(st.sampled_from(NAMES), st.binary(min_size=1, max_size=20))
NAMED = [route for route in ENTRIES if "{" in route[1]]


@pytest.mark.parametrize(("method", "path"), NAMED)
def test_a_strange_name_in_a_path_is_refused(server, method, path):
    @quick
    @given(name=names, safe=st.sampled_from(["", "/.%"]))
    def refused(name: bytes, safe: str) -> None:
        shown = re.sub("{[^}]*}", lambda _: quote_from_bytes(name, safe), path)
        status, body = answer_to(server, method, shown)
        if status != 307:  # to the path without its last slash
            check_refusal(server, status, body)

    refused()


def test_a_strange_checkpoint_name_saves_nothing_elsewhere(server):
    model = server.model()
    seq_ids = itertools.count(1)

    @quick
    @given(name=st.one_of(names.map(lambda name: name.decode(errors="replace")), st.text(min_size=1, max_size=300)))
    def stays_inside(name: str) -> None:
        for path in ("/save_weights", "/save_weights_for_sampler"):
            body = {"model_id": model, "seq_id": next(seq_ids), "path": name}
            answer = server.outcome(server.ok(path, body)["request_id"]).json()
            if "error" in answer:
                assert answer["category"] == "user" and str(server.folder) not in answer["error"]
            else:
                assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name)

    stays_inside()


@quick
@given(path=st.one_of(names.map(lambda name: name.decode(errors="replace")), st.text(max_size=50)), kind=st.text())
def test_a_strange_checkpoint_path_loads_nothing(server, path, kind):
    session, model = names_of(server)
    for tinker_path in (
        path,
        f"tinker://{path}",
        f"tinker://{model}/{kind}/{path}",
        f"tinker://{model}/weights/{path}",
    ):
        for route, body in (
            ("/weights_info", {"tinker_path": tinker_path}),
            (
                "/create_sampling_session",
                {"session_id": session, "sampling_session_seq_id": 7, "model_path": tinker_path},
            ),
        ):
            response = server.post(route, body)
            check_refusal(server, response.status_code, response.content)


@functools.cache
def names_of(server: LiveServer) -> tuple[str, str]:
    session = server.session()
    return session, server.model(session)


# -- bodies -----------------------------------------------------------------------------------------------------------

BODIES = {
    "deep list": b"[" * 100_000 + b"]" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "deep in a field": b'{"user_metadata":' + b'{"a":' * 150 + b"1" + b"}" * 151,
    "huge number": b'{"seq_id":' + b"9" * 10_000 + b"}",
    "huge exponent": b'{"seq_id":1e999999,"user_metadata":{"a":1e999999}}',
    "not a number": b'{"seq_id":NaN,"user_metadata":{"a":[NaN,Infinity,-Infinity]}}',
    "large integer": b'{"seq_id":9223372036854775808,"limit":-1}',
    "duplicate keys": b'{"session_id":"a","session_id":1,"model_id":[],"model_id":"x"}',
    "lone surrogate": b'{"session_id":"\\ud800","model_id":"\\udfff","request_id":"\\ud800"}',
    "NUL": b'{"session_id":"\\u0000","model_id":"\\u0000","request_id":"sample-\\u0000","tags":["\\u0000"]}',
    "not UTF-8": b'{"session_id":"\xff\xfe"}',
    "UTF-16": '{"session_id":"a"}'.encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf{}",
    "a string": b'"x"',
    "null": b"null",
    "nothing": b"",
    "cut off": b'{"session_id":"a',
    "binary": bytes(range(256)),
}
WITH_BODY = [route for route, entry in ENTRIES.items() if "requestBody" in entry]


@pytest.mark.parametrize(("method", "path"), WITH_BODY)
def test_a_strange_body_is_answered(server, method, path):
    path = re.sub("{[^}]*}", "x", path)
    for body in BODIES.values():
        for headers in ({}, {"Content-Encoding": "zstd"}, {"Content-Encoding": "gzip"}, {"Content-Type": "text/plain"}):
            status, answer = answer_to(server, method, path, body, **headers)
            if status != 200:  # such as a session without anything
                check_refusal(server, status, answer)


def test_metadata_comes_back_as_it_was_or_is_refused(server):
    """Python's parser reads numbers that JSON does not have, which no answer could hold."""
    for number in (b"NaN", b"Infinity", b"-Infinity", b"1e999"):
        for body in (b'{"user_metadata":{"a":%s}}', b'{"user_metadata":{"a":[{"b":%s}]}}'):
            status, answer = answer_to(server, "POST", "/api/v1/create_session", body % number)
            check_refusal(server, status, answer)


# -- HTTP itself ------------------------------------------------------------------------------------------------------

HEAD = (
    b"POST /api/v1/create_session HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: tml-test\r\n"
    b"Content-Type: application/json\r\nConnection: close\r\n"
)
BROKEN = {
    "a body longer than its length": HEAD + b"Content-Length: 1\r\n\r\n{}",
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\n{}",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a length that is no number": HEAD + b"Content-Length: 0x2\r\n\r\n{}",
    "a chunk without its size": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "an unknown transfer encoding": HEAD + b"Transfer-Encoding: gzip\r\n\r\n{}",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "a path that is no path": b"GET \x00 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_http_is_a_400(server, what):
    assert answers_to(server, BROKEN[what]).startswith(b"HTTP/1.1 400")


def test_a_body_that_ends_early_is_no_request(server):
    assert answers_to(server, HEAD + b"Content-Length: 100\r\n\r\n{}", then_leave=True) == b""


def test_a_body_in_chunks_is_a_body(server):
    sent = HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n"
    assert answers_to(server, sent).startswith(b"HTTP/1.1 200")


def test_a_length_above_the_limit_is_refused_before_the_body_comes(server):
    answer = answers_to(server, HEAD + b"Content-Length: 99999999999\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413") and b"larger than" in answer


def test_chunks_above_the_limit_are_refused_while_they_come(server):
    chunk = b"40000\r\n" + b" " * 0x40000 + b"\r\n"
    with socket.create_connection(address(server), timeout=PATIENCE_S) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + 4 * chunk + b"1\r\n")
        connection.sendall(b" ")  # one byte above the limit of a MiB
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")


CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "header": HEAD + b"X-Endless: ",
    "trailer": HEAD + CHUNKS + b"2\r\n{}\r\n0\r\nX-Endless: ",
    "extension of a chunk": HEAD + CHUNKS + b"2;endless=",
}


@pytest.mark.parametrize("what", ENDLESS)
def test_what_is_endless_beside_a_body_is_cut_off(server, what):
    with socket.create_connection(address(server), timeout=PATIENCE_S) as connection:
        connection.sendall(ENDLESS[what])
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 64 * 2**20:
                sent += connection.send(b"a" * 65536)
    assert sent < 64 * 2**20


def test_a_head_that_is_too_long_is_told_what_the_limit_is(server):
    answer = answers_to(server, HEAD + b"X-Long: " + b"a" * 2**16)
    assert answer.startswith(b"HTTP/1.1 400") and b"longer than 65536 bytes" in answer


def test_a_trailer_is_no_header(server):
    trailer = b"Origin: http://evil.example\r\n\r\n"  # a header of this name is refused
    assert answers_to(server, HEAD + CHUNKS + b"2\r\n{}\r\n0\r\n" + trailer).startswith(b"HTTP/1.1 200")


def test_a_body_that_stops_coming_is_given_up():
    async def application(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0 if pieces else 3600)
        return {"type": "http.request", "body": pieces.pop(), "more_body": True}

    pieces = [b"{"]
    bounded = BodyLimit(application, lambda path: 100, patience_s=0.01)
    scope = {"type": "http", "path": "/", "headers": [(b"content-length", b"2")]}
    with pytest.raises(HTTPException, match="send the whole body") as refusal:
        asyncio.run(bounded(scope, receive, None))
    assert refusal.value.status_code == 408
