"""A real S3 server in a process of its own, buckets on it, and a proxy before it that fails as it is told."""

import http.client
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal
from uuid import uuid4

import pytest

from skyrl.utils.files.object_store import ObjectStore
from skyrl.utils.locks.remote_claim import release_claims

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
START_S = 120
Trouble = Literal["refuse", "cut", "cut after"] | float | None
"""Fault of a request: 503, a connection that is cut before or after the store has it, seconds of waiting."""


@contextmanager
def s3_server() -> Iterator[str]:
    """moto's server. Yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline, "moto does not start"
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def make_bucket(address: str, name: str) -> None:
    urllib.request.urlopen(urllib.request.Request(f"{address}/{name}", method="PUT")).close()


@contextmanager
def empty_bucket(address: str, data: Path) -> Iterator[str]:
    """URL of an empty bucket for this process and those that it starts, as a machine with the data folder `data`."""
    name = f"bucket-{uuid4().hex}"
    make_bucket(address, name)
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in {**environment(address), "SKYRL_DATA": str(data)}.items():
            patch.setenv(variable, value)
        yield f"s3://{name}"
        release_claims()


def environment(address: str, retry_s: float = 60) -> dict[str, str]:
    """Variables by which a process finds the server."""
    return {**KEYS, "AWS_ENDPOINT_URL": address, "SKYRL_BUCKET_RETRY_S": str(retry_s)}


class Proxy(ThreadingHTTPServer):
    """Forwards requests to an S3 server, but for those that `trouble` names something for."""

    daemon_threads = True

    def __init__(self, address: str):
        super().__init__(("127.0.0.1", 0), _Forward)
        self.target = address.removeprefix("http://")
        self.seen: list[str] = []
        """Requests: method, and path without the query."""
        self.headers: list[dict[str, str]] = []
        self.trouble: Callable[[str, str], Trouble] = lambda method, path: None
        """Of a method and a path with its query."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address) -> None:
        """Nothing: connections are cut on purpose."""


class _Forward(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append(f"{self.command} {self.path.partition('?')[0]}")
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        trouble = self.server.trouble(self.command, self.path)
        if trouble == "refuse":
            self._answer(503, b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate</Message></Error>")
            return
        if isinstance(trouble, float):
            time.sleep(trouble)
        if trouble != "cut":
            onward = http.client.HTTPConnection(self.server.target)
            onward.request(self.command, self.path, body, dict(self.headers))
            answer = onward.getresponse()
            content = answer.read()
        if isinstance(trouble, str):
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self._answer(answer.status, content, dict(answer.getheaders()))
        onward.close()

    def _answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        length = str(len(content))
        for name, value in (headers or {}).items():
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            elif name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextmanager
def proxy_before(address: str) -> Iterator[Proxy]:
    with Proxy(address) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()


def contents(store: ObjectStore, prefix: str = "") -> dict[str, bytes]:
    """All objects below a prefix, by key."""
    return {stored.key: store.get(stored.key) or b"" for stored in store.list(prefix)}


def files_in(store: ObjectStore, prefix: str = "") -> dict[str, bytes]:
    """Contents of all files below a prefix. Their names are those of the objects without the hashes before them."""
    return {re.sub(r"(^|/)[0-9a-f]{16}-([^/]*)$", r"\1\2", key): data for key, data in contents(store, prefix).items()}


def contents_bytes(url: str) -> int:
    """Bytes of all objects below a URL."""
    return sum(stored.size for stored in ObjectStore(url).list())
