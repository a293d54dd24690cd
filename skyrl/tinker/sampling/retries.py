"""Answers that a retry gets again, over restarts and kills of the server.

With the header `Idempotency-Key`: the first request with a key is served to its end, also if its client goes. A later
one with the same key and body gets the same answer, or the rest of it. An error is not kept: a retry after it is a new
request.

Without the header: a whole answer is stored before it is sent, and removed once it was sent. If the connection breaks
or the server is killed in between, one retry with the same body gets it. Other requests with the same body are samples
of their own.
"""

import asyncio
import hashlib
import json
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from sqlmodel import Session, col, delete, select

from skyrl.errors import RequestError
from skyrl.tinker.database.database import Database
from skyrl.tinker.database.log.request_log import result_row
from skyrl.tinker.database.tables import ResultRow
from skyrl.utils.async_tasks import Tasks

MAX_KEY = 255
"""Maximum characters of a key."""
MAX_UNSENT = 100_000
"""Maximum number of requests without a key whose answers wait for a retry."""
KEYED, UNSENT = "answer-", "unsent-"
"""Prefixes of the ids of stored answers: those with a key, and those that were not sent."""
JSON = "application/json"


@dataclass
class Asked:
    """A request, as its retries are recognized."""

    owner: str
    path: str
    body: bytes
    key: str | None = None
    retry: bool = False
    """True if the client says that it is a retry."""
    digest: str = field(init=False)
    row: str | None = None
    """Id of the answer in the database."""
    stored: bool = False
    """True while the answer is stored and waits to be sent."""
    broken: bool = False
    """True if the client has gone."""

    def __post_init__(self) -> None:
        if self.key is not None and not 0 < len(self.key) <= MAX_KEY:
            raise RequestError(f"Idempotency-Key: has {len(self.key)} characters; use 1 to {MAX_KEY}")
        self.digest = hashlib.sha256(self.body).hexdigest()

    @property
    def name(self) -> str:
        """The same for a request and its retries."""
        what = [self.owner, self.path, self.digest] if self.key is None else [self.owner, self.path, "", self.key]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:40]


class Kept:
    """The events of a running request with a key, as they come."""

    def __init__(self, events: AsyncIterator[Any], digest: str):
        self.digest = digest
        self.events: list[Any] = []
        self._more = asyncio.Condition()
        self.task = asyncio.create_task(self._collect(events))

    async def read(self) -> AsyncGenerator[Any, None]:
        """Yield all events, from the first. Raises the error that ended them."""
        for number in range(2**62):
            async with self._more:
                await self._more.wait_for(lambda number=number: number < len(self.events) or self.task.done())
            if number >= len(self.events):
                self.task.result()
                return
            yield self.events[number]

    async def _collect(self, events: AsyncIterator[Any]) -> None:
        try:
            async for event in events:
                self.events.append(event)
                async with self._more:
                    self._more.notify_all()
        finally:
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self._end()))

    async def _end(self) -> None:
        async with self._more:
            self._more.notify_all()


class Retries:
    """Stored answers of requests. All methods are called on the event loop."""

    def __init__(self, database: Database):
        self._database = database
        self._running: dict[str, Kept] = {}
        """Running requests with a key, by name."""
        self._unsent: defaultdict[str, list[str]] = defaultdict(list)
        """Ids of stored answers without a key whose connection broke, by the name of their request."""
        self._tasks = Tasks()

    def load(self, session: Session) -> None:
        """Find the answers that a server before this one did not send."""
        self._unsent.clear()
        unsent = col(ResultRow.request_id).startswith(UNSENT, autoescape=True)
        for row in session.exec(select(ResultRow.request_id).where(unsent).order_by(col(ResultRow.finished_at))):
            self._unsent[row.split("-")[1]].append(row)

    async def events(self, asked: Asked, begin: Callable[[], AsyncGenerator[Any, None]]) -> AsyncGenerator[Any, None]:
        """Return the events of an answer: those of the first request if this is a retry, else of `begin`.

        Raises `RequestError` if the key was used for another body.
        """
        name = asked.name
        if asked.key is None:
            stored = await self._claim(asked) if asked.retry and self._unsent.get(name) else None
            return begin() if stored is None else _replay(stored)
        if name not in self._running:
            row = await self._database.read(lambda session: session.get(ResultRow, KEYED + name))
            if row is not None and name not in self._running:
                stored = json.loads(row.body)
                _check(asked, stored["digest"])
                return _replay(stored["events"])
        kept = self._running.get(name)
        if kept is None:
            kept = self._running[name] = Kept(begin(), asked.digest)
            kept.task.add_done_callback(lambda task: self._ended(name, task))
        _check(asked, kept.digest)
        return kept.read()

    def job(self, asked: Asked, events: list[Any], is_stream: bool) -> Callable[[Session], None] | None:
        """Return the job that stores an answer; None if it is not stored, as nothing sends a stream again."""
        if asked.key is None and is_stream:
            return None
        asked.row = KEYED + asked.name if asked.key is not None else f"{UNSENT}{asked.name}-{uuid4().hex}"
        row_id, stored = asked.row, {"digest": asked.digest, "events": events}

        def store(session: Session) -> None:
            body = json.dumps(stored, separators=(",", ":")).encode()
            session.merge(result_row(row_id, body, JSON, time.time()))

        return store

    def stored(self, asked: Asked) -> None:
        """Note that the answer is in the database."""
        asked.stored = asked.row is not None and asked.key is None
        if asked.broken:
            self._offer(asked)

    def broke(self, asked: Asked) -> None:
        """Note that the connection of a request has ended before its answer was sent."""
        asked.broken = True
        self._offer(asked)

    def sent(self, asked: Asked) -> None:
        """Note that an answer was sent. Without a key, no retry gets it any more."""
        if asked.stored and asked.row is not None:
            asked.stored = False
            self._tasks.start(self._forget(asked.row))

    async def drain(self) -> None:
        """Wait until all sent answers are removed."""
        await self._tasks.drain()

    def _offer(self, asked: Asked) -> None:
        """Let a retry get an answer that is not sent."""
        if asked.stored and asked.row is not None:
            asked.stored = False
            self._unsent[asked.name].append(asked.row)
            while len(self._unsent) > MAX_UNSENT:
                del self._unsent[next(iter(self._unsent))]

    async def _claim(self, asked: Asked) -> list[Any] | None:
        """Take an answer that was not sent, for this retry alone."""
        while rows := self._unsent.get(asked.name):
            row_id = rows.pop(0)
            if not rows:
                del self._unsent[asked.name]
            try:
                row = await self._database.read(lambda session, row_id=row_id: session.get(ResultRow, row_id))
            except BaseException:
                self._unsent[asked.name].append(row_id)
                raise
            if row is not None:
                asked.row, asked.stored = row_id, True
                return json.loads(row.body)["events"]
        return None

    async def _forget(self, row: str) -> None:
        await self._database.write(
            lambda session: session.exec(delete(ResultRow).where(col(ResultRow.request_id) == row))
        )

    def _ended(self, name: str, task: "asyncio.Task[None]") -> None:
        del self._running[name]
        if not task.cancelled():
            task.exception()  # readers raise it


def _check(asked: Asked, digest: str) -> None:
    if asked.digest != digest:
        raise RequestError(f"Idempotency-Key={asked.key!r}: was used for another request; use a new key")


async def _replay(events: list[Any]) -> AsyncGenerator[Any, None]:
    for event in events:
        yield event
