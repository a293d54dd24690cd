"""Connection between the API process and the engine process: frames on a private socket.

A frame is a pickled dataclass, followed by its long arrays as raw memory (pickle protocol 5), with all lengths in
front. The sequences of a pass and its outputs are sent as columns, so the number of objects in a frame does not grow
with the number of tokens. Pickle is safe here because the socket is private: the API process creates a socketpair, and
only its child inherits the other end. The engine's end blocks in a reader thread (`EngineChannel`). The API's end uses
asyncio (`ApiChannel`, `Incoming`): large frames are encoded, written and decoded in threads while the event loop runs.

Frames of the engine are read into their final memory (`Incoming`). A stream reader copies its input several times while
it holds the interpreter; with answers of 128 MiB, this took half of the time of a busy API process. Long parts are
therefore read from the socket directly into their own memory.
"""

import asyncio
import contextlib
import logging
import socket
import struct
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from skyrl.backends.operations import ForwardBackward
from skyrl.tinker.processes.frames import NUMBER, decode, encode, pieces
from skyrl.tinker.processes.messages import Cancel, Enqueue, FromEngine, Revive, ToEngine

SCRATCH_BYTES = 2**16
"""Size of the buffer for short parts."""
DIRECT_BYTES = 2**13
"""If more bytes than this are missing of a part, they are received directly into the part's own memory."""
MOST_WAITING = 256
"""Maximum number of frames that wait for `take`; then reading pauses."""

Parts = list[memoryview]
"""Parts of a frame, as `decode` takes them."""


class Incoming(asyncio.BufferedProtocol):
    """Protocol of the API's end: receives frames, and tracks whether more data may be written."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._begin = self._end = 0
        """Bounds of the bytes in the scratch buffer that are not parsed yet."""
        self._parser = self._parse()
        self._wanted = next(self._parser)
        """Memory for the next bytes. While a long part is received, the scratch buffer is empty."""
        self._arrived: deque[Parts] = deque()
        self._changed = asyncio.Event()
        """Set when frames have arrived, or when the connection has ended."""
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._ended = asyncio.Event()

    async def take(self) -> Parts | None:
        """Return the next frame; None at the end of the connection."""
        while not self._arrived:
            if self._ended.is_set():
                return None
            self._changed.clear()
            await self._changed.wait()
        if len(self._arrived) == MOST_WAITING and not self._ended.is_set():
            self.transport.resume_reading()
        return self._arrived.popleft()

    async def drain(self) -> None:
        """Wait until everything is written. Raises `ConnectionError` at the end of the connection."""
        await self._may_write.wait()
        if self._ended.is_set():
            raise ConnectionResetError("the engine has closed its end")

    async def wait_closed(self) -> None:
        """Wait for the end of the connection."""
        await self._ended.wait()

    # -- callbacks of the event loop ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        transport.set_write_buffer_limits(0)

    def connection_lost(self, exc: Exception | None) -> None:
        for event in (self._ended, self._changed, self._may_write):
            event.set()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._is_direct():
            return self._wanted
        self._begin = self._end = 0
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_direct():
            self._wanted = self._wanted[nbytes:]
        else:
            self._end += nbytes
        while True:
            count = min(len(self._wanted), self._end - self._begin)
            self._wanted[:count] = self._scratch[self._begin : self._begin + count]
            self._begin += count
            self._wanted = self._wanted[count:]
            if self._wanted:
                return
            self._wanted = next(self._parser)

    def _is_direct(self) -> bool:
        return len(self._wanted) > DIRECT_BYTES

    # -- parsing ------------------------------------------------------------------------------------------------------

    def _parse(self) -> Generator[memoryview, None, None]:
        """Parser coroutine: yields the memory for the next bytes, and appends complete frames to `_arrived`."""
        large: Parts = []
        while True:
            (count,) = yield from _numbers(1)
            if count > 0:
                parts = _memory((yield from _numbers(count)))
                yield from parts
                self._keep(parts)
                continue
            (count,) = yield from _numbers(1)
            *sizes, part, begin, length = yield from _numbers(count + 3)
            if part == begin == 0:
                large = _memory(sizes)
            yield large[part][begin : begin + length]
            if part == count - 1 and begin + length == sizes[-1]:
                self._keep(large)
                large = []

    def _keep(self, parts: Parts) -> None:
        self._arrived.append(parts)
        self._changed.set()
        if len(self._arrived) == MOST_WAITING:
            self.transport.pause_reading()


def _numbers(count: int) -> Generator[memoryview, None, tuple[int, ...]]:
    data = bytearray(NUMBER.size * count)
    yield memoryview(data)
    return struct.unpack(f"<{count}Q", data)


def _memory(sizes: Sequence[int]) -> Parts:
    return [np.empty(size, np.uint8).data for size in sizes]


log = logging.getLogger(__name__)

LARGE_TOKENS = 4096
"""Frames of passes over more tokens are encoded in a thread."""
LARGE_BYTES = 64 * 1024
"""Frames of more bytes are decoded in a thread."""
NEVER_S = 1e6
"""Timeout in seconds of a thread's write to the engine. A hanging engine is detected long before."""

