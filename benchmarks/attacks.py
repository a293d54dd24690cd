"""Attacks of a hostile client on a server. Each is a function that runs in a separate process.

An attack prepares its request bodies, calls `Attacker.begin`, and repeats itself until `Attacker.over`. It should take
little processor time, so that the measurement is of the server. To add an attack, write a function with `@attack(...)`.
"""

import http.client
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from threading import Thread
from urllib.parse import urlsplit

import psutil
import zstandard

from plain_http import JSON, PROTOBUF, PlainClient, pass_body, sample_body

NICENESS = 10


@dataclass(frozen=True)
class Size:
    """Sizes of the attacks."""

    result_tokens: int = 2**17
    """Prompt tokens of the result that is polled as JSON, with 16 log-probabilities each: 16 MiB as protobuf."""
    json_mib: tuple[int, ...] = (8, 32)
    held_bodies: int = 8
    held_mib: int = 128
    connections: int = 2000
    empty_parts: int = 2**19 - 8
    bomb_mib: int = 250
    table_rows: int = 100_000
    listed: int = 10_000
    gap_tokens: int = 2**20
    """Tokens of a pass that waits behind a gap: 12 bytes each when decoded."""
    evicting_tokens: int = 2**18
    """Prompt tokens of a sample whose result evicts others, with 64 log-probabilities each: 128 MiB."""


SMALL = Size(2**10, (1,), 2, 1, 20, 2**10, 1, 2000, 50, 2**10, 2**10)
"""Sizes for tests of the attacks."""


@dataclass
class Attacker:
    """Inputs of an attack, and its counters."""

    url: str
    base_model: str
    key: str
    size: Size
    link: Connection
    statuses: Counter[str] = field(default_factory=Counter)
    largest_answer: int = 0
    sent_bytes: int = 0
    began_s: float = 0.0
    """Processor time of this process at the start of the attack."""
    _over: bool = False

    def client(self, key: str | None = None) -> PlainClient:
        return PlainClient(self.url, key or self.key)

    def begin(self) -> None:
        """Report that the preparation is complete, and wait for the start signal."""
        self.link.send("ready")
        assert self.link.recv() == "begin"
        self.began_s = _processor_s()
        Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        self.link.recv()
        self._over = True

    @property
    def over(self) -> bool:
        return self._over

    def repeat(self, threads: int, make: Callable[[int], Callable[[], tuple[int, bytes]]]) -> None:
        """Repeat the calls that `make(thread)` creates, in this many threads, until the end."""

        def work(call: Callable[[], tuple[int, bytes]]) -> None:
            while not self._over:
                try:
                    status, answer = call()
                except (OSError, http.client.HTTPException) as error:
                    self.statuses[type(error).__name__] += 1
                    time.sleep(0.1)
                    continue
                self.statuses[str(status)] += 1
                self.largest_answer = max(self.largest_answer, len(answer))
                if status in (429, 503):
                    time.sleep(0.05)

        calls = [make(number) for number in range(threads)]
        self.begin()
        for call in calls:
            Thread(target=work, args=(call,), daemon=True).start()
        while not self._over:
            time.sleep(0.01)


ATTACKS: dict[str, Callable[[Attacker], None]] = {}


def attack(name: str) -> Callable[[Callable[[Attacker], None]], Callable[[Attacker], None]]:
    """Register the decorated function as an attack."""

    def register(function: Callable[[Attacker], None]) -> Callable[[Attacker], None]:
        ATTACKS[name] = function
        return function

    return register


def run(name: str, url: str, base_model: str, size: Size, link: Connection) -> None:
    """Run an attack in this process. At its end, report its counters and processor time."""
    os.nice(NICENESS)
    attacker = Attacker(url, base_model, f"tml-attacker-{name}", size, link)
    ATTACKS[name](attacker)
    report = {
        "statuses": dict(attacker.statuses),
        "requests": sum(attacker.statuses.values()),
        "processor_s": _processor_s() - attacker.began_s,
        "largest_answer": attacker.largest_answer,
        "sent_bytes": attacker.sent_bytes,
    }
    link.send(report)
    os._exit(0)  # does not wait for threads that wait for a response


def _processor_s() -> float:
    times = psutil.Process().cpu_times()
    return times.user + times.system


