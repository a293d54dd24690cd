"""Frames between the API process and the engine process, and the socket they travel on.

A frame is a pickled dataclass and, behind it, its long arrays as they are in memory (protocol 5), with all lengths in
front. The sequences of a pass and its outputs are sent as columns, so what a frame takes to make and to read does not
grow with their number of tokens. Pickle is safe here because the socket is private: a socketpair made by the API
process, whose other end only its child inherits. The engine's end blocks in a reader thread (`EngineChannel`); the
API's end is asyncio (`ApiChannel`), where large frames are made, written and read in a thread while the loop goes on.
"""

import asyncio
import contextlib
import logging
import pickle
import socket
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from skyrl.backends.operations import ForwardBackward
from skyrl.tinker.processes.frames import NUMBER, decode, encode
from skyrl.tinker.processes.messages import Cancel, Enqueue, FromEngine, Piece, Revive, ToEngine

log = logging.getLogger(__name__)

LARGE_TOKENS = 4096
"""The frame of a pass over more is made in a thread."""
LARGE_BYTES = 64 * 1024
"""A frame of more is read in a thread."""
PIECE_BYTES = 2**18
"""Of a frame that others do not wait for, written at once."""
PIECE_HEAD = 1024
"""Bytes of a piece beside its content, at most."""
NEVER_S = 1e6
"""Seconds after which a thread gives up an engine that does not read; it is found to hang long before."""

_THREADS = ThreadPoolExecutor(2, "channel")
"""One makes and writes large frames for the API process, one reads them."""


# -- to the engine ----------------------------------------------------------------------------------------------------


# -- from the engine --------------------------------------------------------------------------------------------------


class ChannelClosed(ConnectionError):
    """The other process has closed its end, or is gone."""


class EngineChannel:
    """The engine's end: blocking `send`, and an inbox filled by a thread from `listen` on."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._stream = connection.makefile("rb")
        self._inbox: deque[ToEngine] = deque()
        self._reader: threading.Thread | None = None
        self._sending = threading.Lock()
        self._apart = ThreadPoolExecutor(1, "large-frames")
        self.wake = threading.Event()
        """Set when there is a new frame, when the channel closes, and by whoever else wants the engine's attention."""
        self.closed = False

    def send(self, frame: FromEngine) -> None:
        """Write one frame. Raises `ChannelClosed` if nobody reads any more."""
        try:
            with self._sending:
                for piece in encode(frame):
                    self._socket.sendall(piece)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def send_apart(self, frame: FromEngine, on_sent: Callable[[], None]) -> None:
        """Write a large frame in a thread, a piece at a time, so that others go in between; then call `on_sent`.

        Frames that are sent so keep their order among themselves.
        """
        self._apart.submit(self._send_pieces, frame, on_sent)

    def _send_pieces(self, frame: FromEngine, on_sent: Callable[[], None]) -> None:
        parts = [memoryview(part).cast("B") for part in encode(frame)]
        parts[0] = parts[0][NUMBER.size * (1 + len(parts)) :]
        sizes = tuple(map(len, parts))
        with contextlib.suppress(ChannelClosed):  # who sends the next frame finds out
            for number, part in enumerate(parts):
                for begin in range(0, len(part), PIECE_BYTES):
                    data = pickle.PickleBuffer(part[begin : begin + PIECE_BYTES])
                    self.send(Piece(sizes, number, begin, data))
            on_sent()

    def receive(self) -> ToEngine:
        """Block until a frame has arrived. Raises `ChannelClosed` at its end. Not for use after `listen`."""
        try:
            sizes = [self._read_number() for _ in range(self._read_number())]
            return decode([self._read(size) for size in sizes])
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def listen(self, on_close: Callable[[], None] = lambda: None) -> None:
        """Read in a daemon thread from now on; `on_close` is called in it when the other process has gone."""
        self._reader = threading.Thread(target=self._listen, args=[on_close], name="channel", daemon=True)
        self._reader.start()

    def deliver(self, frame: ToEngine) -> None:
        """Put a frame into the inbox as if it had arrived."""
        self._inbox.append(frame)
        self.wake.set()

    def take(self) -> list[ToEngine]:
        """Frames that have arrived since the last call, in order. Does not block."""
        return [self._inbox.popleft() for _ in range(len(self._inbox))]

    def close(self) -> None:
        """Close this end; a `listen`ing thread ends."""
        with contextlib.suppress(OSError):  # the other end may have gone first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._reader is None:
            self._stream.close()

    def _listen(self, on_close: Callable[[], None]) -> None:
        try:
            while True:
                self.deliver(self.receive())
        except ChannelClosed:
            self._stream.close()
            self.closed = True
            self.wake.set()
            on_close()

    def _read_number(self) -> int:
        return NUMBER.unpack(self._read(NUMBER.size))[0]

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        if self._stream.readinto(data) < size:
            raise ChannelClosed("end of stream")
        return data


