"""Captured sessions in the database. They survive restarts and kills of the server.

A request is stored as open before it draws, and its answer is stored before its client gets the end of it. After a
kill, requests that are still open are thus lost. A lost request is made good by an answer to the same conversation.
Sessions in use are in memory, too.
"""

import asyncio
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Self, cast

import numpy as np
from sqlalchemy import CursorResult, Update, func, update
from sqlmodel import Session as Transaction
from sqlmodel import col, select

from skyrl.errors import RequestError, UnknownName
from skyrl.tinker.database.database import Database
from skyrl.tinker.database.queries.capture_rows import remove_captures
from skyrl.tinker.database.tables import CaptureAnswerRow, CaptureRow
from skyrl.tinker.sampling.capture import NODE_BYTES, Node, Plan, Session
from skyrl.utils.async_tasks import Tasks
from skyrl.utils.quota import Busy

MAX_BYTES = 4 * 2**30
"""Maximum bytes of a key's sessions."""
MAX_CACHED_BYTES = 2**28
"""Bytes of sessions in memory above which those that are not in use are only in the database."""
MAX_ANSWERS = 100_000
"""Maximum number of answers of a session."""
TOKENS, LOGPROBS = "<i4", "<f4"
Commit = Callable[[Callable[[Transaction], None]], Awaitable[None]]
"""Stores an answer: runs a job in the transaction that stores the rest of it."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class StoredSession(Session):
    """A session with its row."""

    def __init__(self, owner: str, name: str):
        super().__init__(name)
        self.owner = owner
        self.id: int | None = None
        """Id of its row; None before the first request draws."""
        self.bytes = NODE_BYTES
        self.used_at = time.time()
        self.users = 0
        """Requests and writes that use the session. Until they end, it stays in memory."""
        self.opening = asyncio.Lock()
        """Held while the row is made."""
        self.storing: list[tuple[str, Sequence[Node]]] = []
        """(hash of the request, answers) that are being stored."""

    def attach(self, node: Node) -> None:
        super().attach(node)
        self.bytes += node.nbytes

    @property
    def open(self) -> list[str]:
        return [*super().open, *(key for key, _ in self.storing)]

    def facts(self) -> dict[str, Any]:
        """Return the values of its row, with the answers that are being stored."""
        coming = [node for _, nodes in self.storing for node in nodes]
        branches = Counter(self.branches) + Counter(node.reason for node in coming if node.parent is None)
        return {
            "open": super().open,
            "answers": self.nodes + len(coming),
            "branches": dict(branches),
            "size_bytes": self.bytes + sum(node.nbytes for node in coming),
            "used_at": self.used_at,
            "reward": self.reward,
        }


class Captures:
    """Sessions of all keys. All methods are called on the event loop.

    Args:
        database: The server's database.
        lifetime_s: Seconds after its last request in which a session is served.
    """

    def __init__(self, database: Database, lifetime_s: float):
        self._database = database
        self._lifetime_s = lifetime_s
        self._sessions: OrderedDict[tuple[str, str], StoredSession] = OrderedDict()
        """Sessions in memory by owner and name, the longest unused first."""
        self._bytes = 0
        """Bytes of the sessions in memory."""
        self._tasks = Tasks()

    async def get(self, owner: str, name: str) -> StoredSession:
        """Return a session that is stored. Raises `UnknownName`."""
        session = await self._find(owner, name)
        if session is None or session.id is None:
            raise UnknownName(
                f"session={name[:200]!r} is not known; sessions are kept for {self._lifetime_s / 3600:g} hours after "
                "their last request"
            )
        return session

    async def begin(self, owner: str, name: str) -> StoredSession:
        """Return the session of a request, until `release`. It is made if it is new, and stored when the request
        draws."""
        session = await self._find(owner, name) or self._keep(StoredSession(owner, name))
        if session.nodes >= MAX_ANSWERS:
            raise RequestError(f"X-Session-ID={name!r}: has {MAX_ANSWERS} answers; begin another session")
        session.used_at = time.time()
        self._sessions.move_to_end((owner, name))
        session.users += 1
        return session

    def release(self, session: StoredSession) -> None:
        """Note the end of a request that has begun. A session without other requests and answers is forgotten."""
        session.users -= 1
        if not (session.users or session.nodes or session.open):
            self._forget(session)
            if session.id is not None:
                self._tasks.start(self._remove(session))

    async def list(self, owner: str) -> list[dict[str, Any]]:
        """Return the facts of an owner's sessions, the longest unused first."""
        wanted = select(CaptureRow).where(CaptureRow.owner == owner, CaptureRow.used_at >= self._oldest())
        rows = await self._database.read(lambda db: db.exec(wanted.order_by(col(CaptureRow.used_at))).all())
        return [self.facts(row) for row in rows]

    def facts(self, row: CaptureRow | StoredSession) -> dict[str, Any]:
        """Return what a client is told of a session."""
        live = row if isinstance(row, StoredSession) else self._sessions.get((row.owner, row.name))
        running = live.running.total() if live else 0
        return {
            "id": row.name,
            "object": "capture",
            "answers": row.nodes if isinstance(row, StoredSession) else row.answers,
            "running": running,
            "lost": len(row.open) - running,
            "complete": not row.open,
            "reward": row.reward,
            "branches": row.branches,
        }

    async def set_reward(self, session: StoredSession, reward: float) -> None:
        """Give a session its reward."""
        session.reward = reward
        session.users += 1
        try:
            await self._store_facts(session)
        finally:
            session.users -= 1

    async def drop(self, owner: str, name: str) -> None:
        """Forget a session. Raises `UnknownName`."""
        session = await self.get(owner, name)
        self._forget(session)
        await self._remove(session)

    async def drain(self) -> None:
        """Wait until all ends of requests are stored."""
        await self._tasks.drain()

    async def open(self, session: StoredSession, plan: Plan) -> None:
        """Store that a request draws. Raises `Busy` if the owner's sessions are too large."""
        async with session.opening:
            session.id = session.id or await self._database.write(partial(_create, session=session))
        session.running[plan.hash] += 1
        try:
            await self._database.write(partial(_open, session=session, changed=_update(session), since=self._oldest()))
        except BaseException:
            _take(session.running, plan.hash)
            self._tasks.start(self._store_facts(session))  # the write may have been made
            raise

    def reject(self, session: StoredSession, plan: Plan) -> None:
        """Store that a request drew nothing."""
        _take(session.running, plan.hash)
        self._tasks.start(self._store_facts(session))

    def lose(self, session: StoredSession, plan: Plan) -> None:
        """Note that what a request drew is not known. It is stored as open already."""
        _take(session.running, plan.hash)
        session.lost[plan.hash] += 1

    async def answer(
        self,
        session: StoredSession,
        plan: Plan,
        nodes: Sequence[Node],
        commit: Commit,
    ) -> None:
        """Store the answers to a request. `commit` runs a job in the transaction that stores the rest of the answer."""
        key, rows = plan.hash, list[CaptureAnswerRow]()
        _take(session.running, key)
        made_good = session.lost[key] > 0
        if made_good:
            _take(session.lost, key)
        session.users += 1
        session.storing.append((key, nodes))
        changed = _update(session)

        def store(db: Transaction) -> None:  # may run again
            rows[:] = [_row(node, session.id) for node in nodes]
            if cast(CursorResult[Any], db.execute(changed)).rowcount:  # else a client has deleted the session
                db.add_all(rows)
                db.flush()

        try:
            await commit(store)
        except BaseException:
            session.lost[key] += 1 + made_good
            self._tasks.start(self._store_facts(session))
            raise
        else:
            for node, row in zip(nodes, rows, strict=True):
                node.id = row.id
                session.attach(node)
            if self._sessions.get((session.owner, session.name)) is session:  # else a client has deleted it
                self._bytes += sum(node.nbytes for node in nodes)
        finally:
            session.storing.remove((key, nodes))
            self.release(session)

    async def _find(self, owner: str, name: str) -> StoredSession | None:
        since, session = self._oldest(), self._sessions.get((owner, name))
        if session is None:
            found = await self._database.read(partial(_load, owner=owner, name=name, since=since))
            session = self._sessions.get((owner, name))  # another request may have loaded it meanwhile
            if session is None and found is not None:
                session = self._keep(found)
        if session is not None and session.used_at < since and not session.users:
            self._forget(session)
            return None
        return session

    def _keep(self, session: StoredSession) -> StoredSession:
        """Keep a session in memory, and forget others that are in the database and not in use."""
        self._sessions[session.owner, session.name] = session
        self._bytes += session.bytes
        while self._bytes > MAX_CACHED_BYTES:
            oldest = next((one for one in self._sessions.values() if not one.users and one is not session), None)
            if oldest is None:
                break
            self._forget(oldest)
        return session

    def _forget(self, session: StoredSession) -> None:
        """Forget a session in memory."""
        if self._sessions.get((session.owner, session.name)) is session:
            del self._sessions[session.owner, session.name]
            self._bytes -= session.bytes

    def _oldest(self) -> float:
        """Return the time since which sessions must have been used to be served."""
        return time.time() - self._lifetime_s

    async def _store_facts(self, session: StoredSession) -> None:
        changed = _update(session)
        await self._database.write(lambda db: db.execute(changed))

    async def _remove(self, session: StoredSession) -> None:
        await self._database.write(lambda db: remove_captures(db, [session.id]))


