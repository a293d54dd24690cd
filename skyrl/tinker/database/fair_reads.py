"""Fair scheduling of reads of long lists, together with the decoding of bodies. A long list does not delay lookups of
rows.
"""

from collections.abc import Callable

from pydantic import BaseModel
from sqlmodel import Session
from starlette.responses import Response

from skyrl.tinker.database.database import Database
from skyrl.tinker.identity.callers import Caller
from skyrl.tinker.wire.sharing import LARGE_BYTES, DecodePool


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