_THREADS = ThreadPoolExecutor(2, "channel")
"""One thread encodes and writes large frames in the API process, the other decodes them."""


class ChannelClosed(ConnectionError):
    """The other process has closed its end, or has exited."""


class EngineChannel:
    """The engine's end of the connection. `send` blocks. After `listen`, a thread puts new frames into an inbox."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._stream = connection.makefile("rb")
        self._inbox: deque[ToEngine] = deque()
        self._reader: threading.Thread | None = None
        self._sending = threading.Lock()
        self._next = threading.Lock()
        """Lock of the thread that is next to acquire `_sending`. Without this lock, a thread that has just released
        `_sending` could acquire it again before the waiting ones."""
        self._apart = ThreadPoolExecutor(1, "large-frames")
        self.wake = threading.Event()
        """Set when a frame arrives, when the channel closes, and at any other event that the engine has to handle."""
        self.closed = False

    def send(self, frame: FromEngine) -> None:
        """Write one frame. Raises `ChannelClosed` if the other end is closed."""
        self._write(encode(frame))

    def send_apart(self, frame: FromEngine, on_sent: Callable[[], None]) -> None:
        """Write a large frame in a thread, in pieces between other frames. The thread then calls `on_sent`.

        Frames sent by this method keep their order among themselves.
        """
        self._apart.submit(self._send_pieces, frame, on_sent)

    def _send_pieces(self, frame: FromEngine, on_sent: Callable[[], None]) -> None:
        with contextlib.suppress(ChannelClosed):  # the next send raises it
            for piece in pieces(frame):
                self._write(piece)
            on_sent()

    def _write(self, parts: Sequence[bytes | memoryview]) -> None:
        try:
            with self._next:
                self._sending.acquire()
            try:
                for part in parts:
                    self._socket.sendall(part)
            finally:
                self._sending.release()
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self) -> ToEngine:
        """Block until a frame arrives. Raises `ChannelClosed` at the end of the stream. Do not use after `listen`."""
        try:
            sizes = [self._read_number() for _ in range(self._read_number())]
            return decode([self._read(size) for size in sizes])
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def listen(self, on_close: Callable[[], None] = lambda: None) -> None:
        """Start a daemon thread that reads frames. It calls `on_close` when the other process has exited."""
        self._reader = threading.Thread(target=self._listen, args=[on_close], name="channel", daemon=True)
        self._reader.start()

    def deliver(self, frame: ToEngine) -> None:
        """Put a frame into the inbox as if it had arrived."""
        self._inbox.append(frame)
        self.wake.set()

    def take(self) -> list[ToEngine]:
        """Return the frames that have arrived since the last call, in order. Does not block."""
        return [self._inbox.popleft() for _ in range(len(self._inbox))]

    def close(self) -> None:
        """Close this end; the thread of `listen` ends."""
        with contextlib.suppress(OSError):  # the other end may be closed already
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
    """The API's end of the connection, on the running asyncio loop.

    Frames of one tenant arrive in the order in which they were sent. Unsent frames are sent round-robin by tenant, so a
    tenant waits for at most one large frame of each other tenant.
    """

    def __init__(self, connection: socket.socket, incoming: Incoming):
        self._socket = connection
        """The transport's socket, for use in threads."""
        self._incoming = incoming
        self._transport = incoming.transport
        self._unsent: OrderedDict[str, deque[ToEngine]] = OrderedDict()
        """Unsent frames by tenant, in round-robin order. No tenant has an empty queue."""
        self._sending: asyncio.Task[None] | None = None
        """Task that sends the frames in `_unsent`; None while there are none."""
        self._writing = False
        """True while a large frame is partly written."""

    @classmethod
    async def open(cls, connection: socket.socket) -> "ApiChannel":
        """Take over one end of a socketpair."""
        _, incoming = await asyncio.get_running_loop().create_connection(Incoming, sock=connection)
        twin = connection.dup()
        twin.settimeout(NEVER_S)  # both share the non-blocking flag; with a timeout, Python waits
        return cls(twin, incoming)

    def send(self, frame: ToEngine) -> None:
        """Queue a frame for sending.

        Never blocks. If the channel is closed, the frame is discarded, and `frames` ends.
        """
        tenant = _tenant(frame)
        if not self._writing and tenant not in self._unsent and not _is_large(frame):
            self._write_small(frame)
            return
        self._unsent.setdefault(tenant, deque()).append(frame)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all())

    async def frames(self) -> AsyncIterator[FromEngine]:
        """Yield frames as they arrive, until the engine closes its end."""
        loop = asyncio.get_running_loop()
        while (parts := await self._incoming.take()) is not None:
            is_large = sum(map(len, parts)) > LARGE_BYTES
            yield await loop.run_in_executor(_THREADS, decode, parts) if is_large else decode(parts)

    async def close(self) -> None:
        """Close this end and discard unsent frames."""
        if self._sending is not None:
            self._sending.cancel()
        with contextlib.suppress(OSError):  # the engine may have exited already
            self._socket.shutdown(socket.SHUT_RDWR)  # ends a thread that writes
        self._socket.close()
        self._transport.abort()
        await self._incoming.wait_closed()

    async def _send_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._unsent:
                tenant, frames = next(iter(self._unsent.items()))
                if _is_large(frames[0]):
                    parts = await loop.run_in_executor(_THREADS, encode, frames[0])
                    self._writing = True
                    await self._incoming.drain()
                    await loop.run_in_executor(_THREADS, self._write, parts)
                    self._writing = False
                else:
                    self._write_small(frames[0])
                    await asyncio.sleep(0)  # many frames may wait, and other tasks should run in between
                frames.popleft()  # only now: the tenant's next frame must not overtake it
                self._unsent.move_to_end(tenant)
                if not frames:
                    del self._unsent[tenant]
        except OSError:
            self._unsent.clear()
        except Exception:
            log.exception("a frame cannot be sent; giving the engine up")
            self._transport.abort()
        finally:
            self._sending = None

    def _write_small(self, frame: ToEngine) -> None:
        if not self._transport.is_closing():  # otherwise the transport raises RuntimeError
            self._transport.writelines(encode(frame))

    def _write(self, parts: Sequence[bytes | memoryview]) -> None:
        """Write directly to the socket, past the event loop, whose own buffer is empty."""
        for part in parts:
            self._socket.sendall(part)


def _tenant(frame: ToEngine) -> str:
    """Return the tenant of a frame, or "" for the server's own frames."""
    if isinstance(frame, Revive):
        return frame.operations[-1].tenant
    if isinstance(frame, Enqueue):
        return frame.operation.tenant
    return frame.tenant if isinstance(frame, Cancel) else ""


def _is_large(frame: ToEngine) -> bool:
    """Return True if a frame takes long to encode: a revival, or a pass over many tokens."""
    if isinstance(frame, Enqueue) and isinstance(frame.operation, ForwardBackward):
        return frame.operation.tokens > LARGE_TOKENS
    return isinstance(frame, Revive)
