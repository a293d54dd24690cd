"""uvicorn's HTTP protocol with limits against clients that occupy connections.

The head of a request has at most `MAX_HEAD_BYTES` and must arrive within `HEAD_S` seconds. This time starts when the
connection opens, or with the first byte of a later request. The client must read its answer at `MIN_BYTES_PER_S`, with
at most `PATIENCE_S` of delay. `skyrl.utils.quota` divides the connections between addresses, so an address always
leaves some of them to the next one. A single address may use half of them, because long polls need many connections. An
IPv6 network of 64 bits, the smallest that providers assign, counts as one address. Connections above the limit are
closed, because files and the database need descriptors, too.
"""

import asyncio
import ipaddress
import resource

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from skyrl.tinker.http.body_limit import MIN_BYTES_PER_S, PATIENCE_S
from skyrl.utils.quota import Quota

HEAD_S = 20.0
"""Time limit for the head of a request in seconds."""
MAX_HEAD_BYTES = 2**16
"""Maximum bytes of a request's head, and of the bytes between two pieces of a body."""
RESERVED_FILES = 512
"""Descriptors reserved for the database, the engine and files."""


def most_connections() -> int:
    """Maximum number of connections under the process's limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**16 if soft == resource.RLIM_INFINITY else max(soft - RESERVED_FILES, soft // 2)


def network_of(address: str) -> str:
    """Normalized address for the limit: an IPv4 address, or the first 64 bits of an IPv6 address."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))


class Connection(HttpToolsProtocol):
    """A client connection with limits.

    It is closed at once if its address has too many connections, and later if no request arrives in time or if the
    client reads its answer too slowly.
    """

    open_connections = Quota("{} connections")
    """Number of this process's connections by address."""
    _address: str | None = None
    """Address that the connection counts for; None: it was rejected."""
    _head_timer: asyncio.TimerHandle | None = None
    _delay_s = 0.0
    """Accumulated delay of the client in reading its answer."""
    _full_at = 0.0
    """Time at which the transport's buffer exceeded its limit, on the loop's clock."""
    _full_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    """Number of bytes received since the last piece of a body or, if later, the end of the last request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address, most = network_of(self.client[0] if self.client else ""), most_connections()
        if self.open_connections.total >= most or not self.open_connections.has_room(address, 1, most):
            transport.abort()
            return
        self._address = address
        self.open_connections.add(address, 1)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._address is not None:
            self.open_connections.remove(self._address, 1)
            self._address = None
        self._head_has_come()
        self._is_taken()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._full_at = self.loop.time()
        self._delay_s = max(0.0, self._delay_s) - self.transport.get_write_buffer_size() / MIN_BYTES_PER_S
        self._full_timer = self.loop.call_later(PATIENCE_S - self._delay_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._delay_s += self.loop.time() - self._full_at
        self._is_taken()
        super().resume_writing()

    def _is_taken(self) -> None:
        if self._full_timer is not None:
            self._full_timer.cancel()
            self._full_timer = None

    def data_received(self, data: bytes) -> None:
        if self._answered() and self._head_timer is None:
            self._await_head()
        self._head_bytes += len(data)
        super().data_received(data)
        if not self._answered():
            self._head_has_come()
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"the head is longer than {MAX_HEAD_BYTES} bytes; send shorter headers")

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.headers = []  # what follows a body in chunks is no part of the head

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()

    def _answered(self) -> bool:
        """Return True if no request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._give_up)

    def _head_has_come(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self.transport.abort()