@attack("large result as JSON")
def _json_result(attacker: Attacker) -> None:
    client = attacker.client()
    sampler = client.new_sampler(attacker.base_model, client.new_session())
    body = sample_body(sampler, 0, attacker.size.result_tokens, topk_prompt_logprobs=16)
    status, answer = client.request("POST", "/api/v1/asample", body)
    assert status == 200, answer
    request_id = json.loads(answer)["request_id"]
    assert len(client.result(request_id)) >= 128 * (attacker.size.result_tokens - 1)
    poll = json.dumps({"request_id": request_id}).encode()

    def make(thread: int) -> Callable[[], tuple[int, bytes]]:
        return partial(attacker.client().request, "POST", "/api/v1/retrieve_future", poll, Accept=JSON)

    attacker.repeat(2, make)


@attack("large JSON bodies")
def _json_bodies(attacker: Attacker) -> None:
    client = attacker.client()
    sampler = client.new_sampler(attacker.base_model, client.new_session())
    bodies = [sample_body(sampler, number, mib * 2**19) for number, mib in enumerate(attacker.size.json_mib)]

    def make(thread: int) -> Callable[[], tuple[int, bytes]]:
        body = bodies[thread % len(bodies)]
        return partial(attacker.client().request, "POST", "/api/v1/asample", body)

    attacker.repeat(2, make)


@attack("openapi.json without a key")
def _openapi(attacker: Attacker) -> None:
    attacker.repeat(4, lambda thread: partial(PlainClient(attacker.url, None).request, "GET", "/openapi.json"))


def _socket(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname or "", address.port or 80), timeout=5)


