"""Appends training requests to the log, compresses large ones, and resolves writes with an unknown outcome.

A database may commit a transaction and lose the answer, for example when a PostgreSQL server is replaced. The request
is then in the log and must be done, or later requests of its model would wait for ever. A write without an answer is
therefore retried until there is one. A retry that finds the request in the log treats it as written.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import zstandard
from sqlalchemy.exc import IntegrityError
from sqlmodel import Session

from skyrl.errors import UnknownName
from skyrl.tinker.database.database import Database
from skyrl.tinker.database.log import request_log
from skyrl.tinker.database.log.request_log import Entry, Logged
from skyrl.tinker.database.retrying_writer import RetryingWriter
from skyrl.tinker.results import Failure
from skyrl.tinker.wire.sharing import LARGE_BYTES, DecodePool

PASSES = ("forward_backward", "forward")
"""Kinds of requests whose bodies can be read whether or not they are compressed."""
LEVEL = -1
"""Compression level of zstd. At this level, compression takes less time than it saves in writing to disk."""


class LogWriter:
    """Appends to the log. All methods are called on the event loop."""

    def __init__(self, database: Database, decode_pool: DecodePool):
        self._writer = RetryingWriter(database)
        self._decode_pool = decode_pool

    async def append(self, entry: Entry, refusal: Failure | None, on_log: Callable[[Session], None]) -> Logged:
        """Run `request_log.append`, and return when the database has answered. Raises `Stopped`.

        After any other error, the request is not in the log.
        """
        if entry.kind in PASSES and not entry.content_encoding:
            entry = await self._decode_pool.run(entry.tenant, len(entry.body), partial(compressed, entry))
        job, what = _Append(entry, refusal, on_log), f"request {entry.request_id}"
        try:
            return await self._writer.write(job, what)
        except IntegrityError:  # perhaps an earlier attempt was committed after all; then this one finds its row
            return await self._writer.write(job, what)

    def stop(self) -> None:
        """Stop all retries."""
        self._writer.stop()


def compressed(entry: Entry) -> Entry:
    """Return the entry with its body compressed, if it is large."""
    if len(entry.body) <= LARGE_BYTES:
        return entry
    return replace(entry, body=zstandard.ZstdCompressor(level=LEVEL).compress(entry.body), content_encoding="zstd")


@dataclass
class _Append:
    """Database job that logs a request, unless an earlier attempt has logged it."""

    entry: Entry
    refusal: Failure | None
    on_log: Callable[[Session], None]
    tried: bool = False
    """True after the first attempt. Retries come from `RetryingWriter`, and from the writer when a group of jobs fails.
    """

    def __call__(self, session: Session) -> Logged:
        if self.tried:
            with suppress(UnknownName):
                _, outcome = request_log.outcome_of(session, self.entry.request_id)
                return Logged(self.entry.request_id, outcome if isinstance(outcome, Failure) else None)
        self.tried = True
        return request_log.append(session, self.entry, self.refusal, self.on_log)
