"""Puts training requests into the log, large ones compressed, and finds out whether they are there.

A database may store a transaction and its answer be lost, as when a PostgreSQL server is replaced. Then the request is
in the log and has to be done, or all that comes after it would wait. So a write without an answer is asked for again,
until there is one: a request that is found in the log was put there by an earlier try.
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
from skyrl.tinker.wire.sharing.decode_pool import LARGE_BYTES, DecodePool

PASSES = ("forward_backward", "forward")
"""Kinds of requests that are read whether they are compressed or not."""
LEVEL = -1
"""Level of zstd: takes less time than the disk does for what it saves."""


class LogWriter:
    """Appends to the log. All methods are called on the event loop."""

    def __init__(self, database: Database, decode_pool: DecodePool):
        self._writer = RetryingWriter(database)
        self._decode_pool = decode_pool

    async def append(self, entry: Entry, refusal: Failure | None, on_log: Callable[[Session], None]) -> Logged:
        """Call `request_log.append`, and return once the database has answered. Raises `Stopped`.

        Any other error means that the request is not in the log.
        """
        if entry.kind in PASSES and not entry.content_encoding:
            entry = await self._decode_pool.run(entry.tenant, len(entry.body), partial(compressed, entry))
        job, what = _Append(entry, refusal, on_log), f"request {entry.request_id}"
        try:
            return await self._writer.write(job, what)
        except IntegrityError:  # with an earlier try of it, which has taken effect after all? Then this one finds it
            return await self._writer.write(job, what)

    def stop(self) -> None:
        """Try nothing again any more."""
        self._writer.stop()


def compressed(entry: Entry) -> Entry:
    """The entry with its body compressed, if that is large."""
    if len(entry.body) <= LARGE_BYTES:
        return entry
    return replace(entry, body=zstandard.ZstdCompressor(level=LEVEL).compress(entry.body), content_encoding="zstd")


@dataclass
class _Append:
    """A job of the database: to log a request, unless an earlier try of it has."""

    entry: Entry
    refusal: Failure | None
    on_log: Callable[[Session], None]
    tried: bool = False
    """By us, or by the writer, which does alone again what it could not do in a group."""

    def __call__(self, session: Session) -> Logged:
        if self.tried:
            with suppress(UnknownName):
                _, outcome = request_log.outcome_of(session, self.entry.request_id)
                return Logged(self.entry.request_id, outcome if isinstance(outcome, Failure) else None)
        self.tried = True
        return request_log.append(session, self.entry, self.refusal, self.on_log)