class Call:
    """A request of a captured session, as a context. It is lost if it ends without an answer after it began to draw."""

    def __init__(self, captures: Captures, owner: str, name: str):
        if not NAME.fullmatch(name):
            raise RequestError(
                f"X-Session-ID={name[:200]!r}: use 1 to 128 letters, digits, '.', '_' or '-', a letter or digit first"
            )
        self._captures = captures
        self._owner = owner
        self._name = name
        self._open = False
        """True while the request is stored as one that draws."""
        self.session: StoredSession
        self.plan: Plan
        self.sent = False
        """True once the client may have got a part of the answer."""

    async def __aenter__(self) -> Self:
        self.session = await self._captures.begin(self._owner, self._name)
        return self

    async def open(self) -> None:
        """Store that the request draws. `plan` must be set."""
        await self._captures.open(self.session, self.plan)
        self._open = True

    def answer(self, nodes: Sequence[Node], commit: Commit) -> Coroutine[Any, Any, None]:
        """Store the answers. See `Captures.answer`."""
        self._open = False  # from here on, also if the request is cancelled before the coroutine begins
        return self._captures.answer(self.session, self.plan, nodes, commit)

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._open and kind is not None and issubclass(kind, RequestError | Busy) and not self.sent:
            self._captures.reject(self.session, self.plan)
        elif self._open:
            self._captures.lose(self.session, self.plan)
        self._captures.release(self.session)


