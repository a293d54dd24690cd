"""What the API process and the engine process say to each other, and the socket it travels on.

A frame is a pickled dataclass (protocol 5: arrays are copied, not parsed) behind its length as a 64-bit integer. Pickle
is safe here because the socket is private: a socketpair made by the API process, whose other end only its child
inherits. The engine's end blocks in a reader thread (`EngineChannel`); the API's end is asyncio (`ApiChannel`), where a
large frame is read in pieces while the loop goes on.
"""

import asyncio
import contextlib
import pickle
import socket
import struct
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from skyrl.backends.operations import ModelOperation, Operation
from skyrl.tinker.config import EngineConfig
from skyrl.types import BackendInfo, Result

LENGTH = struct.Struct("<Q")


# -- to the engine ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """The first frame: how the engine is configured."""

    config: EngineConfig


@dataclass(frozen=True)
class Enqueue:
    """Do `operation` for `tenant`. Samples have no `seq_id`; `request_id` equals the operation's."""

    request_id: str
    tenant: str
    operation: Operation
    seq_id: int | None = None


@dataclass(frozen=True)
class Cancel:
    """Drop a sample; nothing is sent back for it."""

    request_id: str


@dataclass(frozen=True)
class DropVersion:
    """Forget a published sampler version."""

    version: str


@dataclass(frozen=True)
class Shutdown:
    """Finish background writes and exit."""


@dataclass(frozen=True)
class Revive:
    """Bring back a model that is not in this engine, by doing `operations` at once and in this order.

    The first makes the model (`LoadSnapshot`, or its creation); the others repeat what it has done since. Each
    completes as any operation does. The next request to be done after them is `next_seq_id`.
    """

    model_id: str
    tenant: str
    next_seq_id: int
    operations: list[ModelOperation]


@dataclass(frozen=True)
class Park:
    """Snapshot a model and free it, if nothing is queued, held or running for it. Answered by `Parked`."""

    model_id: str


ToEngine = Start | Enqueue | Cancel | DropVersion | Revive | Park | Shutdown


# -- from the engine --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """What the engine is busy with until it is ready."""

    message: str


@dataclass(frozen=True)
class Ready:
    """The base model is loaded; operations are being worked on."""

    info: BackendInfo


@dataclass(frozen=True)
class Metrics:
    """What the backend counts about itself, whenever it has changed."""

    values: dict[str, int]


@dataclass(frozen=True)
class Failed:
    """The engine cannot start. The message is for the person who started the server."""

    message: str


@dataclass(frozen=True)
class Done:
    """The end of a request."""

    request_id: str
    result: Result


@dataclass(frozen=True)
class Held:
    """A request waits for an earlier one of its model that has not arrived; None: it waits no longer."""

    request_id: str
    reason: str | None


@dataclass(frozen=True)
class Running:
    """What the engine computes from now on, so that the API knows what a crash interrupted. Empty: nothing."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class Snapshotted:
    """A model's whole state after its request `seq_id` is on disk; earlier requests need not be repeated any more."""

    model_id: str
    seq_id: int
    path: str
    digest: str
    size_bytes: int
    failed_pass: str | None
    """Why the model's next optimizer step has to fail, if it has to: its gradient sums are incomplete."""


@dataclass(frozen=True)
class Stored:
    """A version that was published at once (`persist=False`) is on disk now."""

    version: str
    path: str
    digest: str
    size_bytes: int


@dataclass(frozen=True)
class Parked:
    """The answer to `Park`. Where `done`, the model is not in the engine any more and its snapshot has come before."""

    model_id: str
    done: bool


FromEngine = Progress | Ready | Metrics | Failed | Done | Held | Running | Snapshotted | Stored | Parked


class ChannelClosed(ConnectionError):
    """The other process has closed its end, or is gone."""


def encode(frame: ToEngine | FromEngine) -> bytes:
    """The frame as it travels."""
    body = pickle.dumps(frame, protocol=5)
    return LENGTH.pack(len(body)) + body


class EngineChannel:
    """The engine's end: blocking `send`, and an inbox filled by a thread from `listen` on."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._stream = connection.makefile("rb")
        self._inbox: deque[ToEngine] = deque()
        self._reader: threading.Thread | None = None
        self.wake = threading.Event()
        """Set when there is a new frame, when the channel closes, and by whoever else wants the engine's attention."""
        self.closed = False

    def send(self, frame: FromEngine) -> None:
        """Write one frame. Raises `ChannelClosed` if nobody reads any more."""
        try:
            self._socket.sendall(encode(frame))
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self) -> ToEngine:
        """Block until a frame has arrived. Raises `ChannelClosed` at its end. Not for use after `listen`."""
        try:
            (length,) = LENGTH.unpack(self._read(LENGTH.size))
            return pickle.loads(self._read(length))
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

    def _read(self, size: int) -> bytes:
        data = self._stream.read(size)
        if len(data) < size:
            raise ChannelClosed("end of stream")
        return data


class ApiChannel:
    """The API's end, on the running asyncio loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, connection: socket.socket) -> "ApiChannel":
        """Take over one end of a socketpair."""
        reader, writer = await asyncio.open_connection(sock=connection, limit=2**20)
        return cls(reader, writer)

    def send(self, frame: ToEngine) -> None:
        """Write one frame without blocking; a closed channel swallows it (its reader sees the end)."""
        self._writer.write(encode(frame))

    async def frames(self) -> AsyncIterator[FromEngine]:
        """Frames as they arrive, until the engine closes its end."""
        try:
            while True:
                (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                yield pickle.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    async def close(self) -> None:
        """Close this end, dropping what has not been sent."""
        self._writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
