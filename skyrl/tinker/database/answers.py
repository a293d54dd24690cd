"""Large answers on their way to who asked for them: in whose turn they are read, and how much is held meanwhile.

They are read from the database in fair order, by bytes and time, in the threads that decode bodies: neither the
answers of others nor rows that are looked up wait for them. Those who ask for one at the same time share one read, and
one copy. What is held until it is sent is shared between those who asked as in `quota`; who asks for more is turned
away (429) for a moment. A client that does not take its answer loses the connection (`connections`), and so gives the
room back.
"""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from weakref import WeakValueDictionary

from starlette.responses import Response, StreamingResponse

from skyrl.tinker.database.database import Database, Job
from skyrl.tinker.results import Answer
from skyrl.tinker.wire.sharing.body_quota import BodyQuota
from skyrl.tinker.wire.sharing.decode_pool import LARGE_BYTES, DecodePool

PIECE_BYTES = 256 * 2**10
"""Sent at once. What a connection has taken in and its client has not is no more than a few of these."""


class Answers:
    """All methods are called on the event loop.

    Args:
        database: Of the server.
        decode_pool: Whose threads they are read in.
    """

    def __init__(self, database: Database, decode_pool: DecodePool):
        self.room = BodyQuota("answers of {} bytes")
        self._database = database
        self._decode_pool = decode_pool
        self._reading: dict[tuple[str, str], asyncio.Task[Answer | None]] = {}
        """By who asks and the request."""
        self._held: WeakValueDictionary[str, Answer] = WeakValueDictionary()
        """Answers that somebody still has, by their requests."""

    async def read(self, sharer: str, request_id: str, size: int, job: Job[Answer | None]) -> Answer | None:
        """Result of `job`, read in the sharer's turn if nobody reads or has it already.

        Args:
            sharer: Who asks; see `Caller.sharer`.
            request_id: Whose answer it is.
            size: Of its body.
            job: Reads it.
        """
        if (held := self._held.get(request_id)) is not None:
            return held
        place = sharer, request_id
        if (reading := self._reading.get(place)) is None:
            reading = self._reading[place] = asyncio.create_task(self._read(sharer, request_id, size, job))
            reading.add_done_callback(partial(self._ended, place))
        return await asyncio.shield(reading)  # others may wait for it, too

    async def _read(self, sharer: str, request_id: str, size: int, job: Job[Answer | None]) -> Answer | None:
        answer = await self._decode_pool.run(sharer, max(size, LARGE_BYTES + 1), partial(self._database.read_now, job))
        if answer is not None:
            self._held[request_id] = answer
        return answer

    def _ended(self, place: tuple[str, str], reading: asyncio.Task[Answer | None]) -> None:
        del self._reading[place]
        if not reading.cancelled():
            reading.exception()  # is not lost: who still waits has it, and nobody else wants it


def sent(answer: Answer) -> Response:
    """An answer as a response; a large one goes as its client takes it, so that no connection has a copy of it."""
    if len(answer.body) <= PIECE_BYTES:
        return Response(answer.body, media_type=answer.media_type)
    length = {"Content-Length": str(len(answer.body))}
    return StreamingResponse(_pieces(answer), media_type=answer.media_type, headers=length)


async def _pieces(answer: Answer) -> AsyncIterator[memoryview]:
    whole = memoryview(answer.body)
    for begin in range(0, len(whole), PIECE_BYTES):
        yield whole[begin : begin + PIECE_BYTES]
        await asyncio.sleep(0)  # or a client that takes all of it at once keeps the others waiting
