"""Lists, read and written out in fair turns with bodies: the longest of one tenant delays nobody's look at one row."""

from collections.abc import Callable

from pydantic import BaseModel
from sqlmodel import Session
from starlette.responses import Response

from skyrl.tinker.database.database import Database
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.wire.sharing.decode_pool import LARGE_BYTES, DecodePool


class Listings:
    """Answers with what a tenant has, in fair order, by the time that its lists have taken.

    Args:
        database: Of the server.
        decode_pool: Whose threads they are read in.
    """

    def __init__(self, database: Database, decode_pool: DecodePool):
        self._database = database
        self._decode_pool = decode_pool

    async def answer(self, caller: Caller, job: Callable[[Session], BaseModel]) -> Response:
        """Result of a reading job, as JSON without its Nones."""

        def read() -> bytes:
            return self._database.read_now(job).model_dump_json(exclude_none=True).encode()

        return Response(
            await self._decode_pool.run(caller.sharer, LARGE_BYTES + 1, read), media_type="application/json"
        )