class ApiChannel:
    """The API's end, on the running asyncio loop.

    A tenant's frames arrive in the order in which they were sent. Of those that wait, each tenant's next one goes in
    turn, so nobody waits for more than one large frame of each other tenant.
    """

    def __init__(self, connection: socket.socket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._socket = connection
        """The same as the writer's, for threads."""
        self._reader = reader
        self._writer = writer
        self._unsent: OrderedDict[str, deque[ToEngine]] = OrderedDict()
        """Frames that wait, by tenant, the tenant whose turn it is first; none is without any."""
        self._sending: asyncio.Task[None] | None = None
        """Sends them while there are any."""
        self._parts: list[memoryview] = []
        """Of the large frame that comes a piece at a time."""
        self._writing = False
        """Whether a part of a large frame is written and the rest is not."""

    @classmethod
    async def open(cls, connection: socket.socket) -> "ApiChannel":
        """Take over one end of a socketpair."""
        reader, writer = await asyncio.open_connection(sock=connection, limit=2**20)
        writer.transport.set_write_buffer_limits(0)
        twin = connection.dup()
        twin.settimeout(NEVER_S)  # it shares the flag by which asyncio's does not block; with a timeout, Python waits
        return cls(twin, reader, writer)

    def send(self, frame: ToEngine) -> None:
        """Send a frame. Never blocks; a closed channel swallows it (its reader sees the end)."""
        tenant = _tenant(frame)
        if not self._writing and tenant not in self._unsent and not _is_large(frame):
            self._writer.writelines(encode(frame))
            return
        self._unsent.setdefault(tenant, deque()).append(frame)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all())

    async def frames(self) -> AsyncIterator[FromEngine]:
        """Frames as they arrive, until the engine closes its end."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                sizes = [await self._read_number() for _ in range(await self._read_number())]
                parts = [await self._read(size) for size in sizes]
                is_piece = len(sizes) == 2 and sizes[0] < PIECE_HEAD  # of which nothing is made but a view
                large = sum(sizes) > LARGE_BYTES and not is_piece
                frame = await loop.run_in_executor(_THREADS, decode, parts) if large else decode(parts)
                if not isinstance(frame, Piece):
                    yield frame
                elif (parts := self._with_piece(frame)) is not None:
                    yield await loop.run_in_executor(_THREADS, decode, parts)
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def _with_piece(self, piece: Piece) -> list[memoryview] | None:
        """The parts of the large frame that has come so far; None while more of it is to come."""
        if piece.part == piece.begin == 0:
            self._parts = [np.empty(size, np.uint8).data for size in piece.sizes]
        end = piece.begin + len(piece.data)
        self._parts[piece.part][piece.begin : end] = piece.data
        is_whole = piece.part == len(piece.sizes) - 1 and end == piece.sizes[-1]
        return self._parts if is_whole else None

    async def close(self) -> None:
        """Close this end, dropping what has not been sent."""
        if self._sending is not None:
            self._sending.cancel()
        with contextlib.suppress(OSError):  # the engine may have gone first
            self._socket.shutdown(socket.SHUT_RDWR)  # a thread that writes ends
        self._socket.close()
        self._writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _send_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._unsent:
                tenant, frames = next(iter(self._unsent.items()))
                parts = await loop.run_in_executor(_THREADS, encode, frames[0])
                self._writing = True
                await self._writer.drain()
                await loop.run_in_executor(_THREADS, self._write, parts)
                self._writing = False
                frames.popleft()  # only now, as its tenant's next frame must not be written before it
                self._unsent.move_to_end(tenant)
                if not frames:
                    del self._unsent[tenant]
        except OSError:
            self._unsent.clear()
        except Exception:
            log.exception("a frame cannot be sent; giving the engine up")
            self._writer.transport.abort()
        finally:
            self._sending = None

    def _write(self, parts: Sequence[bytes | memoryview]) -> None:
        """Write past the event loop, which has written all that it had and waits."""
        for part in parts:
            self._socket.sendall(part)

    async def _read(self, size: int) -> bytearray:
        """The next bytes, put where they belong as they come: to copy many at once stops the loop."""
        data, at = bytearray(size), 0
        while at < size:
            piece = await self._reader.read(size - at)
            if not piece:
                raise asyncio.IncompleteReadError(b"", size)
            data[at : at + len(piece)] = piece
            at += len(piece)
        return data

    async def _read_number(self) -> int:
        return NUMBER.unpack(await self._reader.readexactly(NUMBER.size))[0]


def _tenant(frame: ToEngine) -> str:
    """Tenant of a frame; the server's own ("") otherwise."""
    if isinstance(frame, Revive):
        return frame.operations[-1].tenant
    if isinstance(frame, Enqueue):
        return frame.operation.tenant
    return frame.tenant if isinstance(frame, Cancel) else ""


def _is_large(frame: ToEngine) -> bool:
    """Whether it takes long to be made: all that a model has to repeat, or a pass over many tokens."""
    if isinstance(frame, Enqueue) and isinstance(frame.operation, ForwardBackward):
        return frame.operation.tokens > LARGE_TOKENS
    return isinstance(frame, Revive)
