"""Receiving end of the API process: reads frames of the engine into their final memory.

A stream reader copies its input several times while it holds the interpreter; with answers of 128 MiB, this took half
of the time of a busy API process. Here, long parts are read from the socket directly into their own memory.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Generator, Sequence

import numpy as np

from skyrl.tinker.processes.frames import NUMBER

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