@attack("large bodies held open")
def _held_bodies(attacker: Attacker) -> None:
    size = attacker.size.held_mib * 2**20
    head = (
        f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: server\r\nX-API-Key: {attacker.key}\r\n"
        f"Content-Type: {PROTOBUF}\r\nContent-Length: {size}\r\n\r\n"
    ).encode()
    piece = bytes(2**18)

    def hold(thread: int) -> Callable[[], tuple[int, bytes]]:
        def call() -> tuple[int, bytes]:
            with _socket(attacker.url) as connection:
                connection.sendall(head)
                for _ in range(size // len(piece) - 1):
                    connection.sendall(piece)
                    attacker.sent_bytes += len(piece)
                connection.settimeout(0.5)
                while not attacker.over:
                    try:
                        answer = connection.recv(65536)
                        return int(answer.split()[1]) if answer else 0, answer
                    except TimeoutError:
                        connection.sendall(b"\0")
                return 0, b""

        return call

    attacker.repeat(attacker.size.held_bodies, hold)


@attack("silent connections and slow headers")
def _connections(attacker: Attacker) -> None:
    attacker.begin()
    held: list[socket.socket] = []
    while not attacker.over:
        if len(held) < attacker.size.connections:
            try:
                held.append(_socket(attacker.url))
                attacker.statuses["opened"] += 1
                if len(held) % 2:
                    held[-1].sendall(b"GET /api/v1/healthz HTTP/1.1\r\nX-Slow: ")
            except OSError as error:
                attacker.statuses[type(error).__name__] += 1
                time.sleep(0.05)
            continue
        time.sleep(0.5)
        for number, connection in enumerate(list(held)):
            try:
                if number % 2 == 0:
                    connection.sendall(b"a")
            except OSError:
                attacker.statuses["closed by the server"] += 1
                connection.close()
                held.remove(connection)


def _delimited(tag: bytes, content: bytes) -> bytes:
    length, size = b"", len(content)
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return tag + length + bytes([size]) + content


def bombs(size: Size, model: str) -> list[bytes]:
    """Two zstd bodies: a datum with very many empty chunks, and an unknown field with very many zeros."""
    address = pass_body(model, 1, 0, 0)
    chunks = address + _delimited(b"\x1a", b"\x0a\x00" * size.empty_parts)
    zeros = address + _delimited(b"\x7a", bytes(size.bomb_mib * 2**20))
    return [zstandard.ZstdCompressor(level=19).compress(chunks), zstandard.compress(zeros)]


@attack("zstd bombs")
def _bombs(attacker: Attacker) -> None:
    client = attacker.client()
    bodies = bombs(attacker.size, client.new_model(attacker.base_model, client.new_session()))

    def make(thread: int) -> Callable[[], tuple[int, bytes]]:
        send = attacker.client().request
        headers = {"Content_Type": PROTOBUF, "Content_Encoding": "zstd"}
        return lambda: send("POST", "/api/v1/forward_backward", bodies[thread % 2], **headers)

    attacker.repeat(4, make)


def _on_checkpoints(attacker: Attacker, run: str, calls: list[tuple[str, str, bytes | None]]) -> None:
    def make(thread: int) -> Callable[[], tuple[int, bytes]]:
        client, numbers = attacker.client(), count()

        def call() -> tuple[int, bytes]:
            number = next(numbers)
            method, suffix, body = calls[number % len(calls)]
            path = f"/api/v1/training_runs/{run}/checkpoints/weights/unknown-{thread}-{number}{suffix}"
            return client.request(method, path, body)

        return call

    attacker.repeat(8, make)


@attack("unknown checkpoints changed")
def _unknown(attacker: Attacker) -> None:
    calls = [("POST", "/publish", None), ("DELETE", "", None), ("PUT", "/ttl", b'{"ttl_seconds": 86400}')]
    _on_checkpoints(attacker, "00000000-0000-0000-0000-000000000000:train:0", calls)


@attack("DELETE beside a large table")
def _deletes(attacker: Attacker) -> None:
    client = attacker.client()
    run = client.new_model(attacker.base_model, client.new_session())
    _on_checkpoints(attacker, run, [("DELETE", "", None)])


LISTING_KEY = "tml-attacker-listing"
"""Key that owns the many sessions and checkpoints in the database."""


@attack("long lists and searches")
def _lists(attacker: Attacker) -> None:
    search = json.dumps({"user_metadata": {"purpose": "nothing has this"}, "limit": 200}).encode()

    def make(thread: int) -> Callable[[], tuple[int, bytes]]:
        send = attacker.client(LISTING_KEY).request
        if thread % 2:
            return partial(send, "POST", "/api/v1/sessions/search", search)
        return partial(send, "GET", "/api/v1/checkpoints?limit=10000")

    attacker.repeat(8, make)


@attack("queues filled by two tenants")
def _queues(attacker: Attacker) -> None:
    keys = [f"{attacker.key}-{name}" for name in "ab"]
    clients = [attacker.client(key) for key in keys]
    sessions = [client.new_session() for client in clients]
    models = [client.new_model(attacker.base_model, session) for client, session in zip(clients, sessions, strict=True)]
    samplers = [
        client.new_sampler(attacker.base_model, session) for client, session in zip(clients, sessions, strict=True)
    ]
    rows, length = max(1, attacker.size.gap_tokens // 2**16), min(attacker.size.gap_tokens, 2**16)
    tail = pass_body("", 0, rows, length)

    def make(thread: int) -> Callable[[], tuple[int, bytes]]:
        who, numbers = thread % 2, count(1000 + thread)
        client = attacker.client(keys[who])

        def hold() -> tuple[int, bytes]:
            body = zstandard.compress(tail + pass_body(models[who], next(numbers), 0, 0), 1)
            headers = {"Content_Type": PROTOBUF, "Content_Encoding": "zstd"}
            return client.request("POST", "/api/v1/forward_backward", body, **headers)

        def sample() -> tuple[int, bytes]:
            return client.request("POST", "/api/v1/asample", sample_body(samplers[who], next(numbers), 16))

        return hold if thread < 2 else sample

    attacker.repeat(4, make)


@attack("results that drive out others")
def _evict(attacker: Attacker) -> None:
    client = attacker.client()
    sampler = client.new_sampler(attacker.base_model, client.new_session())
    numbers = count()
    start = sample_body(sampler, 0, attacker.size.evicting_tokens, topk_prompt_logprobs=64)

    def make(thread: int) -> Callable[[], tuple[int, bytes]]:
        send = attacker.client().request
        return lambda: send(
            "POST", "/api/v1/asample", start.replace(b'"seq_id": 0', f'"seq_id": {next(numbers)}'.encode(), 1)
        )

    attacker.repeat(2, make)