def _take(counts: Counter[str], key: str) -> None:
    """Count one less."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def _update(session: StoredSession) -> Update:
    return update(CaptureRow).where(col(CaptureRow.id) == session.id).values(session.facts())


def _open(db: Transaction, session: StoredSession, changed: Update, since: float) -> None:
    """Store the facts of a session with a new request. Raises `Busy`."""
    served = CaptureRow.owner == session.owner, CaptureRow.used_at >= since
    taken = db.exec(select(func.sum(CaptureRow.size_bytes)).where(*served)).one() or 0
    if taken > MAX_BYTES:
        raise Busy(f"the captured sessions of this key take {taken} bytes of at most {MAX_BYTES}; read and delete some")
    db.execute(changed)


def _create(db: Transaction, session: StoredSession) -> int:
    """Make the row of a new session, in place of one that is too old. Returns its id."""
    mine = CaptureRow.owner == session.owner, CaptureRow.name == session.name
    remove_captures(db, db.exec(select(col(CaptureRow.id)).where(*mine)).all())
    row = CaptureRow(owner=session.owner, name=session.name, **session.facts())
    db.add(row)
    db.flush()
    assert row.id is not None
    return row.id


def _load(db: Transaction, owner: str, name: str, since: float) -> StoredSession | None:
    """Read a session that was used since a time. Its requests without an answer are lost, as none of them runs."""
    wanted = select(CaptureRow).where(CaptureRow.owner == owner, CaptureRow.name == name)
    row = db.exec(wanted.where(CaptureRow.used_at >= since)).one_or_none()
    if row is None:
        return None
    session = StoredSession(owner, name)
    session.id, session.reward, session.used_at, session.lost = row.id, row.reward, row.used_at, Counter(row.open)
    nodes: dict[int | None, Node | None] = {None: None}
    answers = select(CaptureAnswerRow).where(CaptureAnswerRow.capture_id == row.id)
    for answer in db.exec(answers.order_by(col(CaptureAnswerRow.id))):
        if answer.parent_id in nodes:
            node = nodes[answer.id] = _node(answer, nodes[answer.parent_id])
            session.attach(node)
    return session


def _row(node: Node, capture_id: int | None) -> CaptureAnswerRow:
    assert capture_id is not None
    return CaptureAnswerRow(
        capture_id=capture_id,
        parent_id=None if node.parent is None else node.parent.id,
        reason=node.reason,
        history=node.history,
        setting=node.setting,
        version=node.version,
        added=node.added.astype(TOKENS).tobytes(),
        tokens=node.tokens.astype(TOKENS).tobytes(),
        logprobs=node.logprobs.astype(LOGPROBS).tobytes(),
    )


def _node(row: CaptureAnswerRow, parent: Node | None) -> Node:
    added, tokens = (np.frombuffer(data, TOKENS) for data in (row.added, row.tokens))
    logprobs = np.frombuffer(row.logprobs, LOGPROBS)
    return Node(parent, row.reason, row.history, row.setting, added, tokens, logprobs, row.version, row.id)
