"""Fair reads of the database: large answers, and long lists. Lookups of rows and small answers do not wait for them.

Large answers and long lists are read from the database in the threads that decode bodies, in an order that is fair
between sharers by bytes and time. Concurrent requests for the same answer share one read and one copy. The memory for
answers that are being sent is divided between sharers (`skyrl.utils.quota`); requests above the quota are rejected with
status 429. A client that does not read its answer loses its connection (`connections`), which frees the memory.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from weakref import WeakValueDictionary

from pydantic import BaseModel
from sqlmodel import Session
from starlette.responses import Response, StreamingResponse

from skyrl.tinker.database.database import Database, Job
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.results import Answer
from skyrl.tinker.wire.sharing import LARGE_BYTES, BodyQuota, DecodePool

PIECE_BYTES = 256 * 2**10
"""Size of a piece of an answer. A connection buffers at most a few pieces that its client has not read."""


class Answers:
    """Reader of large answers. All methods are called on the event loop.

    Args:
        database: The server's database.
        decode_pool: Pool of the threads for reads.
    """

    def __init__(self, database: Database, decode_pool: DecodePool):
        self.room = BodyQuota("answers of {} bytes")
        self._database = database
        self._decode_pool = decode_pool
        self._reading: dict[tuple[str, str], asyncio.Task[Answer | None]] = {}
        """Reads in progress, by sharer and request."""
        self._held: WeakValueDictionary[str, Answer] = WeakValueDictionary()
        """Answers in memory, by request."""

    async def read(self, sharer: str, request_id: str, size: int, job: Job[Answer | None]) -> Answer | None:
        """Run `job` when the fair order reaches the sharer, and return its result.

        If the answer is in memory or already being read for the sharer, that answer is returned, and `job` is not run.

        Args:
            sharer: Sharer that requests the answer; see `Caller.sharer`.
            request_id: Request of the answer.
            size: Size of the answer in bytes.
            job: Reads the answer.
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
            reading.exception()  # marks the exception as retrieved; callers that still wait for the task get it


FINGERPRINT = "X-System-Fingerprint"
"""Header with the hash of the weights that generated a sample, as in answers of OpenAI's form."""


def sent(answer: Answer) -> Response:
    """Return an answer as a response.

    A large answer is sent in pieces as its client reads, without a copy per connection.
    """
    headers = fingerprint_of(answer)
    if len(answer.body) <= PIECE_BYTES:
        return Response(answer.body, media_type=answer.media_type, headers=headers)
    headers["Content-Length"] = str(len(answer.body))
    return StreamingResponse(_pieces(answer), media_type=answer.media_type, headers=headers)


def fingerprint_of(answer: Answer) -> dict[str, str]:
    """Return the header of a sample with the hash of its weights."""
    return {} if answer.fingerprint is None else {FINGERPRINT: answer.fingerprint}


async def _pieces(answer: Answer) -> AsyncIterator[memoryview]:
    whole = memoryview(answer.body)
    for begin in range(0, len(whole), PIECE_BYTES):
        yield whole[begin : begin + PIECE_BYTES]
        await asyncio.sleep(0)  # otherwise a client that reads everything at once would block the others


class Listings:
    """Answers requests for lists of a sharer's objects. The order is fair between sharers by the time of their reads.

    Args:
        database: The server's database.
        decode_pool: Pool of the threads for reads.
    """

    def __init__(self, database: Database, decode_pool: DecodePool):
        self._database = database
        self._decode_pool = decode_pool

    async def answer(self, caller: Caller, job: Callable[[Session], BaseModel]) -> Response:
        """Return the result of a reading job as JSON without null values."""

        def read() -> bytes:
            return self._database.read_now(job).model_dump_json(exclude_none=True).encode()

        return Response(
            await self._decode_pool.run(caller.sharer, LARGE_BYTES + 1, read), media_type="application/json"
        )
